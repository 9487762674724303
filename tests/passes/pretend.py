"""Run a graph in one process with collectives that depend on every argument and are not there until waited on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, fx

from ir.collectives import comm
from wholestep.ir import StepGraph
from wholestep.ir.effects import is_collective, is_wait


class Pretend(fx.Interpreter):
    """A collective reads its operands at once; its result is not a number until somebody waits."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.issued: list[str] = []
        self._arriving: dict[int, tuple[Tensor, Tensor]] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_collective(target):
            self.issued.append(str(target))
            operand, *scalars = args
            pieces = operand if isinstance(operand, list | tuple) else [operand]
            results = [self._start(piece, f"{target}{scalars}{kwargs}", target) for piece in pieces]
            return results if isinstance(operand, list | tuple) else results[0]
        if is_wait(target):
            result, content = self._arriving[args[0].untyped_storage().data_ptr()]
            result.copy_(content)
            return args[0]
        return super().call_function(target, args, kwargs)

    def _start(self, operand: Tensor, call: str, target: Any) -> Tensor:
        factor = 1 + int(hashlib.sha256(call.encode()).hexdigest()[:4], 16) / 2**16
        if target in (comm.all_gather_into_tensor.default, comm.all_gather_into_tensor_coalesced.default):
            content = torch.cat([operand * factor, operand + factor])
        elif target is comm.reduce_scatter_tensor.default:
            content = operand[: operand.shape[0] // 2] * factor
        else:
            content = operand * factor
        result = torch.full_like(content, torch.nan)
        self._arriving[result.untyped_storage().data_ptr()] = (result, content)
        return result


def run(step: StepGraph, seed: int = 0) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Results, inputs afterwards, and the collectives that were issued."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn([int(d) for d in node.meta["val"].shape], generator=generator).to(node.meta["val"].dtype)
        for node in step.gm.graph.find_nodes(op="placeholder")
    ]
    pretend = Pretend(step.gm)
    torch.manual_seed(seed)
    results = pretend.run(*inputs)
    return list(results), inputs, pretend.issued


def shared_pairs(tensors: list[Tensor]) -> set[tuple[int, int]]:
    """Which of some tensors share memory."""
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return {(i, j) for j in range(len(memory)) for i in range(j) if memory[i] == memory[j]}
