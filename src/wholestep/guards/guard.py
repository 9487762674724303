"""What a guard is: a condition on a call, with a cheap check, the reasons why it fails, and their wording."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wholestep.ir.user_objects.plain_values import PLAIN, same_plain
from wholestep.ir.user_objects.slots import ABSENT
from wholestep.torch_private.guard_checks import DictWatch


@dataclass(slots=True)
class Call:
    """A call of the step, as guards see it."""

    leaves: list[Any]
    """Of the arguments."""
    structure: Any
    """Equal for arguments of the same structure."""
    state: list[Any] | None
    """The inputs of the graph as they are now; None if some are gone."""


class Guard(ABC):
    """One condition of a captured graph on a call."""

    @abstractmethod
    def holds(self, call: Call) -> bool:
        """Whether the condition is met: run at every call."""

    @abstractmethod
    def reasons(self, call: Call) -> Iterator[str]:
        """What differs, for people: run only where a check failed. Guards before this one in the order hold."""

    def is_needed(self) -> bool:
        """Whether there is something to look at; otherwise the guard is left out."""
        return True

    def changed_numbers(self, call: Call) -> Iterator[str]:
        """The paths of Python numbers that have another value of the same type: the next capture makes them inputs."""
        return iter(())


class Listed(Guard):
    """A guard that looks at few things one by one: it holds where there is no reason why not."""

    def __init__(self, looks_at: Sequence[Any]) -> None:
        self._looks_at = looks_at

    def is_needed(self) -> bool:
        return bool(self._looks_at)

    def holds(self, call: Call) -> bool:
        return next(self.reasons(call), None) is None


class Watched(Guard):
    """Guards on what lies in some dicts: while none of these is written, no guard needs a second look."""

    def __init__(self, guards: Sequence[Guard], dicts: Sequence[dict[Any, Any]]) -> None:
        self._guards = guards
        self._dicts = list({id(d): d for d in dicts}.values())
        self._watch: DictWatch | None = None
        """Begun when the guards held."""

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

    def changed_numbers(self, call: Call) -> Iterator[str]:
        for guard in self._guards:
            yield from guard.changed_numbers(call)


def was_and_is(path: str, before: Any, now: Any) -> str:
    """That there is another value now."""
    return f"{path} was {_brief(before)} and is {_brief(now)}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value)[:80] if isinstance(value, PLAIN) or value is ABSENT else f"a {type(value).__name__}"


def is_other_number(now: Any, before: Any) -> bool:
    """Whether both are numbers of a type, and differ."""
    return type(now) is type(before) and type(now) in (int, float) and not same_plain(now, before)
