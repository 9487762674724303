"""Run a graph before and after a pass on the same real tensors, in one process, and hold the pass to its contract.

Collectives are computed as if rank k had (1 + k/8) times what this rank has: linear, so that concatenating and
splitting agree with them, and different for each rank, so that shards in a wrong order are seen.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from wholestep._torch_compat import pytree
from wholestep.errors import OptionError, VerifyError
from wholestep.ir.effects import is_wait
from wholestep.ir.groups import group_of, group_size
from wholestep.ir.meta import node_meta
from wholestep.passes.contract import Numerics

_SEED = 20261115
_STEP = 1 / 8


class Replay:
    """What a graph computes from made-up inputs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._inputs = _inputs(gm)
        try:
            self._results = _run(gm, self._inputs)
        except Exception as error:
            unknown = [n.name for n in gm.graph.nodes if n.op == "placeholder" and n.meta.get("val") is None]
            raise OptionError(
                f"the graph cannot be replayed on made-up inputs: {type(error).__name__}: {str(error).splitlines()[0]}",
                fix=f'set `node.meta["val"]` of {", ".join(unknown[:8])}, or use a lower level of verify.'
                if unknown
                else "use a lower level of verify.",
            ) from error

    def compare(self, gm: fx.GraphModule, numerics: Numerics) -> None:
        """Raise VerifyError if the graph now gives other results than the contract allows."""
        results = _run(gm, self._inputs)
        for (what, node), before, after in zip(_names(gm), self._results, results, strict=True):
            if not _same(before, after, numerics):
                meta = node_meta(node) if node is not None else None
                raise VerifyError(
                    f"{what} has other values than before the pass, which promises numerics={numerics!r}: "
                    f"{_difference(before, after)}.",
                    node=node.name if node is not None else "",
                    location=meta.location if meta is not None else None,
                )


def _inputs(gm: fx.GraphModule) -> list[Any]:
    generator = torch.Generator().manual_seed(_SEED)
    found: list[Any] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            found.append(_made_up(node.meta.get("val"), generator))
    return found


def _made_up(val: Any, generator: torch.Generator) -> Any:
    if isinstance(val, Tensor):
        shape = [_size(s) for s in val.shape]
        if val.is_floating_point():
            data = torch.rand(shape, generator=generator, dtype=torch.float64).add_(0.1)
        elif val.dtype is torch.bool:
            data = torch.zeros(shape)
        else:
            data = torch.ones(shape)
        made = torch.empty_strided(shape, [_size(s) for s in val.stride()], dtype=val.dtype)
        return made.copy_(data)
    if isinstance(val, torch.SymInt | torch.SymFloat):
        return val.node.hint
    return val if val is not None else 0.5


def _size(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _run(gm: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """Outputs and the final contents of the inputs."""
    own = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(_SEED)
        with torch.no_grad():
            outputs = _Run(gm).run(*own)
    finally:
        torch.random.set_rng_state(state)
    return [*pytree.tree_leaves(outputs), *own]


def _names(gm: fx.GraphModule) -> list[tuple[str, fx.Node | None]]:
    nodes = list(gm.graph.nodes)
    outputs = pytree.tree_leaves(nodes[-1].args[0])
    found: list[tuple[str, fx.Node | None]] = [
        (f"output {i}", value if isinstance(value, fx.Node) else None) for i, value in enumerate(outputs)
    ]
    return found + [(f"input {n.name}, after the step,", n) for n in nodes if n.op == "placeholder"]


class _Run(fx.Interpreter):
    """Ranks that are not there are computed."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and is_wait(n.target):
            return self.fetch_args_kwargs_from_env(n)[0][0]
        if n.op == "call_function" and group_of(n) is not None:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return _collective(str(n.target), args, group_size(n))
        if n.op == "call_function" and "device" in n.kwargs:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self.call_function(n.target, args, {**kwargs, "device": "cpu"})
        return super().run_node(n)


def _collective(name: str, args: tuple[Any, ...], size: int) -> Any:
    operand = args[0]
    if isinstance(operand, list | tuple):
        return [_collective(name, (one, *args[1:]), size) for one in operand]
    factors = [1 + k * _STEP for k in range(size)]
    if "all_gather" in name:
        return torch.cat([_times(operand, f) for f in factors])
    if "broadcast" in name:
        return operand.clone()
    if "all_to_all" in name:
        return operand.clone()
    op = str(args[1])
    total = {
        "sum": sum(factors),
        "avg": sum(factors) / size,
        "max": factors[-1],
        "min": factors[0],
        "product": math.prod(factors),
    }[op]
    whole = _times(operand, total)
    return whole.chunk(size)[0].clone() if "reduce_scatter" in name else whole


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor.clone()


def _same(before: Any, after: Any, numerics: Numerics) -> bool:
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return bool(before == after) or type(before) is type(after) is float
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if numerics == "exact":
        return bool(torch.equal(before, after)) or _equal_with_nans(before, after)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(before.dtype, 2e-2)
    return bool(torch.allclose(before.double(), after.double(), rtol=tolerance, atol=tolerance, equal_nan=True))


def _equal_with_nans(before: Tensor, after: Tensor) -> bool:
    if not before.is_floating_point():
        return False
    return bool(((before == after) | (before.isnan() & after.isnan())).all())


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape:
        different = before != after
        gap = (before.double() - after.double()).abs().max().item() if before.numel() else 0.0
        return f"{int(different.sum())} of {before.numel()} elements differ, by at most {gap:.3g}"
    return f"{before!r:.80} became {after!r:.80}"
