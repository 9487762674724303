"""The base classes of guards: a condition on a call, with a cheap check and, if it fails, the reasons as text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wholestep.ir.captured_step import GuardSpecs
from wholestep.ir.user_objects.plain_contents import PLAIN, replaced, same_plain
from wholestep.ir.user_objects.slots import ABSENT, MappingSlot, SequenceSlot, StoredItemSlot
from wholestep.torch_private.guard_checks import DictWatch


@dataclass(slots=True)
class Call:
    """A call of the step, as guards see it."""

    leaves: list[Any]
    """The leaves of the arguments."""
    structure: Any
    """The tree structure of the arguments."""
    state: list[Any] | None
    """The current values of the graph's inputs; None if some no longer exist."""


class Guard(ABC):
    """One condition of a captured graph on a call."""

    @abstractmethod
    def holds(self, call: Call) -> bool:
        """Whether the condition is met. Runs at every call."""

    @abstractmethod
    def reasons(self, call: Call) -> Iterator[str]:
        """What differs, as text. Runs only after a check failed; the guards before this one in the order hold."""

    def is_needed(self) -> bool:
        """Whether there is anything to check; otherwise the guard is left out."""
        return True

    def changed_scalars(self, call: Call) -> Iterator[str]:
        """The paths of Python scalars whose value changed but not their type: the next capture makes them inputs."""
        return iter(())


class PerItemGuard(Guard):
    """A guard on a few items that are checked one by one: it holds if `reasons` yields nothing."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items_to_check = items

    def is_needed(self) -> bool:
        return bool(self._items_to_check)

    def holds(self, call: Call) -> bool:
        return next(self.reasons(call), None) is None


class DictVersionGuard(Guard):
    """Guards on the contents of some dicts: they are checked again only after one of these dicts was written."""

    def __init__(self, guards: Sequence[Guard], dicts: Sequence[dict[Any, Any]]) -> None:
        self._guards = guards
        self._dicts = list({id(d): d for d in dicts}.values())
        self._watch: DictWatch | None = None
        """Created when the guards last held."""

    def holds(self, call: Call) -> bool:
        if self._watch is not None and self._watch.unchanged():
            return True
        if not all(guard.holds(call) for guard in self._guards):
            return False
        self._watch = DictWatch(self._dicts)
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for guard in self._guards:
            yield from guard.reasons(call)

    def changed_scalars(self, call: Call) -> Iterator[str]:
        for guard in self._guards:
            yield from guard.changed_scalars(call)


def change_text(path: str, before: Any, now: Any) -> str:
    """The text for a value that changed."""
    return f"{path} was {_brief(before)} and is {_brief(now)}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value)[:80] if isinstance(value, PLAIN) or value is ABSENT else f"a {type(value).__name__}"


def inputs_in_containers(specs: GuardSpecs) -> dict[int, set[Any]]:
    """By identity of a list or dict, the keys of numbers in it that are inputs of the graph."""
    found: dict[int, set[Any]] = {}
    for slot, _ in specs.scalar_types:
        if isinstance(slot, MappingSlot | StoredItemSlot):
            found.setdefault(id(slot.mapping), set()).add(slot.key)
        elif isinstance(slot, SequenceSlot):
            found.setdefault(id(slot.sequence), set()).add(slot.index)
    return found


def other_scalars(path: str, now: Any, before: Any) -> Iterator[str]:
    """The path of a scalar that changed; of those in a tuple or list that is another one, and that it is."""
    if is_other_scalar(now, before):
        yield path
    elif isinstance(now, tuple | list) and type(now) is type(before) and len(now) == len(before):
        changed = [i for i, (one, other) in enumerate(zip(now, before, strict=True)) if is_other_scalar(one, other)]
        yield from (f"{path}[{i}]" for i in changed)
        pairs = zip(now, before, strict=True)
        if now is not before and (changed or any(isinstance(a, Tensor) and a is not b for a, b in pairs)):
            yield replaced(path)


def is_other_scalar(now: Any, before: Any) -> bool:
    """Whether both are scalars of one type with different values."""
    return type(now) is type(before) and type(now) in (int, float) and not same_plain(now, before)
