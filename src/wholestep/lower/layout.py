"""Results of a region with the strides that its nodes say, whatever decompositions and functionalization made of them.

Others rely on the strides: `view` outside of the region, random draws, and people who look. They are compared in the
trace, because a tensor that is being functionalized says the strides that it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.io.node_values import hint_of

aten = torch.ops.aten


def lay_out_results(gm: fx.GraphModule, wanted: Sequence[Any], mode: Any) -> None:
    """Give the results of a traced graph the strides of the `wanted` tensors, by a copy where they have others."""
    output = gm.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for i, want in enumerate(wanted):
        value = results[i].meta.get("val") if isinstance(results[i], fx.Node) else None
        if isinstance(value, Tensor) and isinstance(want, Tensor) and _steps(value) != _steps(want):
            with gm.graph.inserting_before(output), mode:
                results[i] = _copied(results[i], want)
    output.args = (tuple(results),)
    gm.recompile()


def _copied(node: fx.Node, want: Tensor) -> fx.Node:
    """A copy whose dimensions lie in memory in the order of another tensor's."""
    order = sorted(range(want.dim()), key=lambda d: (-_hint(want.stride(d)), d))
    back = [order.index(d) for d in range(want.dim())]
    node = _add(node, aten.permute.default, order)
    node = _add(node, aten.clone.default, memory_format=torch.contiguous_format)
    return _add(node, aten.permute.default, back)


def _add(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    new = node.graph.call_function(target, (node, *args), kwargs)
    new.meta["val"] = target(node.meta["val"], *args, **kwargs)
    return new


def _steps(val: Tensor) -> list[str]:
    return [str(step) for step, size in zip(val.stride(), val.shape, strict=True) if str(size) != "1"]


def _hint(size: Any) -> float:
    known = size if type(size) is int else hint_of(size)
    return 0 if known is None else known
