"""Python attributes around a step: what it read, what it changed, and putting them back.

A replay does not run the user's Python. So what the step *reads* from plain attributes becomes a guard, and what it
*changes* is repeated after each replay where that is possible (a number, a tensor) and refused where it is not
(appending to a list).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from wholestep.ir.user_objects.plain_values import (
    CONTAINERS,
    assign_contents,
    copy_of,
    own_dict,
    same_contents,
    same_plain,
    skeleton,
)
from wholestep.ir.user_objects.slots import ABSENT


class Attributes:
    """A snapshot of `vars(obj)` and of the containers directly in it."""

    def __init__(self, obj: Any, path: str, skip: frozenset[str] = frozenset()) -> None:
        self.obj = obj
        self.path = path
        self._skip = skip
        self.before = dict(own_dict(obj))
        self._contents = {
            key: copy_of(value)
            for key, value in self.before.items()
            if issubclass(type(value), CONTAINERS) and key not in skip
        }

    def rebound(self) -> Iterator[tuple[str, Any, Any]]:
        """Attributes that were set, replaced or deleted: name, before, after."""
        now = own_dict(self.obj)
        for key in {**self.before, **now}:
            before, after = self.before.get(key, ABSENT), now.get(key, ABSENT)
            if key in self._skip or same_value(before, after):
                continue
            yield key, before, after

    def mutated(self) -> Iterator[tuple[str, Any, Any]]:
        """Containers whose contents changed: name, contents before, the container."""
        now = own_dict(self.obj)
        for key, contents in self._contents.items():
            container = self.before[key]
            if now.get(key) is container and not same_contents(contents, container):
                yield key, contents, container

    def restore(self) -> None:
        """Put back attributes and contents."""
        now = own_dict(self.obj)
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
