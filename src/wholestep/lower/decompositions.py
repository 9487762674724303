"""Operators that are decomposed before Inductor sees them: `_foreach_*`, GradScaler's unscaling, short attention.

    new = _foreach_lerp.Scalar([a, b], [c, d], w)     ->     [lerp(a, c, w), lerp(b, d, w)]

Inductor then fuses the chain of each parameter into one kernel. (Its own lowering of `_foreach_*` makes one kernel of
many parameters, but fails on whole steps in torch 2.11.)

    out, lse = flash_attention(q, k, v)     ->     scores = q k^T;  weights = exp(scores - max) / sum;  out = weights v

On the CPU the fused attention operator is made for long sequences. The decomposed backward reads the same weights, so
that the min cut may save them: only small ones are decomposed, where the fused operator is slow for its size. Sequence
length 64, head size 32, 16 heads: three quarters of its time.

Random ops in regions give the same numbers as in eager.

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

from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import declares_writes, draws, written_inputs
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import is_packed, size_hint
from wholestep.lower.scalar_inputs import ScalarInput, call
from wholestep.torch_private.inductor import keeps_order_of_random_ops
from wholestep.torch_private.operators import OpOverload, named_arguments, op_name, plain_name, schema_of

aten = torch.ops.aten

_PREFIX = "aten::_foreach_"
_OTHER_NAMES = {"norm": "linalg_vector_norm", "max": "amax", "copy": "copy", "zero": "zeros_like"}


def is_foreach(op: OpOverload) -> bool:
    """True if an operator is a functional `_foreach_*`."""
    return op_name(op).startswith(_PREFIX) and not declares_writes(op)


@lru_cache(maxsize=512)
def element_operator(op: OpOverload) -> Any:
    """The operator packet that computes one element; None if there is none."""
    base = op_name(op).removeprefix(_PREFIX).split(".")[0]
    return getattr(aten, _OTHER_NAMES.get(base, base), None)


def call_elementwise(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The result of a `_foreach_*` operator, computed element by element."""
    packet = element_operator(op)
    count = max(len(value) for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))
    given = named_arguments(op, args, kwargs)
    # `scalars` may also be a tensor with one scalar per element.
    lists = {a.name for a in schema_of(op).arguments if str(a.type).startswith("List[") or a.name == "scalars"}
    results = []
    for i in range(count):
        own = {key: value[i] if key in lists and value is not None else value for key, value in given.items()}
        results.append(_one(packet, op_name(op).removeprefix(_PREFIX).split(".")[0], list(own.values()), own))
    return results


def unscaled(gradients: Any, found_inf: Tensor, inverse: Tensor) -> tuple[Any, Tensor]:
    """The result of GradScaler's unscaling: unscaled gradients, and a flag that is set if any of them is not finite."""
    bad = found_inf != 0
    for gradient in gradients:
        bad = bad | gradient.isfinite().logical_not().any().reshape(bad.shape)
    values = [gradient * inverse.to(gradient.dtype) for gradient in gradients]
    return values, torch.where(bad, torch.ones_like(found_inf), found_inf)


def _one(packet: Any, base: str, values: list[Any], own: dict[str, Any]) -> Any:
    if base == "norm":
        order = own.get("ord", 2)
        return aten.linalg_vector_norm.default(own["self"], order, dtype=own.get("dtype"))
    if base in ("addcmul", "addcdiv"):
        value = own.get("value", own.get("scalars", 1))
        if isinstance(value, Tensor):
            value = ScalarInput(value.to(torch.float32), value.to(torch.float64))
        return call(packet.default, (own["self"], own["tensor1"], own["tensor2"]), {"value": value})
    if base in ("add", "sub") and "alpha" in own:
        second = own.get("other", own.get("scalar", own.get("scalars")))
        return call(packet.Tensor, (own["self"], second), {"alpha": own["alpha"]})
    if base == "lerp":
        weight = values[2]
        overload = packet.Tensor if isinstance(weight, Tensor) else packet.Scalar
        return call(overload, (values[0], values[1], weight), {})
    if base == "copy":
        return aten.copy.default(values[0], values[1])
    if base == "zero":
        return torch.zeros_like(values[0])
    if base == "max":
        return aten.amax.default(values[0])
    if len(values) == 1:
        return packet.default(values[0])
    if base == "pow":
        return _power(values[0], values[1])
    return call(_binary(packet, base), (values[0], values[1]), {})


def _binary(packet: Any, base: str) -> Any:
    """The overload of a binary operator that takes tensors and, wrapped, Python scalars."""
    named = {"clamp_min": aten.maximum, "clamp_max": aten.minimum, "maximum": aten.maximum, "minimum": aten.minimum}
    if base in named:
        return named[base].default
    return packet.Tensor if "Tensor" in packet.overloads() else packet.default


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Tensor | ScalarInput) or isinstance(base, ScalarInput):
        overload = aten.pow.Tensor_Tensor
    else:
        overload = aten.pow.Tensor_Scalar if isinstance(base, Tensor) else aten.pow.Scalar
    return call(overload, (base, exponent), {})


_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MAX_LENGTH = 64
"""At 128 both take the same time; above, the fused operator wins."""
_BYTES = 2**20
"""Of the weights: what a layer may save more than with the fused operator."""


def is_short_attention(node: fx.Node) -> bool:
    """True if a node is attention to decompose: no mask except the causal one, no dropout, short sequences."""
    if node.target not in (_FORWARD, _BACKWARD):
        return False
    given = _given(node.target, node.args, dict(node.kwargs))
    query, key, value = (_value(given[name]) for name in ("query", "key", "value"))
    if given["dropout_p"] != 0.0 or given["attn_mask"] is not None or query.dtype not in (torch.float32, torch.float64):
        return False
    sizes = [*query.shape, *key.shape, *value.shape]
    same_heads = query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    return all(type(size) is int for size in sizes) and same_heads and _is_small(query, key)


def call_short_attention(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of short attention, forward or backward."""
    given = _given(op, args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    scale = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    scores = (query * scale) @ key.transpose(-1, -2)
    if given["is_causal"]:
        positions = torch.arange(max(scores.shape[-2:]), device=scores.device)
        visible = positions[: scores.shape[-1]] <= positions[: scores.shape[-2], None]
        scores = torch.where(visible, scores, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    powers = (scores - largest).exp()
    total = powers.sum(-1, keepdim=True)
    weights = powers * total.reciprocal()
    if op is _FORWARD:
        return weights @ value, (largest + total.log()).squeeze(-1)
    grad = given["grad_out"]
    of_weights = grad @ value.transpose(-1, -2)
    along = (grad * given["out"]).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - along) * scale
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad


def _is_small(query: Tensor, key: Tensor) -> bool:
    rows, columns = query.shape[-2], key.shape[-2]
    weights = query.numel() // max(query.shape[-1], 1) * columns * query.element_size()
    return max(rows, columns) <= _MAX_LENGTH and 0 < weights <= _BYTES


def _given(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, with defaults."""
    named = {a.name: args[i] if i < len(args) else a.default_value for i, a in enumerate(schema_of(op).arguments)}
    return {**named, **kwargs}


def _value(node: Any) -> Any:
    return node.meta["val"]


_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
"""Operators that read the sizes and strides of a tensor, not its contents."""


def why_not_random(node: fx.Node) -> str:
    """Why a random op stays outside; "" if a region can have it."""
    target = node.target
    assert isinstance(target, OpOverload)
    if not draws(node):
        return ""
    if not keeps_order_of_random_ops() and _is_on_cpu(node):
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
