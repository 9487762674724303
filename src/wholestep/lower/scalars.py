"""Numbers that change from call to call, inside of a region: elements of one small tensor instead of constants.

    graph     mul(p, 1 - lr * wd)         a number computed by Python at each call
    region    mul(p, numbers[0])          `numbers` is an input: one tensor for all numbers of the region

Kernels convert a Python number to the precision they compute in, which is float32 for all floating types but float64.
So a number is kept twice: as float32 and, where a float64 tensor meets it, as float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from wholestep._torch_compat import OpOverload, op_name, schema_of

aten = torch.ops.aten


class Number:
    """A number inside of a region, as 0-dim tensors."""

    def __init__(self, single: Tensor | None, double: Tensor | None) -> None:
        self._single = single
        self._double = double

    def beside(self, dtype: torch.dtype | None) -> Tensor:
        """The tensor to use with tensors of a dtype."""
        found = self._double if dtype == torch.float64 else self._single
        assert found is not None, "the region asked for this precision"
        return found


_OPERANDS = frozenset(
    "add sub mul div true_divide eq ne lt le gt ge maximum minimum fmod remainder atan2 pow rsub clamp clamp_min "
    "clamp_max where fill masked_fill lerp addcmul addcdiv full full_like xlogy".split()
)
"""Operators (without `aten::`) whose numbers can be tensors instead."""


def can_take_numbers(node: fx.Node) -> bool:
    """Whether an operator of a graph can be told its numbers by a tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    name = op_name(node.target).removeprefix("aten::").split(".")[0]
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _OPERANDS and not schema_of(node.target).is_mutable
    return name in _OPERANDS


def has_numbers(value: Any) -> bool:
    """Whether a Number is among arguments."""
    if isinstance(value, list | tuple):
        return any(has_numbers(item) for item in value)
    if isinstance(value, dict):
        return any(has_numbers(item) for item in value.values())
    return isinstance(value, Number)


def call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator some of whose arguments may be Numbers."""
    if not has_numbers(args) and not has_numbers(kwargs):
        return _plain(op, args, kwargs)
    name = op_name(op).removeprefix("aten::").split(".")[0]
    dtype = _dtype(args)
    given = [argument.beside(dtype) if isinstance(argument, Number) else argument for argument in args]
    named = {k: argument.beside(dtype) if isinstance(argument, Number) else argument for k, argument in kwargs.items()}
    special = _SPECIAL.get(name)
    if special is not None:
        return special(given, named)
    alpha = named.pop("alpha", 1)
    overload = {"pow": "Tensor_Tensor", "maximum": "default", "minimum": "default", "atan2": "default"}.get(
        name, "Tensor"
    )
    first, second = (_tensor(value, dtype) for value in given[:2])
    if isinstance(alpha, Tensor) or alpha != 1:
        second = second * alpha
    return getattr(getattr(aten, name), overload)(first, second, **named)


def _plain(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call without Numbers. Overloads that want tensors get them (foreach hands over plain numbers)."""
    wants = [argument.name for argument in schema_of(op).arguments if str(argument.type) == "Tensor"]
    names = [argument.name for argument in schema_of(op).arguments]
    dtype = _dtype(args)
    given = tuple(
        _tensor(value, dtype) if name in wants and op_name(op) in _STRICT and not isinstance(value, Tensor) else value
        for name, value in zip(names, args, strict=False)
    )
    return op(*given, **kwargs)


_STRICT = frozenset({"aten::maximum", "aten::minimum", "aten::atan2", "aten::pow.Tensor_Tensor"})
"""Refuse a Python number where the schema says tensor; the others take one."""


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


def _lerp(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    start, end, weight = args
    return start + weight * (end - start)  # type: ignore[no-any-return]


def _addcmul(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[0] + kwargs.get("value", 1) * (args[1] * args[2])  # type: ignore[no-any-return]


def _addcdiv(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[0] + kwargs.get("value", 1) * (args[1] / args[2])  # type: ignore[no-any-return]


def _rsub(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[1] - args[0] * (args[2] if len(args) > 2 else kwargs.get("alpha", 1))  # type: ignore[no-any-return]


def _clamp(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    low = args[1] if len(args) > 1 else kwargs.get("min")
    high = args[2] if len(args) > 2 else kwargs.get("max")
    result: Tensor = args[0]
    if low is not None:
        result = torch.maximum(result, _tensor(low, result.dtype).to(result.dtype))
    if high is not None:
        result = torch.minimum(result, _tensor(high, result.dtype).to(result.dtype))
    return result


def _where(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    dtype = _dtype(args[1:])
    first, second = (_tensor(value, dtype) for value in args[1:3])
    result: Tensor = aten.where.self(args[0], first, second)
    return result if dtype is None else result.to(dtype)


def _fill(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[1].to(args[0].dtype).expand(args[0].shape).clone()  # type: ignore[no-any-return]


def _masked_fill(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return torch.where(args[1], args[2].to(args[0].dtype), args[0])


def _full(args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return args[1].to(dtype).expand(args[0]).clone()  # type: ignore[no-any-return]


_SPECIAL: dict[str, Any] = {
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "rsub": _rsub,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda args, kwargs: _clamp([args[0], None, args[1]], kwargs),
    "where": _where,
    "fill": _fill,
    "masked_fill": _masked_fill,
    "full": _full,
    "full_like": lambda args, kwargs: _fill([args[0], args[1]], kwargs),
}


def pack_numbers(numbers: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All numbers of a region as one tensor."""
    packed = torch.tensor(numbers, dtype=dtype)
    return packed if device.type == "cpu" else packed.pin_memory().to(device, non_blocking=True)
