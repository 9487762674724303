"""Ranks compare their shared scalars call by call, without messages per call.

The thread that runs steps records the values of a call if they changed. The watchdog adds the changes to a running
hash, which is part of its heartbeat; the next rank along each axis of the plan compares it with its own at that call.

    hashes equal          nothing to do
    hashes differ         the other rank is asked for its changes, and the first value that differs is named

If the graphs of two ranks have different scalar inputs (one captured again, for a batch of another shape), their
hashes differ although all values are equal: that is not a failure.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wholestep.ranks.failure import SCALARS_FIX, Failure, FailureKind
from wholestep.ranks.peers import StoreClient
from wholestep.ranks.shared_scalars import Named, SharedScalars, canonical, differing

if TYPE_CHECKING:
    from wholestep.ranks.peers import Peers

_MAX_CHANGES = 4096
_MAX_SENT = 512
_MAX_SHOWN = 8
_ANSWER_SECONDS = 10.0
_RETRY_SECONDS = 30.0
"""Pause after a comparison that found different scalars but no different value."""

Change = tuple[int, Named, Named]
"""A call, the values in force from then on, and the constants of its graph."""


class ScalarHistory:
    """The shared scalars of one step, call by call. The thread that runs steps calls `note`, the watchdog the rest."""

    def __init__(self, step: str, neighbours: Sequence[int]) -> None:
        self.step = step
        self.neighbours = tuple(neighbours)
        self.reached = 0
        self._scalars: SharedScalars | None = None
        self._values: tuple[Any, ...] = ()
        self._noted: deque[tuple[int, SharedScalars, tuple[Any, ...]]] = deque(maxlen=_MAX_CHANGES)
        self._advanced = 0
        self._calls: list[int] = []
        self._changes: list[tuple[int, Named, Named]] = []
        """For each change (its call is in `_calls`): the hash, all values then in force, the constants of the graph."""
        self._dropped = False

    def note(self, call: int, scalars: SharedScalars, values: tuple[Any, ...]) -> None:
        """Record the values with which a call runs."""
        if values != self._values or scalars is not self._scalars:
            self._scalars, self._values = scalars, values
            self._noted.append((call, scalars, values))
        self.reached = call

    def advance(self) -> tuple[int, int]:
        """Add what was noted to the hash. Returns the last call and the hash after it."""
        reached = self.reached
        while self._noted:
            call, scalars, values = self._noted.popleft()
            self._add(call, scalars.named(values), scalars.constants)
        self._advanced = max(self._advanced, reached)
        return self._advanced, self._changes[-1][0] if self._changes else 0

    def _add(self, call: int, named: Named, constants: Named) -> None:
        value, known, before = self._changes[-1] if self._changes else (0, {}, {})
        new = {p: t for p, t in named.items() if p not in known or canonical(known[p]) != canonical(t)}
        if not new and constants == before:
            return
        if new:
            entry = json.dumps([value, call, sorted((path, canonical(text)) for path, text in new.items())])
            value = int(hashlib.sha256(entry.encode()).hexdigest()[:15], 16)
        self._calls.append(call)
        self._changes.append((value, {**known, **new}, constants))
        if len(self._calls) > 2 * _MAX_CHANGES:
            del self._calls[:_MAX_CHANGES], self._changes[:_MAX_CHANGES]
            self._dropped = True

    def at(self, call: int) -> int | None:
        """The hash after a call; None if that has not run yet, or ran too long ago."""
        if call > self._advanced:
            return None
        place = bisect_right(self._calls, call)
        if place == 0:
            return None if self._dropped else 0
        return self._changes[place - 1][0]

    def since(self, call: int) -> list[Change]:
        """The values in force at a call, and the changes after it; only the latest ones if there are many."""
        place = max(bisect_right(self._calls, call) - 1, 0, len(self._calls) - _MAX_SENT)
        chosen = zip(self._calls[place:], self._changes[place:], strict=True)
        return [(each, named, constants) for each, (_, named, constants) in chosen]


@dataclass
class _Question:
    """A pending question to another rank."""

    step: str
    other: int
    since: int
    asked: float
    event: int


class ScalarWatch:
    """The scalar histories of one rank, and their comparison with the neighbours; used by the watchdog."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._histories: dict[str, ScalarHistory] = {}
        self._same: dict[tuple[str, int], int] = {}
        self._questions: dict[tuple[str, int], _Question] = {}
        self._stopped: set[str] = set()
        """Steps for which a failure was posted."""
        self._retry_at: dict[tuple[str, int], float] = {}
        self._ahead: dict[tuple[str, int], tuple[int, int]] = {}

    def history(self, step: str, neighbours: Sequence[int]) -> ScalarHistory:
        """A new history for a step that has none, or has one of another plan."""
        made = ScalarHistory(step, neighbours)
        self._histories = {**self._histories, step: made}
        return made

    def shown(self) -> dict[str, tuple[int, int]]:
        """The last call and hash by step, for the heartbeat."""
        return {step: history.advance() for step, history in self._histories.items() if history.neighbours}

    def reached(self, step: str) -> int:
        """The last call of a step that this rank has begun."""
        history = self._histories.get(step)
        return 0 if history is None else history.reached

    def compare(self, store: StoreClient, peers: Peers) -> list[tuple[str, int, int]]:
        """Compare with the heartbeats of neighbours: step, rank and last equal call of each whose hash differs."""
        others = {rank for history in self._histories.values() for rank in history.neighbours}
        if not others:
            return []
        peers.refresh(store, sorted(others))
        found = []
        for step, history in self._histories.items():
            for other in history.neighbours:
                key = step, other
                beat = peers.beat(other)
                theirs = None if beat is None else beat.scalars.get(step)
                # The hash of a call that this rank has not reached yet is kept until it has.
                if theirs is not None and key not in self._ahead:
                    self._ahead[key] = theirs[0], theirs[1]
                call, value = self._ahead.get(key, (0, 0))
                ours = history.at(call) if call else None
                if ours is None and not (call and call <= history.reached):
                    continue
                del self._ahead[key]
                if ours == value:
                    self._same[key] = call
                elif ours is not None and key not in self._questions:
                    found.append((step, other, self._same.get(key, 0)))
        return found

    def is_due(self, step: str, other: int, now: float) -> bool:
        """Whether to ask about a difference: not after a failure of this step, nor shortly after the last question."""
        return step not in self._stopped and now >= self._retry_at.get((step, other), 0.0)

    def asked(self, step: str, other: int, since: int, now: float, event: int) -> None:
        """Record that a rank was asked for its values."""
        self._questions[step, other] = _Question(step, other, since, now, event)

    def answer(self, store: StoreClient, event: dict[str, Any]) -> None:
        """Write the values that another rank asked for, if the question is for this rank."""
        history = self._histories.get(event["step"])
        if event["rank"] == self._rank and history is not None:
            reached, _ = history.advance()
            values = {"reached": reached, "changes": history.since(int(event["since"]))}
            store.write(_key(history.step, int(event["by"]), self._rank), values)

    def poll(self, store: StoreClient, now: float) -> Failure | None:
        """Read the answers that have arrived; returns the failure that one of them shows, if any."""
        for key, question in list(self._questions.items()):
            place = _key(question.step, self._rank, question.other)
            answer = store.read(place)
            if answer is None and now - question.asked < _ANSWER_SECONDS:
                continue
            del self._questions[key]
            store.remove([place, f"event/{question.event}"])
            if answer is not None:
                failure = self._judge(question, answer)
                if failure is not None and failure.step not in self._stopped:
                    self._stopped.add(failure.step)
                    return failure
                self._retry_at[key] = now + _RETRY_SECONDS
        return None

    def _judge(self, question: _Question, answer: dict[str, Any]) -> Failure | None:
        history = self._histories[question.step]
        reached, _ = history.advance()
        theirs = [(int(call), named, constants) for call, named, constants in answer["changes"]]
        found = first_difference(history.since(question.since), theirs, min(reached, int(answer["reached"])))
        if found is None:
            return None
        call, mine, other, paths = found
        ranks = f"Ranks {self._rank} and {question.other}"
        lines = [
            f"    {path}: rank {self._rank} has {mine[path]}, rank {question.other} has {other[path]}"
            for path in paths[:_MAX_SHOWN]
        ]
        lines += [f"    .. and {len(paths) - _MAX_SHOWN} more"] * (len(paths) > _MAX_SHOWN)
        text = f"{ranks} run {question.step} with scalars that must be the same and differ since call {call}:"
        where = (question.other, question.step, call)
        return Failure(
            FailureKind.DESYNC, *where, "\n".join([text, *lines]), running=False, fix=SCALARS_FIX, stops=True
        )


def first_difference(left: list[Change], right: list[Change], until: int) -> tuple[int, Named, Named, list[str]] | None:
    """The first call up to `until` at which the values in force differ: the call, the values of both sides, the paths.

    A scalar that is an input on one side may be a constant of the graph on the other.
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
