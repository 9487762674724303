"""Random ops in regions give the same numbers as in eager.

Random numbers are generated in memory order: a transposed tensor gets them in another order than a contiguous one.

    graph     rand_like(x.t())
    region    rand_like(empty_strided(<shape and strides of x.t()>))

Decompositions and functionalization choose layouts freely. So random ops "like" a tensor that is not row-major get new
memory of that layout; other random ops on such tensors stay outside of regions. So do those that fill a tensor with
gaps: eager generates those elements one by one, and dense memory in vectors, which are other numbers.

    graph     bernoulli.p(like, p)
    region    wholestep.bernoulli(like, p)      the same kernel, which is opaque to Inductor

Inductor's own lowering fills memory that a fused kernel made, and its scheduler may fuse readers of the random numbers
into that kernel, before they are generated (seen on torch 2.13: Bert with dropout and a mask became NaN).
"""

from __future__ import annotations

from functools import cache
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
"""Operators that read the sizes and strides of a tensor, not its contents."""


def why_not_random(node: fx.Node) -> str:
    """Why a random op stays outside; "" if a region can have it."""
    target = node.target
    assert isinstance(target, OpOverload)
    if not draws(node):
        return ""
    if not keeps_order_of_draws() and _is_on_cpu(node):
        return "this version of torch may reorder random ops, or the numbers that they give"
    if _is_like(target):
        return ""
    if any(not is_packed(val) for source in written_inputs(node) for val in tensors_in(source.meta.get("val"))):
        return "a random op that fills a tensor with gaps between its elements"
    read = [val for source in node.all_input_nodes for val in tensors_in(source.meta.get("val"))]
    seen = [*read, *tensors_in(node.meta.get("val"))]
    if all(is_row_major(val) or val.device.type != "cpu" for val in seen):
        return ""
    return "a random op on a tensor that is not row-major: random numbers are generated in memory order"


def _is_on_cpu(node: fx.Node) -> bool:
    return any(val.device.type == "cpu" for val in tensors_in(node.meta.get("val")))


def needs_layout(node: fx.Node) -> bool:
    """True if a node is a random op "like" a tensor that is not row-major."""
    if not isinstance(node.target, OpOverload) or not _is_like(node.target):
        return False
    like = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return isinstance(like, Tensor) and not is_row_major(like)


def call_with_layout(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of such a node, with the numbers in eager's order."""
    source: Any = node.args[0]
    val: Tensor = source.meta["val"]
    fresh = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    target: Any = node.target
    return target(fresh, *args[1:], **kwargs)


def is_row_major(val: Tensor) -> bool:
    """True if strides do not grow from one dimension to the next. Uses size hints: nothing is guarded."""
    if val.layout is not torch.strided:
        return True
    strides = [size_hint(stride) for stride, size in zip(val.stride(), val.shape, strict=True) if size_hint(size) != 1]
    return all(a >= b for a, b in pairwise(strides))


def _is_like(op: OpOverload) -> bool:
    return plain_name(op) in _LIKE


def make_bernoulli_opaque(gm: fx.GraphModule) -> None:
    """Replace `bernoulli` by an operator that Inductor only calls."""
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p)
    for node in nodes:
        node.target = _opaque_bernoulli()
    gm.recompile()


@cache
def _opaque_bernoulli() -> OpOverload:
    """The operator `wholestep::bernoulli`, which is registered when it is first needed."""
    name = "wholestep::bernoulli"
    torch.library.define(name, "(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    torch.library.impl(name, "CompositeExplicitAutograd", _bernoulli)
    torch.library.register_fake(name, _bernoulli)
    found: OpOverload = torch.ops.wholestep.bernoulli.default
    return found


def _bernoulli(like: Tensor, p: float) -> Tensor:
    filled: Tensor = torch.ops.aten.bernoulli.p(like, p)
    return filled
