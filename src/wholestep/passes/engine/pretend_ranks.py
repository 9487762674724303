"""Run a graph with collectives in one process: what the other ranks would send is computed from what this rank has.

Rank k has (1 + k/8) times the floats of this rank and (1 + k) times its integers: linear, so that concatenating,
splitting and adding agree with it, and different for each rank, so that shards in a wrong order, another root and
another reduce op are detected. Booleans are the same everywhere. This rank is rank 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import is_collective, is_wait, written_positions
from wholestep.ir.groups import group_of, group_size
from wholestep.passes.plain_collectives import arguments_by_position
from wholestep.torch_private.operators import OpOverload, op_name

_STEP = 1 / 8
_BITWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class PretendRanks(fx.Interpreter):
    """Runs a graph module as rank 0 of its groups, on the CPU."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and (is_wait(n.target) or (is_collective(n.target) and group_of(n) is not None)):
            assert isinstance(n.target, OpOverload)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            given = arguments_by_position(n.target, args, kwargs)
            if is_wait(n.target):
                return given[0]
            result = collective(op_name(n.target), given, group_size(n))
            return self._written(n.target, given, kwargs, result)
        if n.op == "call_function" and "device" in n.kwargs:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self.call_function(n.target, args, {**kwargs, "device": "cpu"})
        return super().run_node(n)

    @staticmethod
    def _written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result of a collective that writes in place or to `out`: what it wrote."""
        if not written_positions(op):
            return result
        into = kwargs.get("out", args[0])
        for one, new in zip(into, result, strict=True) if isinstance(into, list | tuple) else [(into, result)]:
            one.copy_(new)
        return into


def collective(name: str, args: tuple[Any, ...], size: int) -> Any:
    """The result of a collective on rank 0."""
    operand = args[0]
    if isinstance(operand, list | tuple):
        return [collective(name, (one, *args[1:]), size) for one in operand]
    if "all_gather" in name:
        return torch.cat([_of_rank(operand, k) for k in range(size)])
    if "broadcast" in name:
        return _of_rank(operand, int(args[1]) % size)
    if "all_to_all" in name:
        return _exchanged(operand, args, size)
    if "reduce" not in name:
        return operand.clone()
    whole = _reduced(operand, str(args[1]), size)
    return whole.chunk(size)[0].clone() if "reduce_scatter" in name else whole


def _of_rank(tensor: Tensor, rank: int) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor.clone()
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * (1 + rank * _STEP)
    return tensor * (1 + rank)


def _reduced(operand: Tensor, op: str, size: int) -> Tensor:
    """The reduction over ranks that are multiples of each other. The end ranks have the least and the most."""
    if op in _BITWISE:
        return functools.reduce(_BITWISE[op], (_of_rank(operand, k) for k in range(size)))
    if operand.dtype is torch.bool:
        return operand.clone()
    whole = not (operand.is_floating_point() or operand.is_complex())
    factors = [1 + k * (1 if whole else _STEP) for k in range(size)]
    if op in ("max", "min"):
        pick = torch.maximum if op == "max" else torch.minimum
        return pick(_of_rank(operand, 0), _of_rank(operand, size - 1))
    if op == "product":
        return operand**size * (math.prod(map(int, factors)) if whole else math.prod(factors))
    total = operand * (int(sum(factors)) if whole else sum(factors))
    if op == "avg":
        return total // size if whole else operand * (sum(factors) / size)
    return total  # sum, and scaled sums with an unknown scale


def _exchanged(operand: Tensor, args: tuple[Any, ...], size: int) -> Tensor:
    """Rank k sends us its first rows: as many as we expect from it."""
    rows = operand.shape[0]
    expected = list(args[1]) if len(args) > 1 and args[1] else [rows // size] * size
    pieces = []
    for k, count in enumerate(expected):
        which = torch.arange(count) % max(rows, 1)
        given = _of_rank(operand, k)
        pieces.append(given[which] if rows else given.new_zeros(count, *operand.shape[1:]))
    return torch.cat(pieces)
