"""The thread of a rank that talks to the store, so that the thread that runs steps never has to wait for it.

Several times a second it looks at one counter: failures and questions of other ranks are numbered events. About once a
second it writes where this rank is. While this rank sits in one call for longer than that, it also reads where the
others are: one that fell silent will not come. On a failure it aborts the process groups, which wakes the other thread.
What the other thread wants from the store it hands over as a job, which is polled until it is done.

`Trail`: what a rank has run, as one number that all ranks can compare. Each call of a graph that communicates goes into
a running hash; two ranks that have run the same have the same hash at the same count, however far apart they are.

`Stopping`: all ranks stop before the same call of a step, between two collectives, for what is wrong while
communication works. A rank that stopped at once would leave the others alone in a collective. So each rank holds before
its next call as soon as it hears of the failure, and its watchdog writes how far it has come; the first call that no
rank has begun is the one before which all raise. A rank that holds before an earlier call is let go until then.

    stop/<step>/at/r       the last call that rank r has begun
    stop/<step>/count      how many ranks have written theirs
    stop/<step>/verdict    the call before which all stop

Take this rank out of all its process groups, so that a thread that waits in a collective returns.

NCCL has an abort for that. Gloo has none (`ProcessGroup.abort` does nothing there, 2.11 to 2.13): a wait ends when the
connections do. So the connections are shut down below it; the wait then raises "Connection closed by peer", later
collectives raise the same at once, and the group can still be destroyed. Gloo's connections are those with an end at an
address where some rank listens for gloo; ranks write these addresses to the store when they make a group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wholestep.ranks.failure import Failure, Kind
from wholestep.ranks.peers import Beat, Board, Peers, Position, State, StoreGoneError, beat_key, following
from wholestep.ranks.rounds import Answers
from wholestep.ranks.scalar_watch import ScalarWatch
from wholestep.torch_private.distributed import (
    abort_nccl,
    flight_recording,
    flight_recording_prefix,
    group_names,
    is_gloo,
    uses_accelerator,
)

if TYPE_CHECKING:
    from wholestep.torch_private.distributed import Store

log = logging.getLogger("wholestep")

Address = tuple[str, int]

_KEY = re.compile(r"(?:(?P<group>.+)//)?[a-z]+//\d+/\d+")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def gloo_addresses(store: Store) -> frozenset[Address]:
    """Where the ranks of this rank's gloo groups listen. Reads keys that are there; nothing is waited for."""
    names = {name for group, name in group_names().items() if is_gloo(group)}
    if not names:
        return frozenset()
    try:
        present = store.list_keys()
    except NotImplementedError:
        log.warning("%s cannot list its keys: gloo's waits end only with the backend's time-out", type(store).__name__)
        return frozenset()
    keys = [key for key in present if (match := _KEY.fullmatch(key)) and match["group"] in {None, *names}]
    found = (_listener(value) for value in (store.multi_get(keys) if keys else ()))
    return frozenset(address for address in found if address is not None)


def abort_groups(listeners: Iterable[Address]) -> None:
    """Abort every process group of this process."""
    abort_nccl()
    closed = _shut_down(frozenset(listeners))
    log.info("aborted %d process groups (%d connections)", len(group_names()), closed)


def _listener(value: bytes) -> Address | None:
    """The address in what gloo writes for a rank: length and host name, length and `sockaddr_storage`, ..."""
    try:
        (length,) = struct.unpack_from("=Q", value)
        start = 8 + length + 8
        (family,) = struct.unpack_from("=H", value, start)
        (port,) = struct.unpack_from(">H", value, start + 2)
        if family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, value[start + 4 : start + 8]), port
        if family == socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, value[start + 8 : start + 24]), port
    except (struct.error, ValueError, OverflowError):
        log.debug("not an address of gloo: %r", value[:64])
    return None


def _shut_down(listeners: frozenset[Address]) -> int:
    closed = 0
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), _duplicate(int(name)) as end:  # suppressed: closed since, or not connected
            if end is not None and listeners & {_address(end.getsockname()), _address(end.getpeername())}:
                end.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        yield None
        return
    with socket.socket(fileno=os.dup(descriptor)) as end:
        yield end if end.family in _FAMILIES else None


def _address(name: tuple[object, ...]) -> Address:
    host, port = str(name[0]), name[1]
    assert isinstance(port, int)
    return host.removeprefix("::ffff:"), port


POLL = 0.15
_POLL_JOB = (0.002, 0.05)
BEAT = 1.0
_LATE_EVENT = 5.0
_MOST_FAILURES = 64


class Job:
    """Something to do with the store: polled by the watchdog until it returns True or raises."""

    def __init__(self, poll: Callable[[Board], bool]) -> None:
        self.poll = poll
        self.done = threading.Event()
        self.error: BaseException | None = None


class Watchdog(threading.Thread):
    """One per Channel. Plain attributes are written by one thread and read by the other."""

    def __init__(self, board: Board, rank: int, size: int, deadline: float, is_current: Callable[[], bool]) -> None:
        super().__init__(name="wholestep watchdog", daemon=True)
        self.rank = rank
        self.deadline = deadline
        self.position = Position()
        self.answers = Answers(rank)
        self.trail = Trail()
        self.scalars = ScalarWatch(rank)
        self._stopping_all = Stopping(rank, size, self.scalars.reached)
        self.failures: list[Failure] = []
        """What other ranks (and this one) posted; the thread that runs steps looks only at whether there is any."""
        self.broken: Failure | None = None
        """Why the process groups of this rank were aborted."""
        self.aborted = threading.Event()
        """They are; an abort of NCCL takes a second or two."""
        self.recording = ""
        """Where the flight recorder's dump is."""
        self.store_gone = ""
        self.ticked = time.monotonic()
        self._board = board
        self._is_current = is_current
        # Beyond some hundred ranks the store is asked less often, not more.
        self._slower = max(1.0, size / 256)
        self.peers = Peers((other for other in range(size) if other != rank), gap=5 * BEAT * self._slower)
        self._beat = Beat(0, self.position, socket.gethostname(), os.getpid())
        self._beat_due = 0.0
        self._published: Position | None = None
        self._seen: Position | None = None
        self._seen_since = 0.0
        self._look_due = 0.0
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
        """Have a job done by this thread, soon."""
        self._jobs.append(job)
        self._wake.set()

    def cancel(self, job: Job) -> None:
        """Forget a job that nobody waits for any more."""
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
            self._look_without_store()
            self._run_jobs()
            self.ticked = time.monotonic()
            self._wake.wait(self._pause if self._jobs else POLL * self._slower)
            self._wake.clear()
        self.position = Position(State.LEFT, self.position.step, self.position.call)
        self._guarded(self._write_beat)

    def post(self, failure: Failure) -> None:
        """Tell all ranks of a failure. Only on this thread."""
        self._learn(failure)
        number = self.post_event({"kind": "failure", "failure": failure.write()})
        if not failure.running:
            if self._withdrawable is not None:
                self._board.remove([f"event/{self._withdrawable}"])
            self._withdrawable = number

    def post_event(self, event: dict[str, Any]) -> int:
        """Tell all ranks something; the number of the event. Only on this thread."""
        number = self._board.count("events", 1)
        self._board.write(f"event/{number}", {**event, "by": self.rank})
        return number

    def break_groups(self, failure: Failure) -> None:
        """Abort all process groups of this rank, for good. Only on this thread."""
        if self.broken is not None:
            return
        self.recording = _dump_flight_recorder(self.rank)
        self._learn(failure)
        self.broken = failure
        try:
            abort_groups(self._listeners)
        except (OSError, RuntimeError):
            log.exception("a process group could not be aborted; its collectives end with the backend's time-out")
        self.aborted.set()
        self._guarded(self._write_beat)

    def lost(self, rank: int, position: Position, silence: float) -> Failure | None:
        """The failure of a rank that cannot come to where this rank waits, if it is one."""
        beat = self.peers.beat(rank)
        if beat is None:
            return None
        there = beat.position
        words = self.peers.last_words(rank)
        if there.state is State.ABORTED:
            # The rank that aborted its groups is not the one that failed: it says which one did.
            cause = None if beat.cause is None else Failure.read(beat.cause)
            if cause is not None and (cause.kind is Kind.DESYNC or cause.rank != self.rank):
                return cause
            return Failure(Kind.ABORTED, rank, position.step, position.call, words)
        if there.state is State.LEFT:
            passed = there.step == position.step and there.call >= position.call
            return None if passed else Failure(Kind.LEFT, rank, position.step, position.call, words)
        if self.peers.silent_for(rank) > silence:
            return Failure(Kind.DIED, rank, position.step, position.call, f"died or hangs ({words})")
        return None

    def absent(self, ranks: Iterable[int], position: Position) -> Failure | None:
        """What is wrong with those of `ranks` that are alive and have not come to where this rank waits, if any."""
        late = []
        for rank in ranks:
            beat = self.peers.beat(rank)
            there = Position() if beat is None else beat.position
            came = there.step == position.step and there.call >= position.call
            if rank != self.rank and not came and there.state is not State.RUNNING:
                late.append(rank)
        if not late:
            return None
        lines = [f"    rank {rank} {self.peers.last_words(rank)}" for rank in late]
        place = f"call {position.call} of {position.step}"
        text = f"This rank waited in {place}, where not all ranks came:\n" + "\n".join(lines)
        return Failure(Kind.DESYNC, late[0], position.step, position.call, text)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Do something with the store, unless it is gone."""
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
            stayed = self._published is not position  # a position that lasts is published before the next beat
        if stayed or now >= self._beat_due:
            self._beat_due = now + BEAT * self._slower
            self._write_beat()
            self._compare_trails()
            self._compare_scalars(now)
        self._read_events(now)
        self._stop_all(self.scalars.poll(self._board, now))
        self.answers.give(self._board)
        self._learn_groups()
        if any(failure.is_undecided for failure in self.failures):
            self.failures = self._stopping_all.poll(self._board, self.failures)
        self._check_failures(position, now)
        self._watch(position, now)

    def _write_beat(self) -> None:
        self._published = position = self.position
        cause = None
        if self.broken is not None and position.state is not State.LEFT:
            position, cause = Position(State.ABORTED, position.step, position.call), self.broken.write()
        self._beat = following(self._beat, position, cause, self.trail.last, self.scalars.shown())
        self._board.write(beat_key(self.rank), self._beat.write())

    def _read_events(self, now: float) -> None:
        number = self._board.count("events")
        for new in range(self._events + 1, number + 1):
            self._late_events[new] = now
        self._events = number
        for each, since in list(self._late_events.items()):
            event = self._board.read(f"event/{each}")
            if event is not None or now - since > _LATE_EVENT:  # long counted and not there: deleted
                del self._late_events[each]
            if event is not None and event["by"] != self.rank:
                self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        if event["kind"] == "failure":
            self._learn(Failure.read(event["failure"]))
        elif event["kind"] == "scalars":
            self.scalars.answer(self._board, event)
        else:
            self.answers.ask(event)

    def _learn(self, failure: Failure) -> None:
        known = failure.stops and any(each.stops and each.step == failure.step for each in self.failures)
        if failure not in self.failures and not known:
            keep = [each for each in self.failures if each.running]
            rest = [each for each in self.failures if not each.running][-_MOST_FAILURES:]
            self.failures = [*keep, *rest, failure]

    def _learn_groups(self) -> None:
        groups = group_names()
        if len(groups) != self._groups:
            self._listeners = self._board.ask(gloo_addresses)
            self._asynchronous = any(uses_accelerator(group) for group in groups)
            self._groups = len(groups)

    def _check_failures(self, position: Position, now: float) -> None:
        if self.broken is None:
            stays = now - self._seen_since > BEAT
            for failure in self.failures:
                alone = position.state is State.RUNNING and failure.concerns(position.step, position.call)
                # A rank that has passed the call before which all stop is alone only if it does not get any further.
                if failure.running or (alone and not failure.is_undecided and (stays or not failure.stops)):
                    self.break_groups(failure)
                    return

    def _watch(self, position: Position, now: float) -> None:
        waits = position.state is State.RUNNING or (self._asynchronous and position.state is State.IDLE)
        if not waits or not position.step or now - self._seen_since < BEAT or self.broken is not None:
            return
        if now < self._look_due:
            return
        self._look_due = now + BEAT * self._slower
        self.peers.refresh(self._board, self.peers.others)
        if position.state is State.IDLE and now - self._seen_since < self.deadline:
            return
        for rank in self.peers.others:
            failure = self.lost(rank, position, self.deadline)
            if failure is not None and not (failure.kind is Kind.LEFT and position.state is State.IDLE):
                self.post(failure)
                self.break_groups(failure)
                return
        if now - self._seen_since > self.deadline and self._warned is not position:
            # It may be late for a good reason (it evaluates, or saves): only the backend's time-out ends the wait.
            absent = self.absent(self.peers.others, position)
            if absent is not None:
                self._warned = position
                log.warning("rank %d: %s", self.rank, absent.text)

    def _compare_trails(self) -> None:
        """With the next rank: where two ranks differ, two neighbours do. A few reads a second, however many ranks."""
        if self.broken is not None or not self.trail.last[0]:
            return
        other = (self.rank + 1) % (len(self.peers.others) + 1)
        self.peers.refresh(self._board, [other])
        beat = self.peers.beat(other)
        if beat is not None and beat.calls and beat.calls > self._ahead[0]:
            self._ahead = (beat.calls, beat.trail)
        calls, theirs = self._ahead
        ours = self.trail.at(calls) if calls else None
        if ours is None:
            return
        if ours == theirs:
            self._same_until, self._ahead = calls, (0, 0)
            return
        place = self.position
        text = (
            f"Ranks {self.rank} and {other} have run graphs that communicate differently: both had run each of theirs "
            f"before, and chose another one after call {self._same_until} and not later than call {calls} (counted "
            f"over all compiled steps). This rank is at call {place.call} of {place.step}; rank {other} "
            f"{self.peers.last_words(other)}."
        )
        failure = Failure(Kind.DESYNC, other, place.step, place.call, text)
        self.post(failure)
        self.break_groups(failure)

    def _compare_scalars(self, now: float) -> None:
        """With the next rank along each axis; where hashes differ, its values are asked for."""
        if self.broken is not None:
            return
        for step, other, since in self.scalars.compare(self._board, self.peers):
            if self.scalars.is_due(step, other, now):
                event = self.post_event({"kind": "scalars", "step": step, "rank": other, "since": since})
                self.scalars.asked(step, other, since, now, event)

    def _stop_all(self, failure: Failure | None) -> None:
        """Tell all ranks of a failure before whose call all of them stop. No group is aborted: they work."""
        if failure is not None and self.broken is None:
            log.error("%s", failure.text)
            self.post(failure)

    def _look_without_store(self) -> None:
        """Without a store nobody can say anything any more; a rank that sits in a call for long is taken out."""
        position = self.position
        if self.store_gone and position is not self._seen:
            self._seen, self._seen_since = position, time.monotonic()
        silent = time.monotonic() - self._seen_since > self.deadline
        if self.store_gone and position.state is State.RUNNING and silent:
            self.break_groups(self.store_failure(position))

    def store_failure(self, position: Position) -> Failure:
        """The failure that a rank without a store sees."""
        return Failure(Kind.STORE, 0, position.step, position.call, self.store_gone or "no answer")

    def _run_jobs(self) -> None:
        low, high = _POLL_JOB
        self._pause = min(self._pause * 1.5, high * self._slower) if self._jobs else low
        for job in list(self._jobs):
            try:
                finished = job.poll(self._board)
            except BaseException as error:  # raised again by the thread that waits for the job
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


class Trail:
    """The calls of one rank. Written by the thread that runs steps, read by the watchdog."""

    def __init__(self) -> None:
        self.last: tuple[int, int] = (0, 0)
        """How many calls there were, and the hash of all of them."""
        self._recent: deque[int] = deque(maxlen=_KEPT)

    def add(self, number: int) -> None:
        """One more call; the number stands for what its graph communicates."""
        count, value = self.last
        value = (value * _FACTOR ^ number) & _MASK
        self._recent.append(value)
        self.last = (count + 1, value)

    def at(self, count: int) -> int | None:
        """The hash after that many calls; None if that is to come, or too long ago."""
        now, _ = self.last
        recent = list(self._recent)
        behind = now - count
        return recent[-1 - behind] if 0 <= behind < len(recent) else None


class Stopping:
    """The part of one rank, kept by its watchdog."""

    def __init__(self, rank: int, size: int, reached: Callable[[str], int]) -> None:
        """`reached`: the last call of a step that this rank has begun."""
        self._rank = rank
        self._size = size
        self._reached = reached
        self._told: set[str] = set()
        self._verdicts: dict[str, int] = {}

    def poll(self, board: Board, failures: list[Failure]) -> list[Failure]:
        """Say where this rank is, and look for the verdict: the failures, with those decided that are."""
        return [self._decided(board, each) if each.is_undecided else each for each in failures]

    def _decided(self, board: Board, failure: Failure) -> Failure:
        step = failure.step
        if step not in self._told:
            # The failure is known to the other thread by now, which begins no further call.
            self._told.add(step)
            board.write(f"stop/{step}/at/{self._rank}", self._reached(step))
            board.count(f"stop/{step}/count", 1)
        if step not in self._verdicts:
            if board.count(f"stop/{step}/count") < self._size:
                return failure
            begun = board.read_all([f"stop/{step}/at/{rank}" for rank in range(self._size)])
            self._verdicts[step] = int(board.write_first(f"stop/{step}/verdict", max(begun) + 1))
        return replace(failure, stops_at=self._verdicts[step])
