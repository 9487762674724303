"""What identities and types are while a step is traced: those of the user's tensors, not of their fakes.

User code can tell fakes from real tensors by keys of dicts, members of sets, `id(p)` and `type(x)`: a dict that has the
real tensors as keys does not have the fakes, and `p in frozen` or `id(p) in skipped` would be false without an error.
So while a step is traced

    {p: ..}, {p}        hold the fakes, in the same order
    id(p)               in the user's functions is that of the real tensor
    type(x), type(k)    in the user's functions is Tensor, Parameter, int: what it is in eager
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wholestep.ir.user_objects.plain_contents import assign_contents, copy_of

Undo = Callable[[], None]


def swap_keys(container: Any, stand_in: Callable[[Tensor], Tensor]) -> Undo | None:
    """Replace the tensors among the keys of a dict or set by fakes. Returns the undo function if any key changed."""
    if not isinstance(container, dict | set) or not any(isinstance(key, Tensor) for key in container):
        return None
    before = copy_of(container)
    keys = {id(key): stand_in(key) if isinstance(key, Tensor) else key for key in before}
    if all(keys[id(key)] is key for key in before):
        return None
    if isinstance(before, dict):
        assign_contents(container, {keys[id(key)]: value for key, value in before.items()})
    else:
        assign_contents(container, {keys[id(key)] for key in before})
    return lambda: assign_contents(container, before)


def swap_id(namespaces: list[dict[str, Any]], real: Callable[[Any], Any]) -> Undo:
    """Make `id` in the global namespaces of user functions that of the real tensor. Returns the undo function."""

    def identity(value: Any, /) -> int:
        return builtins.id(real(value))

    for namespace in namespaces:
        namespace["id"] = identity

    def undo() -> None:
        for namespace in namespaces:
            del namespace["id"]

    return undo


def swap_type(namespaces: list[dict[str, Any]], kind_of: Callable[[Any], type]) -> Undo:
    """Make `type(x)` in the global namespaces of user functions what it is in eager. Returns the undo function.

    The stand-in is a class, so that `isinstance(x, type)`, `type(name, bases, dict)` and `class M(type)` work.
    """

    class Asked(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:
                return type(*args, **kwargs)
            found = kind_of(args[0])
            return stand_in if found is type else found

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, type)

        def __subclasscheck__(cls, value: type) -> bool:
            return issubclass(value, type)

    stand_in = Asked("type", (type,), {})
    for namespace in namespaces:
        namespace["type"] = stand_in

    def undo() -> None:
        for namespace in namespaces:
            del namespace["type"]

    return undo
