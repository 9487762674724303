"""Lists, tuples, dicts and deques of tensors and numbers that optimizers keep in their state and param groups.

    optimizer.state[w]["GG"] = [a, b]     each leaf is a slot: optimizer.state[w].GG[0], optimizer.state[w].GG[1]
    optimizer.state["k"] = 3              a value of the whole optimizer: OwnerSlot
    param_groups[0]["buffer"][2][0] = s   NestedSlot(HyperSlot(..., "buffer"), (2, 0))

The step is traced on copies of the containers; `nested_changes` binds what it changed. The structure is a guard.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from wholestep.errors import UnsupportedError
from wholestep.ir.user_objects.plain_values import skeleton
from wholestep.ir.user_objects.slots import ABSENT, Slot

NESTS = (list, tuple, dict, deque)
"""Containers whose leaves are slots."""


@dataclass(frozen=True, eq=False)
class OwnerSlot(Slot):
    """`optimizer.state[owner]` as a whole."""

    optimizer: Optimizer
    owner: Any

    def get(self) -> Any:
        return self.optimizer.state.get(self.owner, ABSENT)

    def set(self, value: Any) -> None:
        self.optimizer.state[self.owner] = value

    def remove(self) -> None:
        self.optimizer.state.pop(self.owner, None)


@dataclass(frozen=True, eq=False)
class NestedSlot(Slot):
    """A leaf of the containers in another slot."""

    root: Slot
    keys: tuple[Any, ...]

    def get(self) -> Any:
        value = self.root.get()
        for key in self.keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return ABSENT
        return value

    def set(self, value: Any) -> None:
        before = self.root.get()
        after = _with_leaf(before, self.keys, value)
        if after is not before:
            self.root.set(after)


@dataclass(frozen=True, eq=False)
class FreshContainersSlot(Slot):
    """A slot that is set to new containers at each replay; eager builds new ones, too."""

    root: Slot

    def get(self) -> Any:
        return self.root.get()

    def set(self, value: Any) -> None:
        self.root.set(copy_nest(value))


def copy_nest(value: Any) -> Any:
    """The same leaves in new containers."""
    return map_leaves(value, lambda leaf, keys: leaf) if isinstance(value, NESTS) else value


def map_leaves(value: Any, change: Callable[[Any, tuple[Any, ...]], Any], keys: tuple[Any, ...] = ()) -> Any:
    """Containers of the same types with other leaves. `change` takes a leaf and its keys."""
    if not isinstance(value, NESTS):
        return change(value, keys)
    if isinstance(value, tuple):
        items = [map_leaves(item, change, (*keys, i)) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)
    for key in value if isinstance(value, dict) else range(len(value)):
        result[key] = map_leaves(value[key], change, (*keys, key))
    return result


def leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf with its keys."""
    if not isinstance(value, NESTS):
        yield keys, value
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield from leaves(value[key], (*keys, key))


def structure_of(value: Any, *, numbers: tuple[type, ...] = (int, float)) -> Any:
    """Equal where containers are nested alike and hold the same constants. Tensors and `numbers` count by type."""
    if isinstance(value, Tensor):
        return Tensor
    if type(value) in numbers:
        return type(value)
    if isinstance(value, dict):
        return type(value), tuple((key, structure_of(item, numbers=numbers)) for key, item in value.items())
    if isinstance(value, NESTS):
        return type(value), tuple(structure_of(item, numbers=numbers) for item in value)
    return skeleton(value)


def refuse_sets_of_tensors(value: Any, path: str) -> None:
    """A set has no order in which a graph could name its tensors."""
    for keys, leaf in leaves(value):
        if isinstance(leaf, set | frozenset) and any(isinstance(item, Tensor) for item in leaf):
            raise UnsupportedError(
                f"{_path(path, keys)} is a {type(leaf).__name__} of tensors.", fix="keep them in a list or a dict."
            )


def nested_slot(slot: Slot, keys: tuple[Any, ...]) -> Slot:
    """The slot of a leaf; the slot itself where there are no keys."""
    return NestedSlot(slot.kind, _path(slot.path, keys), slot.of, slot, keys) if keys else slot


def mutable_nests(value: Any) -> Iterator[Any]:
    """The containers in a value that can be changed in place."""
    if isinstance(value, NESTS):
        if not isinstance(value, tuple):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from mutable_nests(item)


def _path(path: str, keys: tuple[Any, ...]) -> str:
    return path + "".join(f"[{key!r}]" for key in keys)


def _with_leaf(value: Any, keys: tuple[Any, ...], leaf: Any) -> Any:
    """The containers with another leaf: changed in place where they can be."""
    if not keys:
        return leaf
    key, rest = keys[0], keys[1:]
    item = _with_leaf(value[key] if rest else None, rest, leaf)
    if isinstance(value, tuple):
        items = [*value[:key], item, *value[key + 1 :]]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    value[key] = item
    return value
