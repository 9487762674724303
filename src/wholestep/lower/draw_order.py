"""Random numbers are drawn in the order of memory: a transposed tensor gets them in another order than a plain one.

    graph     rand_like(x.t())
    region    rand_like(empty_strided(<shape and strides of x.t()>))

Decompositions and functionalization lay tensors out as they like. So what draws like a tensor that is not laid out row
by row gets fresh memory of that layout; other draws from or into such tensors stay outside. So do draws into parts of a
tensor with gaps between them: eager draws those one by one, and whole memory many at a time, which are other numbers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import draws, written_inputs
from wholestep.ir.graphs import tensors_in
from wholestep.ir.io.node_values import is_packed, size_hint
from wholestep.torch_private.inductor import keeps_order_of_draws
from wholestep.torch_private.operators import OpOverload, plain_name

_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
"""Operators that look at the shape and the layout of a tensor, not at what it holds."""


def why_not_drawn(node: fx.Node) -> str:
    """Why a draw stays outside; "" if regions can have it."""
    target = node.target
    assert isinstance(target, OpOverload)
    if not draws(node):
        return ""
    if not keeps_order_of_draws() and _is_on_cpu(node):
        return "this version of torch may exchange random draws, or what they draw"
    if _draws_like(target):
        return ""
    if any(not is_packed(val) for source in written_inputs(node) for val in tensors_in(source.meta.get("val"))):
        return "draws random numbers into memory with gaps"
    read = [val for source in node.all_input_nodes for val in tensors_in(source.meta.get("val"))]
    seen = [*read, *tensors_in(node.meta.get("val"))]
    if all(is_row_by_row(val) or val.device.type != "cpu" for val in seen):
        return ""
    return "draws random numbers in the order of memory, for a tensor that is not laid out row by row"


def _is_on_cpu(node: fx.Node) -> bool:
    return any(val.device.type == "cpu" for val in tensors_in(node.meta.get("val")))


def needs_layout(node: fx.Node) -> bool:
    """Whether a node draws like a tensor whose layout decides who gets which number."""
    if not isinstance(node.target, OpOverload) or not _draws_like(node.target):
        return False
    like = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return isinstance(like, Tensor) and not is_row_by_row(like)


def draw(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of such a node, drawn in eager's order."""
    source: Any = node.args[0]
    val: Tensor = source.meta["val"]
    fresh = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    target: Any = node.target
    return target(fresh, *args[1:], **kwargs)


def is_row_by_row(val: Tensor) -> bool:
    """Whether steps never grow from one dimension to the next. Asked of the traced sizes: nothing is guarded."""
    if val.layout is not torch.strided:
        return True
    steps = [size_hint(step) for step, size in zip(val.stride(), val.shape, strict=True) if size_hint(size) != 1]
    return all(a >= b for a, b in pairwise(steps))


def _draws_like(op: OpOverload) -> bool:
    return plain_name(op) in _LIKE
