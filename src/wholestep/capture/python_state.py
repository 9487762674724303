"""Python attributes around a step: what it read, what it changed, and putting them back.

A replay does not run the user's Python. So what the step *reads* from plain attributes becomes a guard, and what it
*changes* is repeated after each replay where that is possible (a number, a tensor) and refused where it is not
(appending to a list).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from wholestep.capture.plain import CONTAINERS, PLAIN, assign_contents, copy_of, same_contents, same_plain, skeleton
from wholestep.capture.slots import ABSENT


class Attributes:
    """A snapshot of `vars(obj)` and of the containers directly in it."""

    def __init__(self, obj: Any, path: str, skip: frozenset[str] = frozenset()) -> None:
        self.obj = obj
        self.path = path
        self._skip = skip
        self.before = dict(vars(obj))
        self._contents = {
            key: copy_of(value)
            for key, value in self.before.items()
            if isinstance(value, CONTAINERS) and key not in skip
        }

    def rebound(self) -> Iterator[tuple[str, Any, Any]]:
        """Attributes that were set, replaced or deleted: name, before, after."""
        now = vars(self.obj)
        for key in {**self.before, **now}:
            before, after = self.before.get(key, ABSENT), now.get(key, ABSENT)
            if key in self._skip or same_value(before, after):
                continue
            yield key, before, after

    def mutated(self) -> Iterator[tuple[str, Any, Any]]:
        """Containers whose contents changed: name, contents before, the container."""
        now = vars(self.obj)
        for key, contents in self._contents.items():
            container = self.before[key]
            if now.get(key) is container and not same_contents(contents, container):
                yield key, contents, container

    def restore(self) -> None:
        """Put back attributes and contents."""
        now = vars(self.obj)
        for key in list(now):
            if key not in self.before:
                del now[key]
        for key, value in self.before.items():
            if now.get(key, ABSENT) is not value:
                now[key] = value
        for key, contents in self._contents.items():
            container = self.before[key]
            if not same_contents(contents, container):
                assign_contents(container, contents)


class ReadTracker:
    """Notes which attributes of a plain object are read, by giving it a subclass of its class for a while."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        self.names: dict[str, None] = {}
        self.class_values: dict[str, Any] = {}
        """Plain values that the step read from the class."""
        self.watched = frozenset(vars(obj))
        """Attributes there were when the step began; reading one that was absent is not seen."""
        self._class = type(obj)
        self.active = False

    def start(self) -> None:
        names, attributes, class_values = self.names, vars(self.obj), self.class_values
        base = self._class
        read: Any = base.__getattribute__

        def __getattribute__(this: Any, name: str) -> Any:  # noqa: N807
            value = read(this, name)
            if name in attributes:
                names[name] = None
            elif isinstance(value, PLAIN) and not name.startswith("__"):
                class_values[name] = value
            return value

        if not _is_python_class(base):
            names.update(dict.fromkeys(attributes))
            return
        try:
            tracked = type(base.__name__, (base,), {"__getattribute__": __getattribute__, "__slots__": ()})
            tracked.__module__ = base.__module__
            tracked.__qualname__ = base.__qualname__
            object.__setattr__(self.obj, "__class__", tracked)
            self.active = True
        except TypeError:
            # Such an object cannot change its class: count everything it has as read.
            names.update(dict.fromkeys(attributes))

    def stop(self) -> None:
        if self.active:
            object.__setattr__(self.obj, "__class__", self._class)
            self.active = False


_HEAP_TYPE = 1 << 9


def _is_python_class(cls: type) -> bool:
    """Whether instances of a class may take a subclass of it: every class above it is written in Python."""
    return all(c.__flags__ & _HEAP_TYPE and c.__basicsize__ <= 32 for c in cls.__mro__[:-1])


def holds_tensor(value: Any) -> bool:
    """Whether a tensor lies directly in a value or in a container of it."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(holds_tensor(v) for v in value.values())
    if isinstance(value, list | tuple | set):
        return any(holds_tensor(v) for v in value)
    return False


def same_value(before: Any, after: Any) -> bool:
    """The same plain value, or containers of tensors-free equal contents (a cache that was filled again)."""
    if same_plain(after, before):
        return True
    if type(before) is not type(after) or not isinstance(before, (*CONTAINERS, tuple)):
        return False
    return not holds_tensor(before) and not holds_tensor(after) and skeleton(before) == skeleton(after)
