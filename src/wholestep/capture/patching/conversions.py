"""`float(x)`, `int(x)`, `len(x)`, `max(a, b)`, `min(a, b)` in user code, of scalars that only a run knows; `float(x)`
also of numbers that changed between two calls.

They are written in C and must return a plain number, or compare plain numbers, at once. So a trace that meets such a
call ends, and the step is traced again with a stand-in for the name in the global namespace of the calling function:

    losses.append(float(loss))        trace 1: NeedsConversion; trace 2: a symbolic scalar

The stand-in of a type is a class: `isinstance(x, float)`, `type(x) is float` and `{float: ..}` behave as with
the real one.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Sequence
from functools import reduce
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from wholestep.capture.objects.objects_found_by_calls import EarlierTraces, TraceAgain
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import WholestepError
from wholestep.ir.io.node_values import hint_of

Namespace = dict[str, Any]
_KINDS: dict[str, tuple[type, str]] = {"float": (float, "sym_float"), "int": (int, "trunc")}


def _length(values: Any) -> Any:
    return values.shape[0] if isinstance(values, Tensor) and values.dim() else len(values)


def _extremum(function: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        sized = any(isinstance(arg, torch.SymInt | torch.SymFloat) and scalar_of(arg) is None for arg in args)
        return reduce(symbolic, args) if sized and len(args) > 1 and not kwargs else function(*args, **kwargs)

    return stand_in


_TO_NUMBER: dict[type, Callable[..., Any]] = {int: torch.sym_int, float: torch.sym_float}

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": _length,
    "max": _extremum(max, torch.sym_max),
    "min": _extremum(min, torch.sym_min),
}


def ask_by_stand_in(frame: FrameType, refusal: WholestepError) -> None:
    """End the trace if code needs the value of a size in a call that a stand-in may replace."""
    if "CALL" not in dis.opname[frame.f_code.co_code[frame.f_lasti]]:
        return
    for name in (*_FUNCTIONS, *_KINDS):
        if name in frame.f_code.co_names and name not in frame.f_globals:
            raise NeedsConversion(frame.f_globals, name, refusal)


class NeedsConversion(TraceAgain):
    """Ends a trace: a function converts to a plain number by a name that can be replaced."""

    def __init__(self, namespace: Namespace, name: str, refusal: WholestepError | None = None) -> None:
        super().__init__(f"{name}() of a symbolic scalar")
        self.namespace = namespace
        self.name = name
        self.refusal = refusal

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        found = (self.namespace, self.name)
        earlier.conversions.append(found)

        def forget() -> None:
            earlier.conversions = [each for each in earlier.conversions if each is not found]

        return forget


def swap_conversions(asked: Sequence[tuple[Namespace, str]]) -> Callable[[], None]:
    """Put stand-ins for `float` and `int` into global namespaces. Returns the undo function."""
    before: list[tuple[Namespace, str, Any]] = []
    by_namespace: dict[int, tuple[Namespace, dict[type, type]]] = {}
    for namespace, name in asked:
        if name not in namespace and name in _FUNCTIONS:
            namespace[name] = _FUNCTIONS[name]
            before.append((namespace, name, None))
        elif name not in namespace:
            kind, method = _KINDS[name]
            namespace[name] = _stand_in(kind, method)
            before.append((namespace, name, None))
            by_namespace.setdefault(id(namespace), (namespace, {}))[1][kind] = namespace[name]
    for namespace, kinds in by_namespace.values():
        if "type" in namespace:
            before.append((namespace, "type", namespace["type"]))
            namespace["type"] = _type_giving(namespace["type"], kinds)

    def undo() -> None:
        for namespace, name, value in reversed(before):
            if value is None:
                del namespace[name]
            else:
                namespace[name] = value

    return undo


def _stand_in(kind: type, method: str) -> type:
    class Conversion(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs:
                value = args[0]
                number = value.item() if isinstance(value, Tensor) else value
                scalar = scalar_of(number)
                if scalar is not None and not scalar.is_fixed:
                    return scalar.apply(method).as_python()
                if scalar is None and isinstance(number, torch.SymInt | torch.SymFloat) and hint_of(number) is None:
                    return _TO_NUMBER[kind](number)
            return kind(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, kind)

        def __subclasscheck__(cls, value: type) -> bool:
            return issubclass(value, kind)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is kind

        def __hash__(cls) -> int:
            return hash(kind)

    return Conversion(kind.__name__, (kind,), {})


def _type_giving(stand_in: Any, kinds: dict[type, type]) -> Any:
    """The stand-in for `type` of a namespace that has stand-ins for some types."""

    class AskedKinds(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            found = stand_in(*args, **kwargs)
            if len(args) != 1:
                return found
            return made if found is stand_in else kinds.get(found, found)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, type)

        def __subclasscheck__(cls, value: type) -> bool:
            return issubclass(value, type)

    made = AskedKinds("type", (type,), {})
    return made
