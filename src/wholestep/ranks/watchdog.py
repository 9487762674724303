"""The watchdog: a thread of each rank that talks to the store, so that the thread that runs steps never waits for it.

Several times a second it reads one counter: failures and questions of other ranks are numbered events. About once a
second it writes the heartbeat of this rank. If this rank stays in one call for longer than that, it also reads the
heartbeats of the others: a rank without a heartbeat will not take part. On a failure it aborts the process groups,
which wakes the thread that runs steps. That thread hands over what it needs from the store as a `Job`, which is polled
until it is done.

`RunningHash`: what a rank has run, as one integer. Each call of a graph that communicates enters a running hash; two
ranks that have run the same have the same hash at the same count, even if one is many calls ahead.

`CoordinatedStop`: all ranks stop before the same call of a step, between two collectives, if something is wrong but
communication works. A rank that stopped at once would leave the others waiting in a collective. So each rank holds
before its next call as soon as it learns of the failure, and its watchdog writes the last call that it has begun; the
first call that no rank has begun is the one before which all raise. Ranks that hold before an earlier call continue
until then.

    stop/<step>/at/r       the last call that rank r has begun
    stop/<step>/count      how many ranks have written theirs
    stop/<step>/verdict    the call before which all stop
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wholestep.ranks.agreement_records import Answers
from wholestep.ranks.failure import Failure, FailureKind
from wholestep.ranks.peers import (
    Heartbeat,
    Peers,
    Position,
    RankState,
    StoreClient,
    StoreGoneError,
    heartbeat_key,
    next_heartbeat,
)
from wholestep.ranks.scalar_watch import ScalarWatch
from wholestep.torch_private.distributed import (
    Address,
    abort_groups,
    flight_recording,
    flight_recording_prefix,
    gloo_addresses,
    group_names,
    uses_accelerator,
)

log = logging.getLogger("wholestep")

POLL = 0.15
_POLL_JOB = (0.002, 0.05)
BEAT = 1.0
_LATE_EVENT = 5.0
_MAX_FAILURES = 64


class Job:
    """Something to do with the store: polled by the watchdog until it returns True or raises."""

    def __init__(self, poll: Callable[[StoreClient], bool]) -> None:
        self.poll = poll
        self.done = threading.Event()
        self.error: BaseException | None = None


class Watchdog(threading.Thread):
    """One per Channel. Each public attribute is written by one thread only."""

    def __init__(
        self, store: StoreClient, rank: int, size: int, deadline: float, is_current: Callable[[], bool]
    ) -> None:
        super().__init__(name="wholestep watchdog", daemon=True)
        self.rank = rank
        self.deadline = deadline
        self.position = Position()
        self.answers = Answers(rank)
        self.run_hash = RunningHash()
        self.scalars = ScalarWatch(rank)
        self._stopping_all = CoordinatedStop(rank, size, self.scalars.reached)
        self.failures: list[Failure] = []
        """What this rank and the others posted; the thread that runs steps only tests whether it is empty."""
        self.broken: Failure | None = None
        """Why the process groups of this rank were aborted."""
        self.aborted = threading.Event()
        """Set when the abort is complete; with NCCL it takes a second or two."""
        self.recording = ""
        """Path of the flight recorder's dump."""
        self.store_gone = ""
        self.ticked = time.monotonic()
        self._store = store
        self._is_current = is_current
        # Beyond some hundred ranks each rank asks less often, so that the load of the store does not grow.
        self._slower = max(1.0, size / 256)
        self.peers = Peers((other for other in range(size) if other != rank), gap=5 * BEAT * self._slower)
        self._beat = Heartbeat(0, self.position, socket.gethostname(), os.getpid())
        self._beat_due = 0.0
        self._published: Position | None = None
        self._seen: Position | None = None
        self._seen_since = 0.0
        self._next_check = 0.0
        self._warned: Position | None = None
        self._ahead = (0, 0)
        self._same_until = 0
        self._events = 0
        self._late_events: dict[int, float] = {}
        self._withdrawable: int | None = None
        self._groups = -1
        self._listeners: frozenset[Address] = frozenset()
        self._asynchronous = False
        self._jobs: list[Job] = []
        self._pause = POLL
        self._wake = threading.Event()
        self._stopping = threading.Event()

    def submit(self, job: Job) -> None:
        """Run a job on this thread, soon."""
        self._jobs.append(job)
        self._wake.set()

    def cancel(self, job: Job) -> None:
        """Drop a job whose caller no longer waits for it."""
        if job in self._jobs:
            self._jobs.remove(job)

    def stop(self) -> None:
        """End the thread; it tells the others that this rank has left."""
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        """The loop of the thread."""
        while not self._stopping.is_set() and self._is_current():
            self._guarded(self._tick)
            self._check_without_store()
            self._run_jobs()
            self.ticked = time.monotonic()
            self._wake.wait(self._pause if self._jobs else POLL * self._slower)
            self._wake.clear()
        self.position = Position(RankState.LEFT, self.position.step, self.position.call)
        self._guarded(self._write_beat)

    def post(self, failure: Failure) -> None:
        """Tell all ranks of a failure. Call it only on this thread."""
        self._learn(failure)
        number = self.post_event({"kind": "failure", "failure": failure.to_json()})
        if not failure.running:
            if self._withdrawable is not None:
                self._store.remove([f"event/{self._withdrawable}"])
            self._withdrawable = number

    def post_event(self, event: dict[str, Any]) -> int:
        """Post an event to all ranks and return its number. Call it only on this thread."""
        number = self._store.count("events", 1)
        self._store.write(f"event/{number}", {**event, "by": self.rank})
        return number

    def break_groups(self, failure: Failure) -> None:
        """Abort all process groups of this rank for good. Call it only on this thread, or if this thread has ended."""
        if self.broken is not None:
            return
        self.recording = _dump_flight_recorder(self.rank)
        self._learn(failure)
        self.broken = failure
        try:
            abort_groups(self._listeners)
        except (OSError, RuntimeError):
            log.exception("a process group could not be aborted; its collectives end at the time-out of the backend")
        self.aborted.set()
        self._guarded(self._write_beat)

    def lost(self, rank: int, position: Position, silence: float) -> Failure | None:
        """The failure of a rank that cannot reach the call in which this rank waits; None if it still may."""
        beat = self.peers.beat(rank)
        if beat is None:
            return None
        there = beat.position
        words = self.peers.status_text(rank)
        if there.state is RankState.ABORTED:
            # A rank that aborted its groups did so for the failure of another rank, which it names.
            cause = None if beat.cause is None else Failure.from_json(beat.cause)
            if cause is not None and (cause.kind is FailureKind.DESYNC or cause.rank != self.rank):
                return cause
            return Failure(FailureKind.ABORTED, rank, position.step, position.call, words)
        if there.state is RankState.LEFT:
            passed = there.step == position.step and there.call >= position.call
            return None if passed else Failure(FailureKind.LEFT, rank, position.step, position.call, words)
        if self.peers.silent_for(rank) > silence:
            return Failure(FailureKind.DIED, rank, position.step, position.call, f"died or hangs ({words})")
        return None

    def absent(self, ranks: Iterable[int], position: Position) -> Failure | None:
        """The failure that names those of `ranks` that are alive but not in the call in which this rank waits."""
        late = []
        for rank in ranks:
            beat = self.peers.beat(rank)
            there = Position() if beat is None else beat.position
            came = there.step == position.step and there.call >= position.call
            if rank != self.rank and not came and there.state is not RankState.RUNNING:
                late.append(rank)
        if not late:
            return None
        lines = [f"    rank {rank} {self.peers.status_text(rank)}" for rank in late]
        place = f"call {position.call} of {position.step}"
        text = f"This rank waited in {place}, which not all ranks reached:\n" + "\n".join(lines)
        return Failure(FailureKind.DESYNC, late[0], position.step, position.call, text)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action that uses the store, unless the store is gone."""
        if self.store_gone:
            return
        try:
            action()
        except StoreGoneError as error:
            self.store_gone = str(error)
            log.info("rank %d: the store is gone: %s", self.rank, error)

    def _tick(self) -> None:
        now = time.monotonic()
        position = self.position
        if position is not self._seen:
            self._seen, self._seen_since, stayed = position, now, False
        else:
            stayed = self._published is not position  # a position that lasts is published before the next heartbeat
        if stayed or now >= self._beat_due:
            self._beat_due = now + BEAT * self._slower
            self._write_beat()
            self._compare_runs()
            self._compare_scalars(now)
        self._read_events(now)
        self._stop_all(self.scalars.poll(self._store, now))
        self.answers.give(self._store)
        self._learn_groups()
        if any(failure.is_undecided for failure in self.failures):
            self.failures = self._stopping_all.poll(self._store, self.failures)
        self._check_failures(position, now)
        self._watch(position, now)

    def _write_beat(self) -> None:
        self._published = position = self.position
        cause = None
        if self.broken is not None and position.state is not RankState.LEFT:
            position, cause = Position(RankState.ABORTED, position.step, position.call), self.broken.to_json()
        self._beat = next_heartbeat(self._beat, position, cause, self.run_hash.last, self.scalars.shown())
        self._store.write(heartbeat_key(self.rank), self._beat.to_json())

    def _read_events(self, now: float) -> None:
        number = self._store.count("events")
        for new in range(self._events + 1, number + 1):
            self._late_events[new] = now
        self._events = number
        for each, since in list(self._late_events.items()):
            event = self._store.read(f"event/{each}")
            if event is not None or now - since > _LATE_EVENT:  # counted long ago and still missing: it was deleted
                del self._late_events[each]
            if event is not None and event["by"] != self.rank:
                self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        if event["kind"] == "failure":
            self._learn(Failure.from_json(event["failure"]))
        elif event["kind"] == "scalars":
            self.scalars.answer(self._store, event)
        else:
            self.answers.ask(event)

    def _learn(self, failure: Failure) -> None:
        known = failure.stops and any(each.stops and each.step == failure.step for each in self.failures)
        if failure not in self.failures and not known:
            keep = [each for each in self.failures if each.running]
            rest = [each for each in self.failures if not each.running][-_MAX_FAILURES:]
            self.failures = [*keep, *rest, failure]

    def _learn_groups(self) -> None:
        groups = group_names()
        if len(groups) != self._groups:
            self._listeners = self._store.without_prefix(gloo_addresses)
            self._asynchronous = any(uses_accelerator(group) for group in groups)
            self._groups = len(groups)

    def _check_failures(self, position: Position, now: float) -> None:
        if self.broken is None:
            stays = now - self._seen_since > BEAT
            for failure in self.failures:
                alone = position.state is RankState.RUNNING and failure.concerns(position.step, position.call)
                # A rank past the call before which all stop waits in vain only if it makes no progress.
                if failure.running or (alone and not failure.is_undecided and (stays or not failure.stops)):
                    self.break_groups(failure)
                    return

    def _watch(self, position: Position, now: float) -> None:
        waits = position.state is RankState.RUNNING or (self._asynchronous and position.state is RankState.IDLE)
        if not waits or not position.step or now - self._seen_since < BEAT or self.broken is not None:
            return
        if now < self._next_check:
            return
        self._next_check = now + BEAT * self._slower
        self.peers.refresh(self._store, self.peers.others)
        if position.state is RankState.IDLE and now - self._seen_since < self.deadline:
            return
        for rank in self.peers.others:
            failure = self.lost(rank, position, self.deadline)
            if failure is not None and not (failure.kind is FailureKind.LEFT and position.state is RankState.IDLE):
                self.post(failure)
                self.break_groups(failure)
                return
        if now - self._seen_since > self.deadline and self._warned is not position:
            # It may be late for a good reason (it evaluates, or saves): only the time-out of the backend ends the wait.
            absent = self.absent(self.peers.others, position)
            if absent is not None:
                self._warned = position
                log.warning("rank %d: %s", self.rank, absent.text)

    def _compare_runs(self) -> None:
        """Compare the running hash with that of the next rank: if any two ranks differ, some two neighbours do. Costs
        a few reads a second for any number of ranks."""
        if self.broken is not None or not self.run_hash.last[0]:
            return
        other = (self.rank + 1) % (len(self.peers.others) + 1)
        self.peers.refresh(self._store, [other])
        beat = self.peers.beat(other)
        if beat is not None and beat.calls and beat.calls > self._ahead[0]:
            self._ahead = (beat.calls, beat.run_hash)
        calls, theirs = self._ahead
        ours = self.run_hash.at(calls) if calls else None
        if ours is None:
            return
        if ours == theirs:
            self._same_until, self._ahead = calls, (0, 0)
            return
        place = self.position
        text = (
            f"Ranks {self.rank} and {other} have run graphs with different collectives: each had run its graph before, "
            f"and they chose different ones after call {self._same_until} and not later than call {calls} (counted "
            f"over all compiled steps). This rank is at call {place.call} of {place.step}; rank {other} "
            f"{self.peers.status_text(other)}."
        )
        failure = Failure(FailureKind.DESYNC, other, place.step, place.call, text)
        self.post(failure)
        self.break_groups(failure)

    def _compare_scalars(self, now: float) -> None:
        """Compare shared scalars with the next rank along each axis; if hashes differ, ask for its values."""
        if self.broken is not None:
            return
        for step, other, since in self.scalars.compare(self._store, self.peers):
            if self.scalars.is_due(step, other, now):
                event = self.post_event({"kind": "scalars", "step": step, "rank": other, "since": since})
                self.scalars.asked(step, other, since, now, event)

    def _stop_all(self, failure: Failure | None) -> None:
        """Tell all ranks of a failure for which they stop before a common call. Groups work and are not aborted."""
        if failure is not None and self.broken is None:
            log.error("%s", failure.text)
            self.post(failure)

    def _check_without_store(self) -> None:
        """Without a store no rank can post a failure; abort the groups of a rank that stays in a call for long."""
        position = self.position
        if self.store_gone and position is not self._seen:
            self._seen, self._seen_since = position, time.monotonic()
        silent = time.monotonic() - self._seen_since > self.deadline
        if self.store_gone and position.state is RankState.RUNNING and silent:
            self.break_groups(self.store_failure(position))

    def store_failure(self, position: Position) -> Failure:
        """The failure that a rank reports if the store is gone."""
        return Failure(FailureKind.STORE, 0, position.step, position.call, self.store_gone or "no answer")

    def _run_jobs(self) -> None:
        low, high = _POLL_JOB
        self._pause = min(self._pause * 1.5, high * self._slower) if self._jobs else low
        for job in list(self._jobs):
            try:
                finished = job.poll(self._store)
            except BaseException as error:  # `Channel.perform` raises it in the thread that waits for the job
                job.error, finished = error, True
                if isinstance(error, StoreGoneError):
                    self.store_gone = self.store_gone or str(error)
            if finished:
                self.cancel(job)
                job.done.set()


def _dump_flight_recorder(rank: int) -> str:
    try:
        content = flight_recording()
        if content is None:
            return ""
        path = Path(f"{flight_recording_prefix()}{rank}")
        path.write_bytes(content)
        return str(path)
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("the flight recorder could not be written: %s", error)
        return ""


_FACTOR = 1_000_003
_MASK = (1 << 61) - 1
_KEPT = 4096


class RunningHash:
    """Running hash of the calls of one rank. Written by the thread that runs steps, read by the watchdog."""

    def __init__(self) -> None:
        self.last: tuple[int, int] = (0, 0)
        """The count of calls, and the hash of all of them."""
        self._recent: deque[int] = deque(maxlen=_KEPT)

    def add(self, number: int) -> None:
        """Add a call. `number`: the id of what its graph communicates (`GraphDigest.communication_id`)."""
        count, value = self.last
        value = (value * _FACTOR ^ number) & _MASK
        self._recent.append(value)
        self.last = (count + 1, value)

    def at(self, count: int) -> int | None:
        """The hash after `count` calls; None if these have not run yet, or ran too long ago."""
        now, _ = self.last
        recent = list(self._recent)
        behind = now - count
        return recent[-1 - behind] if 0 <= behind < len(recent) else None


class CoordinatedStop:
    """One rank's side of the agreement on the call before which all ranks stop."""

    def __init__(self, rank: int, size: int, reached: Callable[[str], int]) -> None:
        """`reached`: the last call of a step that this rank has begun."""
        self._rank = rank
        self._size = size
        self._reached = reached
        self._posted: set[str] = set()
        self._verdicts: dict[str, int] = {}

    def poll(self, store: StoreClient, failures: list[Failure]) -> list[Failure]:
        """Write the last call of this rank, and read the verdict. Returns the failures, with `stops_at` if decided."""
        return [self._decided(store, each) if each.is_undecided else each for each in failures]

    def _decided(self, store: StoreClient, failure: Failure) -> Failure:
        step = failure.step
        if step not in self._posted:
            # `failures` already has this one, so the thread that runs steps begins no further call.
            self._posted.add(step)
            store.write(f"stop/{step}/at/{self._rank}", self._reached(step))
            store.count(f"stop/{step}/count", 1)
        if step not in self._verdicts:
            if store.count(f"stop/{step}/count") < self._size:
                return failure
            begun = store.read_all([f"stop/{step}/at/{rank}" for rank in range(self._size)])
            self._verdicts[step] = int(store.write_first(f"stop/{step}/verdict", max(begun) + 1))
        return replace(failure, stops_at=self._verdicts[step])
