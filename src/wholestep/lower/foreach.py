"""List operators as what they are: one operator per element.

    new = _foreach_lerp.Scalar([a, b], [c, d], w)     ->     [lerp(a, c, w), lerp(b, d, w)]

Inductor then fuses the chain of each parameter into one kernel. (Its own lowering of `_foreach_*` makes one kernel of
many parameters, but fails on whole steps in torch 2.11.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wholestep.lower.scalars import Number, call
from wholestep.torch_private.operators import OpOverload, named_arguments, op_name, schema_of

aten = torch.ops.aten
_PREFIX = "aten::_foreach_"
_OTHER_NAMES = {"norm": "linalg_vector_norm", "max": "amax", "copy": "copy", "zero": "zeros_like"}


def is_foreach(op: OpOverload) -> bool:
    """Whether an operator computes lists element by element."""
    return op_name(op).startswith(_PREFIX) and not schema_of(op).is_mutable


@lru_cache(maxsize=512)
def element_operator(op: OpOverload) -> Any:
    """The operator (all its overloads) that computes one element; None where there is none."""
    base = op_name(op).removeprefix(_PREFIX).split(".")[0]
    return getattr(aten, _OTHER_NAMES.get(base, base), None)


def call_elementwise(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a list operator returns, computed element by element."""
    packet = element_operator(op)
    count = max(len(value) for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))
    given = named_arguments(op, args, kwargs)
    # `scalars` may also be a tensor with a number for each element.
    lists = {a.name for a in schema_of(op).arguments if str(a.type).startswith("List[") or a.name == "scalars"}
    results = []
    for i in range(count):
        own = {key: value[i] if key in lists and value is not None else value for key, value in given.items()}
        results.append(_one(packet, op_name(op).removeprefix(_PREFIX).split(".")[0], list(own.values()), own))
    return results


def unscaled(gradients: Any, found_inf: Tensor, inverse: Tensor) -> tuple[Any, Tensor]:
    """What a GradScaler's unscaling returns: the gradients unscaled, and whether any of them is not finite."""
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
            value = Number(value.to(torch.float32), value.to(torch.float64))
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
    """The overload of a binary operator that takes tensors and, as scalars are, numbers."""
    named = {"clamp_min": aten.maximum, "clamp_max": aten.minimum, "maximum": aten.maximum, "minimum": aten.minimum}
    if base in named:
        return named[base].default
    return packet.Tensor if "Tensor" in packet.overloads() else packet.default


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Tensor | Number) or isinstance(base, Number):
        overload = aten.pow.Tensor_Tensor
    else:
        overload = aten.pow.Tensor_Scalar if isinstance(base, Tensor) else aten.pow.Scalar
    return call(overload, (base, exponent), {})
