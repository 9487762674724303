"""What a trial came to, and when two failures are the same: type, message but for its numbers, and node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

TRUE, FALSE, RETURNED, RAISED, SIGNAL, HANG, BROKEN = "true", "false", "returned", "raised", "signal", "hang", "broken"

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Outcome:
    """How a run of a graph, or of a predicate on it, ended."""

    kind: str
    """true, false: what a predicate said; returned, raised: a graph; signal, hang; broken: not even tested."""
    type: str = ""
    message: str = ""
    node: str = ""
    """The node that raised."""
    types: tuple[str, ...] = ()
    """The error's class and those above it."""

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        first = self.message.splitlines()[0] if self.message else ""
        if self.kind == RAISED:
            return f"{self.type.rsplit('.', 1)[-1]}{where}: {first}"
        if self.kind == SIGNAL:
            return f"died of {self.message}"
        return {HANG: "did not end in time", TRUE: "the predicate holds", FALSE: "the predicate does not hold"}.get(
            self.kind, f"{self.kind} {first}".strip()
        )


def raised(error: BaseException, node: str = "") -> Outcome:
    """The outcome of an exception."""
    types = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
    return Outcome(RAISED, types[0], str(error)[:4000], node, types)


def same_failure(wanted: Outcome, found: Outcome) -> bool:
    """Whether a smaller case fails as the first one did."""
    if wanted.kind != found.kind:
        return False
    if wanted.kind == SIGNAL:
        return wanted.message == found.message
    if wanted.kind == RAISED:
        same_node = not wanted.node or wanted.node == found.node
        return wanted.type == found.type and plain(wanted.message) == plain(found.message) and same_node
    return wanted.kind in (TRUE, HANG)


def plain(message: str) -> str:
    """A message without what changes with shapes and from run to run."""
    return re.sub(r"(#[, ]*)+", "#", _NUMBERS.sub("#", message)).strip()


def is_asked_for(error: Any, found: Outcome) -> bool:
    """Whether the first failure is the one that the user named: a class, an instance, or nothing."""
    if error is None:
        return True
    if found.kind != RAISED:
        return False
    if isinstance(error, type):
        return f"{error.__module__}.{error.__qualname__}" in found.types
    wanted = raised(error)
    return wanted.type == found.type and plain(wanted.message.split("\n\nWhile executing")[0]) == plain(found.message)
