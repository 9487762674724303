"""Scalar inputs of a region, which change from call to call: elements of one small tensor instead of constants.

    graph     mul(p, 1 - lr * wd)         a scalar computed by Python at each call
    region    mul(p, scalars[0])          `scalars` is an input: one tensor with all scalars of the region

Kernels convert a Python scalar to the precision that they compute in, which is float32 for all floating types except
float64. So a scalar is passed twice: as float32 and, where it is used with a float64 tensor, as float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.torch_private.operators import (
    OpOverload,
    argument_names,
    named_arguments,
    op_name,
    plain_name,
    schema_of,
)

aten = torch.ops.aten


class ScalarInput:
    """A scalar input inside of a region, as 0-dim tensors."""

    def __init__(self, single: Tensor | None, double: Tensor | None) -> None:
        self._single = single
        self._double = double

    def for_dtype(self, dtype: torch.dtype | None) -> Tensor:
        """The 0-dim tensor to use with tensors of a dtype."""
        found = self._double if dtype == torch.float64 else self._single
        assert found is not None, "the region asked for this precision"
        return found


_OPERANDS = frozenset(
    "add sub mul div true_divide eq ne lt le gt ge maximum minimum fmod remainder atan2 pow rsub clamp clamp_min "
    "clamp_max where fill masked_fill lerp addcmul addcdiv full full_like xlogy".split()
)
"""Operators (without `aten::`) whose scalar arguments can be tensors instead."""


_JUMPS = frozenset("eq ne lt le gt ge fmod remainder".split())
"""Discontinuous operators: eager rounds the scalar to the dtype of the tensors, which fused kernels do not."""


def accepts_scalar_inputs(node: fx.Node) -> bool:
    """True if an operator can take its scalars from a tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    name = plain_name(node.target)
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _OPERANDS and not schema_of(node.target).is_mutable
    if name in _JUMPS and any(_is_rounded(source.meta.get("val")) for source in node.all_input_nodes):
        return False
    return name in _OPERANDS


def _is_rounded(val: Any) -> bool:
    """True if eager rounds scalars beside this tensor to another type than the float32 or float64 of a region."""
    return isinstance(val, Tensor) and val.dtype not in (torch.float32, torch.float64)


def has_scalar_inputs(value: Any) -> bool:
    """True if a ScalarInput is among arguments."""
    if isinstance(value, list | tuple):
        return any(has_scalar_inputs(item) for item in value)
    if isinstance(value, dict):
        return any(has_scalar_inputs(item) for item in value.values())
    return isinstance(value, ScalarInput)


def call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator some of whose arguments may be ScalarInputs."""
    if not has_scalar_inputs(args) and not has_scalar_inputs(kwargs):
        return _plain(op, args, kwargs)
    given = named_arguments(op, args, kwargs)
    dtype = _promoted(given.values())
    given = {name: value.for_dtype(dtype) if isinstance(value, ScalarInput) else value for name, value in given.items()}
    name = plain_name(op)
    result = _SPECIAL[name](given) if name in _SPECIAL else _binary(name, given, dtype)
    # A Python scalar never decides the dtype of a result; as a tensor it would beside 0-dim tensors.
    if name not in _CREATES and dtype is not None and result.is_floating_point():
        result = result.to(dtype)
    return result


def _binary(name: str, given: dict[str, Any], dtype: torch.dtype | None) -> Tensor:
    """An operator of two operands, with the overload for two tensors."""
    alpha = given.pop("alpha", 1)
    mode = {key: given.pop(key) for key in ("rounding_mode",) if key in given}
    first, second = (_tensor(value, dtype) for value in given.values())
    if isinstance(alpha, Tensor) or alpha != 1:
        second = second * alpha
    overload = _OVERLOADS.get(name, "Tensor_mode" if mode else "Tensor")
    result: Tensor = getattr(getattr(aten, name), overload)(first, second, **mode)
    return result


_OVERLOADS = {"pow": "Tensor_Tensor", "maximum": "default", "minimum": "default", "atan2": "default"}
_CREATES = frozenset({"full", "full_like"})


def _promoted(values: Iterable[Any]) -> torch.dtype | None:
    """The dtype in which eager computes with these tensors and a float scalar; None without tensors."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.dtype != torch.bool]
    if not tensors:
        return None
    deciding = [tensor.dtype for tensor in tensors if tensor.dim()] or [tensor.dtype for tensor in tensors]
    found = reduce(torch.promote_types, deciding)
    return found if found.is_floating_point else torch.get_default_dtype()


def _plain(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call without ScalarInputs. Overloads that require tensors get them (foreach passes Python scalars)."""
    wants = [argument.name for argument in schema_of(op).arguments if str(argument.type) == "Tensor"]
    dtype = _dtype(args)
    given = tuple(
        _tensor(value, dtype) if name in wants and op_name(op) in _STRICT and not isinstance(value, Tensor) else value
        for name, value in zip(argument_names(op), args, strict=False)
    )
    return op(*given, **kwargs)


_STRICT = frozenset({"aten::maximum", "aten::minimum", "aten::atan2", "aten::pow.Tensor_Tensor"})
"""Overloads that refuse a Python scalar where the schema says Tensor; others accept one."""


def _dtype(args: Any) -> torch.dtype | None:
    for value in args:
        if isinstance(value, list | tuple):
            found = _dtype(value)
            if found is not None:
                return found
        if isinstance(value, Tensor):
            return value.dtype
    return None


def _tensor(value: Any, dtype: torch.dtype | None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    kind = dtype if dtype is not None and dtype.is_floating_point else torch.float32
    return aten.full.default([], value, dtype=kind)  # type: ignore[no-any-return]


def _lerp(given: dict[str, Any]) -> Tensor:
    start, end, weight = given.values()
    return start + weight * (end - start)  # type: ignore[no-any-return]


def _addcmul(given: dict[str, Any]) -> Tensor:
    start, first, second, value = given.values()
    return start + value * (first * second)  # type: ignore[no-any-return]


def _addcdiv(given: dict[str, Any]) -> Tensor:
    start, first, second, value = given.values()
    return start + value * (first / second)  # type: ignore[no-any-return]


def _rsub(given: dict[str, Any]) -> Tensor:
    return given["other"] - given["self"] * given.get("alpha", 1)  # type: ignore[no-any-return]


def _clamp(given: dict[str, Any]) -> Tensor:
    result: Tensor = given["self"]
    dtype = _promoted([result])
    assert dtype is not None
    result = result.to(dtype)
    for bound, choose in (("min", torch.maximum), ("max", torch.minimum)):
        if given.get(bound) is not None:
            result = choose(result, _tensor(given[bound], dtype).to(dtype))
    return result


def _where(given: dict[str, Any]) -> Tensor:
    condition, first, second = given.values()
    dtype = _promoted([first, second])
    result: Tensor = aten.where.self(condition, _tensor(first, dtype), _tensor(second, dtype))
    return result


def _fill(given: dict[str, Any]) -> Tensor:
    return given["value"].to(given["self"].dtype).expand(given["self"].shape).clone()  # type: ignore[no-any-return]


def _masked_fill(given: dict[str, Any]) -> Tensor:
    return torch.where(given["mask"], given["value"].to(given["self"].dtype), given["self"])


def _full(given: dict[str, Any]) -> Tensor:
    dtype = given.get("dtype") or torch.get_default_dtype()
    value: Tensor = given["fill_value"]
    return value.to(dtype).expand(given["size"]).clone()


def _full_like(given: dict[str, Any]) -> Tensor:
    dtype = given.get("dtype") or given["self"].dtype
    value: Tensor = given["fill_value"]
    return aten.copy.default(torch.empty_like(given["self"], dtype=dtype), value.to(dtype))  # type: ignore[no-any-return]


_SPECIAL: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "rsub": _rsub,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "where": _where,
    "fill": _fill,
    "masked_fill": _masked_fill,
    "full": _full,
    "full_like": _full_like,
}


def pack_scalars(scalars: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All scalars of a region as one tensor."""
    packed = torch.tensor(scalars, dtype=dtype)
    return packed if device.type == "cpu" else packed.pin_memory().to(device, non_blocking=True)
