"""The failure channel of a rank: when one rank fails, all others learn it within seconds, through the store.

    channel = Channel.current()
    with channel.compiling("train_step", 1):     a rank that compiles counts as alive
        entry = capture(...)
    Agreement(channel, "train_step").agree(1, digest)
    with channel.running("train_step", 1, digest):
        entry.run(...)                           returns, or raises its own error, PeerFailedError or DesyncError

An error in `running` is posted to the store, and the process groups of this rank are aborted: its collectives are in an
unknown state. Every other rank is released from its wait and raises PeerFailedError. An error in `compiling` is posted
too, but nothing was sent yet: only ranks that reach the same call of the same step raise, and the groups stay usable.

In the steady state a call costs two assignments and an append; everything else happens in the watchdog's thread.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch.distributed import DistError, get_backend

from wholestep.errors import DesyncError, PeerFailedError
from wholestep.ranks.agreement_records import GraphDigest
from wholestep.ranks.failure import Failure, FailureKind, as_error, first_lines, node_in
from wholestep.ranks.peers import Position, RankState, StoreClient, StoreGoneError
from wholestep.ranks.watchdog import BEAT, Job, Watchdog
from wholestep.torch_private.distributed import default_group, default_store

DEADLINE = 15.0
"""Seconds since its last heartbeat after which a rank counts as dead."""

_STORE_TIMEOUT = 10.0
_POST_SECONDS = 5.0
_EVENT_SECONDS = 2.0
_SILENT_BEATS = 3.0
_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|connection|socket|broken pipe|closed by peer|process ?group|timed? ?out|collective", re.IGNORECASE
)

_lock = threading.Lock()


class Channel:
    """One per process and default process group, shared by all compiled steps."""

    _current: Channel | None = None
    _count = 0

    def __init__(self, group: Any, deadline: float = DEADLINE) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._pid = os.getpid()
        self._group = weakref.ref(group)
        Channel._count += 1
        # Another group of the same process may use the same store; the prefix keeps its failures apart.
        store = StoreClient(default_store(), f"wholestep{Channel._count}", _STORE_TIMEOUT)
        self.watchdog = Watchdog(store, self.rank, self.size, deadline, self._is_current)
        self._posted: BaseException | None = None
        self.meeting_counts: Counter[str] = Counter()
        """How often ranks have agreed on something outside of a call, by what it is about."""
        self.watchdog.start()
        atexit.register(self.close)

    @classmethod
    def current(cls) -> Channel | None:
        """The channel of this process; None without a process group of several ranks."""
        group = default_group()
        channel = cls._current
        if group is None:
            return None
        if channel is not None and channel._group() is group and channel._pid == os.getpid():
            return channel
        if group.size() == 1 or get_backend(group) == "fake":
            return None
        with _lock:
            channel = cls._current
            if channel is not None and channel._group() is group:
                # This process was forked from the one that made the group: the connections belong to the parent.
                return channel if channel._pid == os.getpid() else None
            if channel is not None and channel._pid == os.getpid():
                channel.close()
            cls._current = cls(group)
            return cls._current

    @property
    def deadline(self) -> float:
        """Seconds since the last heartbeat of a rank after which a rank that waits for it raises."""
        return self.watchdog.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self.watchdog.deadline = seconds

    def compiling(self, step: str, call: int) -> AbstractContextManager[None]:
        """Context in which this rank counts as alive and compiling; an error of the body is posted."""
        return _Phase(self, Position(RankState.COMPILING, step, call))

    def running(
        self, step: str, call: int, digest: GraphDigest | None = None, ranks: Sequence[int] = ()
    ) -> AbstractContextManager[None]:
        """Context in which this rank may wait in a collective; the module's docstring says what its errors become.

        `ranks`: ranks that must be in the same call. One that is missing is named when communication times out.
        """
        self.watchdog.answers.ran.append((step, call, digest))
        if digest is not None and digest.communication_id:
            self.watchdog.run_hash.add(digest.communication_id)
        return _Phase(self, Position(RankState.RUNNING, step, call), ranks)

    def completing(self, step: str, call: int) -> AbstractContextManager[None]:
        """Context for waiting on collectives that an earlier call started; the other ranks need not wait for them."""
        return _Phase(self, Position(RankState.RUNNING, step, call))

    def agreeing(self, step: str, call: int) -> AbstractContextManager[None]:
        """Context in which this rank waits in the store for the others."""
        return _Phase(self, Position(RankState.AGREEING, step, call))

    def fail(self, error: BaseException, step: str, call: int, *, running: bool | None = None) -> None:
        """Post that this rank raised, once per error; not for errors that another rank caused.

        `running`: collectives may be in flight, so the groups are aborted; by default, whether the step was running.
        """
        if error is self._posted or isinstance(error, DesyncError | PeerFailedError):
            return
        self._posted = error
        under_way = self.watchdog.position.state is RankState.RUNNING if running is None else running
        failure = Failure(FailureKind.RAISED, self.rank, step, call, first_lines(error), under_way)

        def post(store: StoreClient) -> bool:
            try:
                self.watchdog.post(failure)
            finally:
                if failure.running:
                    self.watchdog.break_groups(failure)
            return True

        try:
            self.perform(Job(post), _POST_SECONDS)
        except StoreGoneError:
            return  # no store to post to; the error itself is about to be raised

    def peer_failure(self) -> DesyncError | PeerFailedError | None:
        """The error if the process groups of this rank were aborted; None if steps can still communicate."""
        broken = self.watchdog.broken
        return None if broken is None else self._error(broken)

    def failure_at(self, step: str, call: int) -> DesyncError | PeerFailedError | None:
        """The error if other ranks will not take part in this call; else None."""
        for failure in self.watchdog.failures:
            of_others = failure.running or failure.rank != self.rank or failure.stops
            if failure.concerns(step, call) and of_others:
                if failure.is_undecided:
                    failure = self._decided(failure)
                    if not failure.running and not failure.concerns(step, call):
                        continue
                if failure.running:
                    self._break(failure)
                return self._error(failure)
        return None

    def _decided(self, failure: Failure) -> Failure:
        """Wait until ranks have agreed before which call they stop; if they cannot, the groups must be aborted."""
        found: list[Failure] = []

        def poll(store: StoreClient) -> bool:
            found[:] = [each for each in self.watchdog.failures if each.step == failure.step and each.stops_at]
            return bool(found)

        try:
            self.perform(Job(poll), self.watchdog.deadline)
        except StoreGoneError:
            found.clear()
        return found[0] if found else replace(failure, running=True)

    def waits(self, rank: int, step: str, call: int) -> bool:
        """Whether another rank waits in a call: for the other ranks, or in a graph. False if that is not known."""
        peers = self.watchdog.peers

        def poll(store: StoreClient) -> bool:
            peers.refresh(store, [rank])
            return True

        try:
            self.perform(Job(poll), _EVENT_SECONDS)
        except StoreGoneError:
            return False
        beat = peers.beat(rank)
        waiting = (RankState.AGREEING, RankState.RUNNING)
        return beat is not None and any(beat.position == Position(state, step, call) for state in waiting)

    def perform(self, job: Job, limit: float) -> bool:
        """Run a job on the watchdog's thread. Returns whether it was done within `limit` seconds; raises its error."""
        watchdog = self.watchdog
        watchdog.submit(job)
        end = time.monotonic() + limit
        try:
            while not job.done.wait(0.2):
                if not watchdog.is_alive():
                    raise StoreGoneError("the process group was destroyed")
                if time.monotonic() > end:
                    return False
                if time.monotonic() - watchdog.ticked > 2 * _STORE_TIMEOUT:
                    raise StoreGoneError(f"no answer for {2 * _STORE_TIMEOUT:g} s")
        finally:
            watchdog.cancel(job)
        if job.error is not None:
            raise job.error
        return True

    def close(self) -> None:
        """Stop the watchdog; the other ranks see that this rank has left."""
        atexit.unregister(self.close)
        if Channel._current is self:
            Channel._current = None
        if self._pid == os.getpid() and self.watchdog.is_alive():
            self.watchdog.stop()
            self.watchdog.join(_EVENT_SECONDS)

    def _is_current(self) -> bool:
        group = self._group()
        return group is not None and group is default_group()

    def _error(self, failure: Failure, node: str = "") -> DesyncError | PeerFailedError:
        watchdog = self.watchdog
        if watchdog.broken is not None:
            watchdog.aborted.wait(_POST_SECONDS)  # the code that catches the error may destroy the groups
        return as_error(failure, self.rank, node, watchdog.broken is not None, watchdog.recording)

    def _explain(
        self, error: BaseException, position: Position, ranks: Sequence[int]
    ) -> DesyncError | PeerFailedError | None:
        """The error to raise in place of `error`; None if this rank caused it, which is then posted."""
        if isinstance(error, DesyncError | PeerFailedError) or not self._is_current():
            return None  # not current: the step destroyed the group itself
        watchdog = self.watchdog
        if position.state is RankState.RUNNING and _is_communication(error):
            if watchdog.broken is None:
                self._find_out(position, ranks)
            if watchdog.broken is not None:
                return self._error(watchdog.broken, node_in(error.__traceback__))
        self.fail(error, position.step, position.call, running=position.state is RankState.RUNNING)
        return None

    def _find_out(self, position: Position, ranks: Sequence[int]) -> None:
        """Determine why communication failed; abort the groups of this rank if another rank is the cause."""
        search = _Search(self.watchdog, position, ranks)
        limit = _EVENT_SECONDS + 2 * _SILENT_BEATS * BEAT
        try:
            self.perform(Job(search), limit)
        except StoreGoneError:
            lost = self.watchdog.store_failure(position)
            self._break(lost)

    def _break(self, failure: Failure) -> None:
        """Have the watchdog abort the groups, and wait for it."""

        def poll(store: StoreClient) -> bool:
            self.watchdog.break_groups(failure)
            return True

        if self.watchdog.broken is not None:
            return
        try:
            self.perform(Job(poll), _POST_SECONDS)
        except StoreGoneError as error:  # the watchdog has ended, or blocks in the store
            self.watchdog.store_gone = str(error)
            self.watchdog.break_groups(failure)


class _Phase(AbstractContextManager[None]):
    """The context of one phase of a call: it sets the position of this rank and translates errors."""

    def __init__(self, channel: Channel, position: Position, ranks: Sequence[int] = ()) -> None:
        self._channel = channel
        self._position = position
        self._ranks = ranks

    def __enter__(self) -> None:
        channel, position = self._channel, self._position
        # A rank that compiles may be about to raise the same error itself, with its own traceback.
        if channel.watchdog.failures and position.state is not RankState.COMPILING:
            error = channel.failure_at(position.step, position.call)
            if error is not None:
                raise error
        channel.watchdog.position = position

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        channel, position = self._channel, self._position
        watchdog = channel.watchdog
        try:
            if error is not None:
                found = channel._explain(error, position, self._ranks)
                if found is not None:
                    raise found from error
        finally:
            watchdog.position = Position(RankState.IDLE, position.step, position.call)
        # Collectives of NCCL that are aborted end without an error, and their results are garbage.
        if error is None and watchdog.broken is not None and position.state is RankState.RUNNING:
            raise channel._error(watchdog.broken)


class _Search:
    """Job that looks for the rank that caused a communication error: one that posted a failure, has left, has sent no
    heartbeat, or, of `ranks`, is not in this call."""

    def __init__(self, watchdog: Watchdog, position: Position, ranks: Sequence[int]) -> None:
        self._watchdog = watchdog
        self._position = position
        self._ranks = ranks
        self._begun = 0.0
        self._next_check = 0.0

    def __call__(self, store: StoreClient) -> bool:
        watchdog, now = self._watchdog, time.monotonic()
        if watchdog.broken is not None:
            return True
        self._begun = self._begun or now
        if now < self._next_check:
            return False
        self._next_check = now + BEAT / 4
        peers = watchdog.peers
        peers.refresh(store, peers.others)
        for rank in peers.others:
            failure = watchdog.lost(rank, self._position, _SILENT_BEATS * BEAT)
            if failure is not None:
                watchdog.post(failure)
                watchdog.break_groups(failure)
                return True
        over = now - self._begun > _EVENT_SECONDS and not any(peers.silent_for(r) > 1.5 * BEAT for r in peers.others)
        absent = watchdog.absent(self._ranks, self._position) if over else None
        if absent is not None:
            watchdog.post(absent)
            watchdog.break_groups(absent)
        return over


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError | ConnectionError) and _COMMUNICATION.search(str(error)) is not None
