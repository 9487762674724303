"""Ranks compare the scalars that they must share, call by call, without a round of messages per call.

The thread that runs steps notes the values of a call where they changed. The watchdog puts the changes into a running
hash, and shows it with its beat; the next rank along each axis of the plan compares it with its own at the same call.

    hashes equal          nothing more is said
    hashes differ         the changes of the other rank are asked for, and the first value that differs is named

Two ranks whose graphs have other scalars (one captured once more, for a batch of another shape) have other hashes and
equal values: that is no failure.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wholestep.ranks.failure import SCALARS_FIX, Failure, Kind
from wholestep.ranks.peers import Board
from wholestep.ranks.shared_scalars import Named, SharedScalars, differing, normal

if TYPE_CHECKING:
    from wholestep.ranks.peers import Peers

_KEPT = 4096
_SENT = 512
_SHOWN = 8
_ANSWER_SECONDS = 10.0
_AGAIN_SECONDS = 30.0
"""After a comparison that found other scalars and no other value."""

Change = tuple[int, Named, Named]
"""A call, the values in force from then on, and what the graph took for constants."""


class ScalarTrail:
    """The shared scalars of one step: `note` is for the thread that runs it, everything else for the watchdog."""

    def __init__(self, step: str, neighbours: Sequence[int]) -> None:
        self.step = step
        self.neighbours = tuple(neighbours)
        self.reached = 0
        self._scalars: SharedScalars | None = None
        self._values: tuple[Any, ...] = ()
        self._noted: deque[tuple[int, SharedScalars, tuple[Any, ...]]] = deque(maxlen=_KEPT)
        self._advanced = 0
        self._calls: list[int] = []
        self._changes: list[tuple[int, Named, Named]] = []
        """The hash after each change, all values then in force, and what the graph then took for constants; `_calls`
        has the calls."""
        self._dropped = False

    def note(self, call: int, scalars: SharedScalars, values: tuple[Any, ...]) -> None:
        """The values with which a call runs."""
        if values != self._values or scalars is not self._scalars:
            self._scalars, self._values = scalars, values
            self._noted.append((call, scalars, values))
        self.reached = call

    def advance(self) -> tuple[int, int]:
        """Take over what was noted: the last call and the hash then."""
        reached = self.reached
        while self._noted:
            call, scalars, values = self._noted.popleft()
            self._add(call, scalars.named(values), scalars.constants)
        self._advanced = max(self._advanced, reached)
        return self._advanced, self._changes[-1][0] if self._changes else 0

    def _add(self, call: int, named: Named, constants: Named) -> None:
        value, known, before = self._changes[-1] if self._changes else (0, {}, {})
        new = {p: t for p, t in named.items() if p not in known or normal(known[p]) != normal(t)}
        if not new and constants == before:
            return
        if new:
            told = json.dumps([value, call, sorted((path, normal(text)) for path, text in new.items())])
            value = int(hashlib.sha256(told.encode()).hexdigest()[:15], 16)
        self._calls.append(call)
        self._changes.append((value, {**known, **new}, constants))
        if len(self._calls) > 2 * _KEPT:
            del self._calls[:_KEPT], self._changes[:_KEPT]
            self._dropped = True

    def at(self, call: int) -> int | None:
        """The hash after a call; None if that is to come, or too long ago."""
        if call > self._advanced:
            return None
        place = bisect_right(self._calls, call)
        if place == 0:
            return None if self._dropped else 0
        return self._changes[place - 1][0]

    def since(self, call: int) -> list[Change]:
        """The values in force at a call, and all changes behind it, the last ones if there are many."""
        place = max(bisect_right(self._calls, call) - 1, 0, len(self._calls) - _SENT)
        chosen = zip(self._calls[place:], self._changes[place:], strict=True)
        return [(each, named, constants) for each, (_, named, constants) in chosen]


@dataclass
class _Question:
    """What was asked of another rank."""

    step: str
    other: int
    since: int
    asked: float
    event: int


class ScalarWatch:
    """The trails of one rank, and what its watchdog does with them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._trails: dict[str, ScalarTrail] = {}
        self._same: dict[tuple[str, int], int] = {}
        self._questions: dict[tuple[str, int], _Question] = {}
        self._stopped: set[str] = set()
        """Steps of which all ranks were told."""
        self._again: dict[tuple[str, int], float] = {}
        self._ahead: dict[tuple[str, int], tuple[int, int]] = {}

    def trail(self, step: str, neighbours: Sequence[int]) -> ScalarTrail:
        """A new trail; its step had none, or has one of another plan."""
        made = ScalarTrail(step, neighbours)
        self._trails = {**self._trails, step: made}
        return made

    def shown(self) -> dict[str, tuple[int, int]]:
        """For the beat: calls and hashes by step."""
        return {step: trail.advance() for step, trail in self._trails.items() if trail.neighbours}

    def reached(self, step: str) -> int:
        """The last call of a step that this rank has begun."""
        trail = self._trails.get(step)
        return 0 if trail is None else trail.reached

    def compare(self, board: Board, peers: Peers) -> list[tuple[str, int, int]]:
        """With the beats of neighbours: step, rank and last equal call of each whose hash differs."""
        others = {rank for trail in self._trails.values() for rank in trail.neighbours}
        if not others:
            return []
        peers.refresh(board, sorted(others))
        found = []
        for step, trail in self._trails.items():
            for other in trail.neighbours:
                key = step, other
                beat = peers.beat(other)
                theirs = None if beat is None else beat.scalars.get(step)
                # A hash of a call that this rank has yet to come to stays until it has.
                if theirs is not None and key not in self._ahead:
                    self._ahead[key] = theirs[0], theirs[1]
                call, value = self._ahead.get(key, (0, 0))
                ours = trail.at(call) if call else None
                if ours is None and not (call and call <= trail.reached):
                    continue
                del self._ahead[key]
                if ours == value:
                    self._same[key] = call
                elif ours is not None and key not in self._questions:
                    found.append((step, other, self._same.get(key, 0)))
        return found

    def is_due(self, step: str, other: int, now: float) -> bool:
        """Whether a difference is to be looked into: it was not, or long ago."""
        return step not in self._stopped and now >= self._again.get((step, other), 0.0)

    def asked(self, step: str, other: int, since: int, now: float, event: int) -> None:
        """Remember that a rank was asked for its values."""
        self._questions[step, other] = _Question(step, other, since, now, event)

    def answer(self, board: Board, event: dict[str, Any]) -> None:
        """Write the values that another rank asked for, if it asked this one."""
        trail = self._trails.get(event["step"])
        if event["rank"] == self._rank and trail is not None:
            reached, _ = trail.advance()
            values = {"reached": reached, "changes": trail.since(int(event["since"]))}
            board.write(_key(trail.step, int(event["by"]), self._rank), values)

    def poll(self, board: Board, now: float) -> Failure | None:
        """Read answers that came; the failure that one of them shows."""
        for key, question in list(self._questions.items()):
            place = _key(question.step, self._rank, question.other)
            answer = board.read(place)
            if answer is None and now - question.asked < _ANSWER_SECONDS:
                continue
            del self._questions[key]
            board.remove([place, f"event/{question.event}"])
            if answer is not None:
                failure = self._judge(question, answer)
                if failure is not None and failure.step not in self._stopped:
                    self._stopped.add(failure.step)
                    return failure
                self._again[key] = now + _AGAIN_SECONDS
        return None

    def _judge(self, question: _Question, answer: dict[str, Any]) -> Failure | None:
        trail = self._trails[question.step]
        reached, _ = trail.advance()
        theirs = [(int(call), named, constants) for call, named, constants in answer["changes"]]
        found = first_difference(trail.since(question.since), theirs, min(reached, int(answer["reached"])))
        if found is None:
            return None
        call, mine, other, paths = found
        ranks = f"Ranks {self._rank} and {question.other}"
        lines = [
            f"    {path}: rank {self._rank} has {mine[path]}, rank {question.other} has {other[path]}"
            for path in paths[:_SHOWN]
        ]
        lines += [f"    .. and {len(paths) - _SHOWN} more"] * (len(paths) > _SHOWN)
        text = f"{ranks} run {question.step} with scalars that must be the same and differ since call {call}:"
        told = "\n".join([text, *lines])
        where = (question.other, question.step, call)
        return Failure(Kind.DESYNC, *where, told, running=False, fix=SCALARS_FIX, stops=True)


def first_difference(left: list[Change], right: list[Change], until: int) -> tuple[int, Named, Named, list[str]] | None:
    """The first call, not after `until`, at which values in force differ: the call, both values, the paths.

    A scalar input of one side may be a constant of the graph on the other.
    """
    if not left or not right:
        return None
    start = max(left[0][0], right[0][0])
    for call in sorted({start} | {c for c, _, _ in (*left, *right) if start <= c <= until}):
        (mine, fixed), (theirs, others_fixed) = _in_force(left, call), _in_force(right, call)
        here, there = {**fixed, **mine}, {**others_fixed, **theirs}
        paths = [path for path in differing(here, there) if path in mine or path in theirs]
        if paths and call <= until:
            return call, here, there, paths
    return None


def _in_force(changes: Iterable[Change], call: int) -> tuple[Named, Named]:
    found: tuple[Named, Named] = {}, {}
    for each, named, constants in changes:
        if each > call:
            break
        found = named, constants
    return found


def _key(step: str, asker: int, rank: int) -> str:
    return f"scalars/{step}/{asker}/{rank}"
