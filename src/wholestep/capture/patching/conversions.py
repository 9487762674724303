"""`float(x)` and `int(x)` in user functions, of a scalar that is known only after the graph ran.

Both are C types, which must return a plain number at once. So a trace that meets such a call ends, and the step is
traced again with a stand-in for the name in the global namespace of the calling function:

    losses.append(float(loss))        trace 1: NeedsConversion; trace 2: a symbolic scalar

The stand-in is a class: `isinstance(x, float)`, `type(x) is float` and `{float: ..}` behave as with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from wholestep.capture.objects.called import EarlierTraces, TraceAgain
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import WholestepError

Namespace = dict[str, Any]
_KINDS: dict[str, tuple[type, str]] = {"float": (float, "sym_float"), "int": (int, "trunc")}


class NeedsConversion(TraceAgain):
    """Ends a trace: a function converts to a plain number by a name that can be replaced."""

    def __init__(self, namespace: Namespace, name: str, refusal: WholestepError) -> None:
        super().__init__(f"{name}() of a number that is not known yet")
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
        if name not in namespace:
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
                if scalar is not None and scalar.is_deferred:
                    return scalar.apply(method).as_python()
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
