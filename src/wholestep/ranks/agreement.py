"""Ranks agree, through the store, on the graph that each of them is about to run for the first time.

Every rank writes a record of its graph for (step, call) and waits for the records of the others. Ranks that have run
their graph before (a cache hit there, a capture here) are answered for by their watchdog. Then all ranks have the same
records in hand, and each comes to the same conclusion by itself:

    all collectives the same, graphs for the same shapes the same,
    and scalars that ranks must share (`shared_scalars`) the same       every rank runs
    otherwise                                                           every rank raises, with the first difference

A rank that does not come is given up after `deadline` seconds without a sign that it compiles. The first rank that
decides, decides for all (`verdict`): no rank starts while another gives up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wholestep.errors import DesyncError, PeerFailedError
from wholestep.ranks.channel import DEADLINE, Channel
from wholestep.ranks.digest import GraphDigest, Line, LinesDigest, digest_of, first_difference
from wholestep.ranks.failure import DESYNC_FIX, SCALARS_FIX, Failure, Kind, as_error
from wholestep.ranks.peers import Board, Position, State, StoreGoneError
from wholestep.ranks.rounds import RoundKeys, detail_of, record_of
from wholestep.ranks.shared_scalars import differing
from wholestep.ranks.watchdog import BEAT, Job

__all__ = ["Agreement", "GraphDigest", "digest_of"]

_ASK_AFTER = 0.2
_LOOK_EVERY = 0.5
_MOST_VALUES = 8
_FOREVER = 10 * 365 * 86400.0


class Agreement:
    """The agreement of one step."""

    def __init__(
        self, channel: Channel, step: str, deadline: float = DEADLINE, ranks: Sequence[int] | None = None
    ) -> None:
        self._channel = channel
        self._step = step
        self._deadline = deadline
        self._ranks = range(channel.size) if ranks is None else sorted(ranks)

    def agree(self, call: int, digest: GraphDigest | LinesDigest) -> None:
        """Return once all ranks are about to run (or already run) graphs that fit; raises on every rank otherwise."""
        channel = self._channel
        channel.watchdog.answers.agreed.append((self._step, call))
        with channel.agreeing(self._step, call):
            current = _Round(channel, RoundKeys(self._step, call), digest, self._deadline, self._ranks)
            try:
                channel.perform(Job(current.poll), _FOREVER)  # the round has a deadline of its own
            except StoreGoneError as error:
                lost = Failure(Kind.STORE, 0, self._step, call, str(error), running=False)
                raise as_error(lost, channel.rank) from error
            if current.outcome is not None:
                raise current.outcome


class _Round:
    """One round; polled by the watchdog."""

    def __init__(
        self,
        channel: Channel,
        keys: RoundKeys,
        digest: GraphDigest | LinesDigest,
        deadline: float,
        ranks: Sequence[int],
    ) -> None:
        self.outcome: DesyncError | PeerFailedError | None = None
        self._channel = channel
        self._watchdog = channel.watchdog
        self._keys = keys
        self._digest = digest
        self._deadline = deadline
        self._ranks = ranks
        self._position = Position(State.AGREEING, keys.step, keys.call)
        self._begun = 0.0
        self._asked = False
        self._look_due = 0.0
        self._records: dict[int, dict[str, Any]] = {}
        self._pair: tuple[list[int], list[int]] | None = None
        self._about = "graph"
        """What the two sides differ in: values of scalars, whole graphs, or the constants of their updates."""
        self._detail_until = 0.0
        self._events: list[str] = []
        """What this rank asked; nobody else needs it once the round is over."""

    def poll(self, board: Board) -> bool:
        """One look at the store; whether the round is over."""
        now = time.monotonic()
        if not self._begun:
            self._begun = now
            board.write(self._keys.record(self._channel.rank), record_of(self._digest))
            board.count(self._keys.of("count"), 1)
        if self._pair is not None:
            return self._poll_details(board, now)
        if board.count(self._keys.of("count")) >= len(self._ranks):
            verdict = board.write_first(self._keys.of("verdict"), "go")
            return self._compare(board, now) if verdict == "go" else self._stop(Failure.read(verdict))
        return self._wait(board, now)

    def _wait(self, board: Board, now: float) -> bool:
        known = (f for f in self._watchdog.failures if f.concerns(self._keys.step, self._keys.call))
        failed = next((f for f in known if not f.is_undecided), None)
        if failed is None and now - self._begun > _ASK_AFTER and not self._asked:
            self._ask(board)
        if failed is None and now >= self._look_due:
            self._look_due = now + _LOOK_EVERY
            failed = self._missing(board, now)
        if failed is None:
            return False
        verdict = board.write_first(self._keys.of("verdict"), failed.write())
        if verdict == "go":
            return False  # the last rank came at this moment
        board.remove([self._keys.record(self._channel.rank), *self._events])
        if verdict == failed.write() and failed not in self._watchdog.failures:
            self._watchdog.post(failed)  # ranks that run a graph they know do not look at the verdict
        return self._stop(Failure.read(verdict))

    def _ask(self, board: Board) -> None:
        """Have the watchdogs of ranks that run a graph they know answer for them."""
        self._asked = True
        if board.count(self._keys.of("asked"), 1) == 1:
            self._post({"kind": "question"})

    def _post(self, event: dict[str, Any]) -> None:
        number = self._watchdog.post_event({**event, "step": self._keys.step, "call": self._keys.call})
        self._events.append(f"event/{number}")

    def _missing(self, board: Board, now: float) -> Failure | None:
        """The failure of the first rank that had its time to come."""
        peers = self._watchdog.peers
        others = [rank for rank in self._ranks if rank != self._channel.rank]
        present = board.read_some([self._keys.record(rank) for rank in others])
        missing = [rank for rank, record in zip(others, present, strict=True) if record is None]
        peers.refresh(board, missing)
        late = [rank for rank in missing if now - max(self._begun, peers.compiled_at(rank)) > self._deadline]
        gone = [rank for rank in missing if peers.state(rank) in (State.LEFT, State.ABORTED)]
        dead = [rank for rank in missing if peers.silent_for(rank) > self._watchdog.deadline]
        silence = min(max(3 * BEAT, self._deadline / 2), self._watchdog.deadline)
        for rank in gone or dead or late:
            lost = self._watchdog.lost(rank, self._position, silence)
            if lost is not None:
                return replace(lost, running=False)
        if not late:
            return None
        place = f"call {self._keys.call} of {self._keys.step}"
        lines = [f"    rank {rank} {peers.last_words(rank)}" for rank in late]
        shown = f"{_ranks(late)} did not come to {place} within {self._deadline:g} s.\n" + "\n".join(lines)
        shown += "\n    A rank that is only slow (data, evaluation, a checkpoint) needs a longer deadline= in the plan"
        shown += " or schedule."
        return Failure(Kind.DESYNC, late[0], self._keys.step, self._keys.call, shown, running=False)

    def _stop(self, failure: Failure) -> bool:
        self.outcome = as_error(failure, self._channel.rank, aborted=self._watchdog.broken is not None)
        return True

    def _compare(self, board: Board, now: float) -> bool:
        found = board.read_all([self._keys.record(rank) for rank in self._ranks])
        self._records = dict(zip(self._ranks, found, strict=True))
        for about, find in (("scalars", scalar_difference), ("graph", difference), ("update", update_difference)):
            self._about, self._pair = about, find(self._records)
            if self._pair is not None:
                break
        if self._pair is None:
            self._finish(board)
            return True
        self._detail_until = now + self._deadline
        for side in self._pair:
            if side[0] == self._channel.rank:
                board.write(self._keys.detail(side[0]), detail_of(self._digest, self._by_nodes()))
            elif "answered" in self._records[side[0]] and self._is_first():
                self._post({"kind": "detail", "rank": side[0], "nodes": self._by_nodes()})
        return False

    def _by_nodes(self) -> bool:
        """Whether whole graphs are compared: both are for the same shapes, and none was answered for."""
        assert self._pair is not None
        left, right = (self._records[side[0]] for side in self._pair)
        return _is_strict(left) and _is_strict(right) and left["ragged"] == right["ragged"]

    def _is_first(self) -> bool:
        """Whether this is the lowest of the ranks that take part: it speaks for all."""
        return all("answered" in record for rank, record in self._records.items() if rank < self._channel.rank)

    def _poll_details(self, board: Board, now: float) -> bool:
        assert self._pair is not None
        left, right = (board.read(self._keys.detail(side[0])) for side in self._pair)
        if (left is None or right is None) and now < self._detail_until:
            return False
        text, fix = self._difference(left, right)
        if not text:
            self._finish(board)
            return True
        if any("answered" in record for record in self._records.values()):
            # Those ranks are in a collective that the others will not come to: no group can be used any more.
            where = (self._pair[1][0], self._keys.step, self._keys.call)
            failure = Failure(Kind.DESYNC, *where, text, running=True, fix=fix)
            if self._is_first():
                self._watchdog.post(failure)
            self._watchdog.break_groups(failure)
        self.outcome = DesyncError(text, fix=fix)
        self._finish(board)
        return True

    def _difference(self, left: dict[str, Any] | None, right: dict[str, Any] | None) -> tuple[str, str]:
        """What differs between the two sides, in words, and what to do about it; no words where that is no failure."""
        assert self._pair is not None
        place = f"call {self._keys.call} of {self._keys.step}"
        if self._about == "scalars" and left is not None and right is not None:
            shown = _values(self._pair, left["shared"], right["shared"])
            return f"Ranks have other values of scalars that must be the same in {place}:\n{shown}", SCALARS_FIX
        if self._about == "update":
            # Constants may come from sizes. Where no value that the step reads differs, they do.
            shown = "" if left is None or right is None else _values(self._pair, left["read"], right["read"])
            if left is None or right is None or not shown:
                return "", ""
            text = _describe(self._keys, self._pair, left["update"], right["update"], "update", "constant")
            return f"{text}\nValues that the step reads and that differ:\n{shown}", SCALARS_FIX
        if isinstance(self._digest, LinesDigest):
            subject, unit = self._digest.subject, "line"
        else:
            subject, unit = "graph", "node" if self._by_nodes() else "collective"
        lines = [None if side is None else side["lines"] for side in (left, right)]
        text = _describe(self._keys, self._pair, lines[0], lines[1], subject, unit)
        shown = "" if left is None or right is None else _values(self._pair, left["read"], right["read"])
        return f"{text}\nValues that the step reads and that differ:\n{shown}" if shown else text, DESYNC_FIX

    def _finish(self, board: Board) -> None:
        """The last rank that has read everything takes it away."""
        board.remove(self._events)
        readers = sum("answered" not in record for record in self._records.values())
        if board.count(self._keys.of("done"), 1) == readers:
            board.remove(self._keys.all(self._ranks))


def difference(records: Mapping[int, dict[str, Any]]) -> tuple[list[int], list[int]] | None:
    """The ranks with the most common graph and those with the next, where ranks may not run together; else None."""
    by_communication: dict[str, list[int]] = defaultdict(list)
    by_graph: dict[Any, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in records.items():
        by_communication[record["communication"]].append(rank)
        if _is_strict(record):
            by_graph[record["ragged"]][record["fingerprint"]].append(rank)
    for sides in (*by_graph.values(), by_communication):
        if len(sides) > 1:
            first, second, *_ = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
            return first, second
    return None


def scalar_difference(records: Mapping[int, dict[str, Any]]) -> tuple[list[int], list[int]] | None:
    """The ranks of one plan with the most common values of the scalars they share, and those with the next."""
    for ranks in _teams(records, "values"):
        by_names: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in ranks:
            by_names[records[rank]["names"]][records[rank]["values"]].append(rank)
        for sides in by_names.values():
            if len(sides) > 1:
                first, second, *_ = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
                return first, second
    return None


def update_difference(records: Mapping[int, dict[str, Any]]) -> tuple[list[int], list[int]] | None:
    """The ranks of one plan whose graphs change state by the most common constants, and those with the next."""
    for ranks in _teams(records, "update"):
        sides: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            sides[records[rank]["update"]].append(rank)
        if len(sides) > 1:
            first, second, *_ = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
            return first, second
    return None


def _teams(records: Mapping[int, dict[str, Any]], key: str) -> list[list[int]]:
    """Ranks that a mesh axis of their plan connects, directly or through others; of those whose record has a key."""
    found: list[tuple[set[str], list[int]]] = []
    for rank, record in sorted(records.items()):
        if key not in record:
            continue
        words, ranks = set(record["teams"]), [rank]
        apart = []
        for known in found:
            if known[0] & words:
                words |= known[0]
                ranks += known[1]
            else:
                apart.append(known)
        found = [*apart, (words, ranks)]
    return [sorted(ranks) for _, ranks in found]


def _values(pair: tuple[list[int], list[int]], left: dict[str, str], right: dict[str, str]) -> str:
    """A line for each value that differs, of the first ones."""
    one, other = (_ranks(side) for side in pair)
    verbs = ["has" if len(side) == 1 else "have" for side in pair]
    paths = differing(left, right)
    lines = [
        f"    {path}: {one} {verbs[0]} {left[path]}, {other} {verbs[1]} {right[path]}" for path in paths[:_MOST_VALUES]
    ]
    return "\n".join(lines + [f"    .. and {len(paths) - _MOST_VALUES} more"] * (len(paths) > _MOST_VALUES))


def _is_strict(record: dict[str, Any]) -> bool:
    return "fingerprint" in record and record["ragged"] is not True


def _describe(
    keys: RoundKeys,
    pair: tuple[list[int], list[int]],
    left: list[Line] | None,
    right: list[Line] | None,
    subject: str,
    unit: str,
) -> str:
    one, other = (_ranks(side) for side in pair)
    text = f"Ranks disagree on the {subject} of call {keys.call} of {keys.step}: {one} against {other}."
    if left is None or right is None:
        return f"{text} Rank {pair[0 if left is None else 1][0]} did not say in time what it runs."
    found = first_difference(left, right)
    if found is None:
        return f"{text} All lines of their graphs are the same; constants or the structure of results differ."
    number, a, b = found
    width = max(len(one), len(other))
    return f"{text} The first difference is {unit} {number}:\n    {one:<{width}}  {a}\n    {other:<{width}}  {b}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", .. {len(ranks)} in all" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
