"""Agreement: before a graph runs for the first time, all ranks check through the store that their graphs fit.

Every rank writes a record of its graph for (step, call) and waits for the records of the others. For a rank that has
run its graph before (a cache hit there, a capture here) its watchdog writes the record. Then every rank reads the same
records and reaches the same decision on its own:

    same collectives, same graphs where shapes are the same,
    and same values of shared scalars (`shared_scalars`)        every rank runs
    some could not capture a graph (`RefusedDigest`)            every rank runs the plain function, if none has begun
    otherwise                                                   every rank raises, with the first difference

A rank that does not arrive counts as missing after `deadline` seconds without a sign that it compiles. The first rank
that writes the key `verdict` decides for all, so no rank starts while another raises.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wholestep.errors import DesyncError, PeerFailedError
from wholestep.ranks.agreement_records import (
    GraphDigest,
    Line,
    RoundKeys,
    TextDigest,
    detail_of,
    digest_of,
    first_difference,
    known_record_of,
    record_of,
)
from wholestep.ranks.channel import DEADLINE, Channel
from wholestep.ranks.failure import DESYNC_FIX, SCALARS_FIX, Failure, FailureKind, as_error
from wholestep.ranks.peers import Position, RankState, StoreClient, StoreGoneError
from wholestep.ranks.shared_scalars import differing
from wholestep.ranks.watchdog import BEAT, Job

__all__ = ["Agreement", "GraphDigest", "digest_of"]

_ASK_AFTER = 0.2
_CHECK_INTERVAL = 0.5
_MAX_VALUES = 8
_NO_LIMIT = 10 * 365 * 86400.0


class Agreement:
    """Runs the agreement of one step before each first run of a graph."""

    def __init__(
        self, channel: Channel, step: str, deadline: float = DEADLINE, ranks: Sequence[int] | None = None
    ) -> None:
        self._channel = channel
        self._step = step
        self._deadline = deadline
        self._ranks = range(channel.size) if ranks is None else sorted(ranks)

    def agree(self, call: int, digest: GraphDigest | TextDigest, *, known: bool = False) -> Mapping[int, str]:
        """Return once all ranks are about to run (or already run) compatible graphs; otherwise raise on every rank.

        `known`: the graph has run before, and the scalars of its digest are those of an earlier call.
        Returns the refusals by rank. If there are any, no rank has begun its graph, and all run the plain function.
        """
        channel = self._channel
        channel.watchdog.answers.agreed.append((self._step, call))
        with channel.agreeing(self._step, call):
            current = _Round(channel, RoundKeys(self._step, call), digest, known, self._deadline, self._ranks)
            try:
                channel.perform(Job(current.poll), _NO_LIMIT)  # the round has its own deadline
            except StoreGoneError as error:
                lost = Failure(FailureKind.STORE, 0, self._step, call, str(error), running=False)
                raise as_error(lost, channel.rank) from error
            if current.outcome is not None:
                raise current.outcome
            return current.refusals


class _Round:
    """One round of agreement, for one call of one step; polled by the watchdog."""

    def __init__(
        self,
        channel: Channel,
        keys: RoundKeys,
        digest: GraphDigest | TextDigest,
        known: bool,
        deadline: float,
        ranks: Sequence[int],
    ) -> None:
        self.outcome: DesyncError | PeerFailedError | None = None
        self.refusals: dict[int, str] = {}
        """What ranks that could not capture a graph wrote, if all run the plain function."""
        self._channel = channel
        self._watchdog = channel.watchdog
        self._keys = keys
        self._digest = digest
        self._record = known_record_of(digest) if known else record_of(digest)
        self._deadline = deadline
        self._ranks = ranks
        self._position = Position(RankState.AGREEING, keys.step, keys.call)
        self._begun = 0.0
        self._asked = False
        self._next_check = 0.0
        self._records: dict[int, dict[str, Any]] = {}
        self._pair: tuple[list[int], list[int]] | None = None
        self._about = "graph"
        """What differs between the two sides: "scalars", "graph", or "update" (the constants of their updates)."""
        self._detail_until = 0.0
        self._events: list[str] = []
        """Keys of the questions that this rank posted; they are deleted when the round is over."""

    def poll(self, store: StoreClient) -> bool:
        """Read the store once. Returns whether the round is over."""
        now = time.monotonic()
        if not self._begun:
            self._begun = now
            store.write(self._keys.record(self._channel.rank), self._record)
            store.count(self._keys.of("count"), 1)
        if self._pair is not None:
            return self._poll_details(store, now)
        if store.count(self._keys.of("count")) >= len(self._ranks):
            verdict = store.write_first(self._keys.of("verdict"), "go")
            return self._compare(store, now) if verdict == "go" else self._stop(Failure.from_json(verdict))
        return self._wait(store, now)

    def _wait(self, store: StoreClient, now: float) -> bool:
        known = (f for f in self._watchdog.failures if f.concerns(self._keys.step, self._keys.call))
        failed = next((f for f in known if not f.is_undecided), None)
        if failed is None and now - self._begun > _ASK_AFTER and not self._asked:
            self._ask(store)
        if failed is None and now >= self._next_check:
            self._next_check = now + _CHECK_INTERVAL
            failed = self._missing(store, now)
        if failed is None:
            return False
        verdict = store.write_first(self._keys.of("verdict"), failed.to_json())
        if verdict == "go":
            return False  # the last rank arrived meanwhile
        store.remove([self._keys.record(self._channel.rank), *self._events])
        if verdict == failed.to_json() and failed not in self._watchdog.failures:
            self._watchdog.post(failed)  # ranks that run a graph they have run before do not read the verdict
        return self._stop(Failure.from_json(verdict))

    def _ask(self, store: StoreClient) -> None:
        """Ask the watchdogs of ranks that run a graph they have run before to write its record."""
        self._asked = True
        if store.count(self._keys.of("asked"), 1) == 1:
            self._post({"kind": "question"})

    def _post(self, event: dict[str, Any]) -> None:
        number = self._watchdog.post_event({**event, "step": self._keys.step, "call": self._keys.call})
        self._events.append(f"event/{number}")

    def _missing(self, store: StoreClient, now: float) -> Failure | None:
        """The failure of the first rank that is missing past the deadline."""
        peers = self._watchdog.peers
        others = [rank for rank in self._ranks if rank != self._channel.rank]
        present = store.read_some([self._keys.record(rank) for rank in others])
        missing = [rank for rank, record in zip(others, present, strict=True) if record is None]
        peers.refresh(store, missing)
        late = [rank for rank in missing if now - max(self._begun, peers.compiled_at(rank)) > self._deadline]
        gone = [rank for rank in missing if peers.state(rank) in (RankState.LEFT, RankState.ABORTED)]
        dead = [rank for rank in missing if peers.silent_for(rank) > self._watchdog.deadline]
        silence = min(max(3 * BEAT, self._deadline / 2), self._watchdog.deadline)
        for rank in gone or dead or late:
            lost = self._watchdog.lost(rank, self._position, silence)
            if lost is not None:
                return replace(lost, running=False)
        if not late:
            return None
        place = f"call {self._keys.call} of {self._keys.step}"
        lines = [f"    rank {rank} {peers.status_text(rank)}" for rank in late]
        shown = f"{_ranks(late)} did not reach {place} within {self._deadline:g} s.\n" + "\n".join(lines)
        shown += (
            "\n    If that rank is only slow (data loading, evaluation, a checkpoint), set a longer deadline= in the"
        )
        shown += " plan or schedule."
        return Failure(FailureKind.DESYNC, late[0], self._keys.step, self._keys.call, shown, running=False)

    def _stop(self, failure: Failure) -> bool:
        self.outcome = as_error(failure, self._channel.rank, aborted=self._watchdog.broken is not None)
        return True

    def _compare(self, store: StoreClient, now: float) -> bool:
        found = store.read_all([self._keys.record(rank) for rank in self._ranks])
        self._records = dict(zip(self._ranks, found, strict=True))
        self.refusals = {rank: record["refused"] for rank, record in self._records.items() if "refused" in record}
        if self.refusals:
            self._refuse_if_begun()
            self._finish(store)
            return True
        for about, find in (("scalars", scalar_difference), ("graph", difference), ("update", update_difference)):
            self._about, self._pair = about, find(self._records)
            if self._pair is not None:
                break
        if self._pair is None:
            self._finish(store)
            return True
        self._detail_until = now + self._deadline
        for side in self._pair:
            if side[0] == self._channel.rank:
                store.write(self._keys.detail(side[0]), detail_of(self._digest, self._by_nodes()))
            elif "answered" in self._records[side[0]] and self._is_first():
                self._post({"kind": "detail", "rank": side[0], "nodes": self._by_nodes()})
        return False

    def _refuse_if_begun(self) -> None:
        """If a rank is in its graph already, the others cannot run the plain function, and all of them raise."""
        begun = [rank for rank, record in self._records.items() if "answered" in record]
        if not begun:
            return
        rank, text = min(self.refusals.items())
        place = f"call {self._keys.call} of {self._keys.step}"
        what = f"Rank {rank} cannot capture {place}, which {_ranks(begun)} already run as a graph:\n{text}"
        fix = 'use the same options on all ranks: with on_refusal="eager" on each of them, all run the plain function.'
        failure = Failure(FailureKind.DESYNC, rank, self._keys.step, self._keys.call, what, running=True, fix=fix)
        if self._is_first():
            self._watchdog.post(failure)
        self._watchdog.break_groups(failure)
        self.outcome = DesyncError(what, fix=fix)

    def _by_nodes(self) -> bool:
        """Whether whole graphs are compared: both have the same shape key, and no watchdog wrote the record."""
        assert self._pair is not None
        left, right = (self._records[side[0]] for side in self._pair)
        return _is_strict(left) and _is_strict(right) and left["ragged"] == right["ragged"]

    def _is_first(self) -> bool:
        """Whether this is the lowest rank that takes part in this round; it posts events for all of them."""
        return all("answered" in record for rank, record in self._records.items() if rank < self._channel.rank)

    def _poll_details(self, store: StoreClient, now: float) -> bool:
        assert self._pair is not None
        left, right = (store.read(self._keys.detail(side[0])) for side in self._pair)
        if (left is None or right is None) and now < self._detail_until:
            return False
        text, fix = self._difference(left, right)
        if not text:
            self._finish(store)
            return True
        if any("answered" in record for record in self._records.values()):
            # Those ranks wait in a collective that the others will not enter: the groups cannot be used any more.
            where = (self._pair[1][0], self._keys.step, self._keys.call)
            failure = Failure(FailureKind.DESYNC, *where, text, running=True, fix=fix)
            if self._is_first():
                self._watchdog.post(failure)
            self._watchdog.break_groups(failure)
        self.outcome = DesyncError(text, fix=fix)
        self._finish(store)
        return True

    def _difference(self, left: dict[str, Any] | None, right: dict[str, Any] | None) -> tuple[str, str]:
        """Text of the difference between the two sides and of its fix; empty if the difference is legal."""
        assert self._pair is not None
        place = f"call {self._keys.call} of {self._keys.step}"
        if self._about == "scalars" and left is not None and right is not None:
            shown = _values(self._pair, left["shared"], right["shared"])
            return f"Scalars that must be the same on all ranks differ in {place}:\n{shown}", SCALARS_FIX
        if self._about == "update":
            # Constants may come from sizes. They do if no value that the step reads differs.
            shown = "" if left is None or right is None else _values(self._pair, left["read"], right["read"])
            if left is None or right is None or not shown:
                return "", ""
            text = _describe(self._keys, self._pair, left["update"], right["update"], "update", "constant")
            return f"{text}\nValues that the step reads and that differ:\n{shown}", SCALARS_FIX
        if isinstance(self._digest, TextDigest):
            subject, unit = self._digest.subject, "line"
        else:
            subject, unit = "graph", "node" if self._by_nodes() else "collective"
        lines = [None if side is None else side["lines"] for side in (left, right)]
        text = _describe(self._keys, self._pair, lines[0], lines[1], subject, unit)
        shown = "" if left is None or right is None else _values(self._pair, left["read"], right["read"])
        return f"{text}\nValues that the step reads and that differ:\n{shown}" if shown else text, DESYNC_FIX

    def _finish(self, store: StoreClient) -> None:
        """Delete the keys of this round if this is the last rank that has read them."""
        store.remove(self._events)
        readers = sum("answered" not in record for record in self._records.values())
        if store.count(self._keys.of("done"), 1) == readers:
            store.remove(self._keys.all(self._ranks))


def difference(records: Mapping[int, dict[str, Any]]) -> tuple[list[int], list[int]] | None:
    """If ranks may not run together: the ranks with the most common graph and those with the second; else None."""
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
    """If shared scalars differ: the ranks with the most common values and those with the second; else None."""
    for ranks in _axis_groups(records, "values"):
        by_names: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in ranks:
            by_names[records[rank]["names"]][records[rank]["values"]].append(rank)
        for sides in by_names.values():
            if len(sides) > 1:
                first, second, *_ = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
                return first, second
    return None


def update_difference(records: Mapping[int, dict[str, Any]]) -> tuple[list[int], list[int]] | None:
    """If constants of the updates differ: the ranks with the most common ones and those with the second; else None."""
    for ranks in _axis_groups(records, "update"):
        sides: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            sides[records[rank]["update"]].append(rank)
        if len(sides) > 1:
            first, second, *_ = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
            return first, second
    return None


def _axis_groups(records: Mapping[int, dict[str, Any]], key: str) -> list[list[int]]:
    """Of the ranks whose record has `key`, those that a mesh axis of their plan connects, directly or transitively."""
    found: list[tuple[set[str], list[int]]] = []
    for rank, record in sorted(records.items()):
        if key not in record:
            continue
        labels, ranks = set(record["axis_groups"]), [rank]
        separate = []
        for team in found:
            if team[0] & labels:
                labels |= team[0]
                ranks += team[1]
            else:
                separate.append(team)
        found = [*separate, (labels, ranks)]
    return [sorted(ranks) for _, ranks in found]


def _values(pair: tuple[list[int], list[int]], left: dict[str, str], right: dict[str, str]) -> str:
    """One line for each value that differs, up to a limit."""
    one, other = (_ranks(side) for side in pair)
    verbs = ["has" if len(side) == 1 else "have" for side in pair]
    paths = differing(left, right)
    lines = [
        f"    {path}: {one} {verbs[0]} {left[path]}, {other} {verbs[1]} {right[path]}" for path in paths[:_MAX_VALUES]
    ]
    return "\n".join(lines + [f"    .. and {len(paths) - _MAX_VALUES} more"] * (len(paths) > _MAX_VALUES))


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
        return f"{text} Rank {pair[0 if left is None else 1][0]} did not write its graph in time."
    found = first_difference(left, right)
    if found is None:
        return f"{text} All lines of their graphs are equal; constants or the structure of results differ."
    number, a, b = found
    width = max(len(one), len(other))
    return f"{text} The first difference is {unit} {number}:\n    {one:<{width}}  {a}\n    {other:<{width}}  {b}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", .. {len(ranks)} in all" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
