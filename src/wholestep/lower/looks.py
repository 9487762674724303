"""Whether the inputs of a region look as they did when it was traced: dtype, device, sizes and strides.

Compiled code believes it: it would read a float64 tensor as twice as many float32 numbers, and the memory of a fake
tensor, which has none. A symbol has one value
throughout a call, so that two inputs that were of one size in the trace must still be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import SymInt, Tensor, fx

from wholestep.ir.readable import describe_value
from wholestep.torch_private.fake_tensors import why_unreadable
from wholestep.torch_private.symbolic_shapes import expression_of

_MOST_KNOWN = 1024


class Looks:
    """What the inputs of a region looked like."""

    def __init__(self, inputs: Sequence[fx.Node]) -> None:
        self._names = [node.name for node in inputs]
        self._traced = [node.meta.get("val") for node in inputs]
        self._known: dict[Any, str] = {}

    def difference(self, values: Sequence[Any]) -> str:
        """The first input that looks otherwise, and how; "" if all look as they did."""
        for name, value in zip(self._names, values, strict=True):
            kind = why_unreadable(value) if isinstance(value, Tensor) else ""
            if kind:
                return f"{name} is {kind}, and its code reads plain memory"
        key = tuple([_key(value) for value in values])
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._compare(values)
        return found

    def _compare(self, values: Sequence[Any]) -> str:
        symbols: dict[Any, int] = {}
        for binds in (True, False):  # what is nothing but a symbol tells it; sums and products follow
            for name, traced, value in zip(self._names, self._traced, values, strict=True):
                if not _fits(traced, value, symbols, binds):
                    return f"{name} is {_said(value)}, and its code is for {_said(traced)}"
        return ""


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, value.device, value.shape, value.stride())
    return (type(value), value) if type(value) is int else type(value)


def _fits(traced: Any, value: Any, symbols: dict[Any, int], binds: bool) -> bool:
    if not isinstance(traced, Tensor):
        return not isinstance(traced, SymInt) or _is_size(traced, value, symbols, binds)
    if not isinstance(value, Tensor) or value.dtype != traced.dtype or value.device != traced.device:
        return False
    if value.dim() != traced.dim():
        return False
    if not all(_is_size(a, b, symbols, binds) for a, b in zip(traced.shape, value.shape, strict=True)):
        return False
    # Where there is one element, nobody steps to the next.
    steps = zip(traced.stride(), value.stride(), value.shape, strict=True)
    return all(size == 1 or _is_size(a, b, symbols, binds) for a, b, size in steps)


def _is_size(traced: Any, value: int, symbols: dict[Any, int], binds: bool) -> bool:
    expression = expression_of(traced)
    if expression is None:
        return bool(traced == value)
    if expression.is_Symbol:
        return symbols.setdefault(expression, value) == value
    if binds or not expression.free_symbols <= symbols.keys():
        return True
    return bool(expression.subs(symbols) == value)


def _said(value: Any) -> str:
    if not isinstance(value, Tensor):
        return describe_value(value)
    return f"{describe_value(value)} with strides {tuple(value.stride())} on {value.device}"
