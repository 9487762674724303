"""The failure channel of a rank: what one rank cannot do any more, all learn within seconds, through the store.

    channel = Channel.current()
    with channel.compiling("train_step", 1):     a slow compiler is not a dead one
        entry = capture(...)
    Agreement(channel, "train_step").agree(1, digest)
    with channel.running("train_step", 1, digest):
        entry.run(...)                           returns, or raises its own error, PeerFailedError or DesyncError

An error in `running` is posted to the store, and the process groups of this rank are aborted: its collectives are in an
unknown state. Every other rank is taken out of its wait and raises PeerFailedError. An error in `compiling` is posted
too, but nothing was sent yet: only ranks that come to the same call of the same step raise, and the groups live on.

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
from wholestep.ranks.digest import GraphDigest
from wholestep.ranks.failure import Failure, Kind, as_error, first_lines, node_in
from wholestep.ranks.peers import Board, Position, State, StoreGoneError
from wholestep.ranks.watchdog import BEAT, Job, Watchdog
from wholestep.torch_private.distributed import default_group, default_store

DEADLINE = 15.0
"""Seconds since its last beat after which a rank counts as dead."""

_STORE_TIMEOUT = 10.0
_POST_SECONDS = 5.0
_NEWS_SECONDS = 2.0
_SILENT_BEATS = 3.0
_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|connection|socket|broken pipe|closed by peer|process ?group|timed? ?out|collective", re.IGNORECASE
)

_lock = threading.Lock()


class Channel:
    """One per process and default process group, shared by all compiled steps."""

    _current: Channel | None = None
    _made = 0

    def __init__(self, group: Any, deadline: float = DEADLINE) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._pid = os.getpid()
        self._group = weakref.ref(group)
        Channel._made += 1
        # Another group of the same process may live in the same store: its failures are not ours.
        board = Board(default_store(), f"wholestep{Channel._made}", _STORE_TIMEOUT)
        self.watchdog = Watchdog(board, self.rank, self.size, deadline, self._is_current)
        self._posted: BaseException | None = None
        self.meetings: Counter[str] = Counter()
        """How often ranks have met for something: the number of the next meeting."""
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
                # Forked from the process that made the group: its connections belong to the parent.
                return channel if channel._pid == os.getpid() else None
            if channel is not None and channel._pid == os.getpid():
                channel.close()
            cls._current = cls(group)
            return cls._current

    @property
    def deadline(self) -> float:
        """Seconds since the last beat of a rank after which a rank that waits for it gives up."""
        return self.watchdog.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self.watchdog.deadline = seconds

    def compiling(self, step: str, call: int) -> AbstractContextManager[None]:
        """While the body runs, this rank is alive and compiling; an error of the body is posted."""
        return _Phase(self, Position(State.COMPILING, step, call))

    def running(
        self, step: str, call: int, digest: GraphDigest | None = None, ranks: Sequence[int] = ()
    ) -> AbstractContextManager[None]:
        """While the body runs, this rank may wait in a collective; see the module for what errors become.

        `ranks`: those that must be in the same call. One that is not is named when communication times out.
        """
        self.watchdog.answers.ran.append((step, call, digest))
        if digest is not None and digest.number:
            self.watchdog.trail.add(digest.number)
        return _Phase(self, Position(State.RUNNING, step, call), ranks)

    def completing(self, step: str, call: int) -> AbstractContextManager[None]:
        """While the body waits for collectives that a call before left under way; other ranks need not do the same."""
        return _Phase(self, Position(State.RUNNING, step, call))

    def agreeing(self, step: str, call: int) -> AbstractContextManager[None]:
        """While the body runs, this rank waits in the store for the others."""
        return _Phase(self, Position(State.AGREEING, step, call))

    def fail(self, error: BaseException, step: str, call: int, *, running: bool | None = None) -> None:
        """Post that this rank raised. Once per error; not for what other ranks are the cause of.

        `running`: collectives may be under way, so the groups are aborted; by default, whether the step was running.
        """
        if error is self._posted or isinstance(error, DesyncError | PeerFailedError):
            return
        self._posted = error
        under_way = self.watchdog.position.state is State.RUNNING if running is None else running
        failure = Failure(Kind.RAISED, self.rank, step, call, first_lines(error), under_way)

        def post(board: Board) -> bool:
            try:
                self.watchdog.post(failure)
            finally:
                if failure.running:
                    self.watchdog.break_groups(failure)
            return True

        try:
            self.perform(Job(post), _POST_SECONDS)
        except StoreGoneError:
            return  # nobody is there to be told; the error itself is about to be raised

    def peer_failure(self) -> DesyncError | PeerFailedError | None:
        """Why no step can communicate any more on this rank, if that is so."""
        broken = self.watchdog.broken
        return None if broken is None else self._error(broken)

    def failure_at(self, step: str, call: int) -> DesyncError | PeerFailedError | None:
        """Why this rank would be alone in a call, if it would."""
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
        """Wait until ranks know before which call they stop; the groups are given up where they cannot know."""
        found: list[Failure] = []

        def poll(board: Board) -> bool:
            found[:] = [each for each in self.watchdog.failures if each.step == failure.step and each.stops_at]
            return bool(found)

        try:
            self.perform(Job(poll), self.watchdog.deadline)
        except StoreGoneError:
            found.clear()
        return found[0] if found else replace(failure, running=True)

    def perform(self, job: Job, limit: float) -> bool:
        """Have the watchdog do something with the store; whether it did within `limit` seconds. Raises its error."""
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
        """End the watchdog; the other ranks see that this rank has left."""
        atexit.unregister(self.close)
        if Channel._current is self:
            Channel._current = None
        if self._pid == os.getpid() and self.watchdog.is_alive():
            self.watchdog.stop()
            self.watchdog.join(_NEWS_SECONDS)

    def _is_current(self) -> bool:
        group = self._group()
        return group is not None and group is default_group()

    def _error(self, failure: Failure, node: str = "") -> DesyncError | PeerFailedError:
        watchdog = self.watchdog
        if watchdog.broken is not None:
            watchdog.aborted.wait(_POST_SECONDS)  # whoever catches the error may destroy the groups
        return as_error(failure, self.rank, node, watchdog.broken is not None, watchdog.recording)

    def _explain(
        self, error: BaseException, position: Position, ranks: Sequence[int]
    ) -> DesyncError | PeerFailedError | None:
        """What an error of a step becomes; None if it is this rank's own, which is then posted."""
        if isinstance(error, DesyncError | PeerFailedError) or not self._is_current():
            return None  # the latter: the step destroyed the group itself
        watchdog = self.watchdog
        if position.state is State.RUNNING and _is_communication(error):
            if watchdog.broken is None:
                self._find_out(position, ranks)
            if watchdog.broken is not None:
                return self._error(watchdog.broken, node_in(error.__traceback__))
        self.fail(error, position.step, position.call, running=position.state is State.RUNNING)
        return None

    def _find_out(self, position: Position, ranks: Sequence[int]) -> None:
        """Why communication failed: break the groups of this rank for it, if another rank is the cause."""
        search = _Search(self.watchdog, position, ranks)
        limit = _NEWS_SECONDS + 2 * _SILENT_BEATS * BEAT
        try:
            self.perform(Job(search), limit)
        except StoreGoneError:
            lost = self.watchdog.store_failure(position)
            self._break(lost)

    def _break(self, failure: Failure) -> None:
        """Have the watchdog abort the groups before this thread goes on."""

        def poll(board: Board) -> bool:
            self.watchdog.break_groups(failure)
            return True

        if self.watchdog.broken is not None:
            return
        try:
            self.perform(Job(poll), _POST_SECONDS)
        except StoreGoneError as error:  # the watchdog has ended, or hangs in the store
            self.watchdog.store_gone = str(error)
            self.watchdog.break_groups(failure)


class _Phase(AbstractContextManager[None]):
    """A stretch of a step between two positions."""

    def __init__(self, channel: Channel, position: Position, ranks: Sequence[int] = ()) -> None:
        self._channel = channel
        self._position = position
        self._ranks = ranks

    def __enter__(self) -> None:
        channel, position = self._channel, self._position
        # A rank that compiles may have the same error itself, and its own words are better.
        if channel.watchdog.failures and position.state is not State.COMPILING:
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
            watchdog.position = Position(State.IDLE, position.step, position.call)
        # NCCL's collectives end without an error when they are aborted, and with nonsense for a result.
        if error is None and watchdog.broken is not None and position.state is State.RUNNING:
            raise channel._error(watchdog.broken)


class _Search:
    """Which rank is the cause of an error of communication: one that says so, has left, has fallen silent, or, of
    `ranks`, never came."""

    def __init__(self, watchdog: Watchdog, position: Position, ranks: Sequence[int]) -> None:
        self._watchdog = watchdog
        self._position = position
        self._ranks = ranks
        self._begun = 0.0
        self._look_due = 0.0

    def __call__(self, board: Board) -> bool:
        watchdog, now = self._watchdog, time.monotonic()
        if watchdog.broken is not None:
            return True
        self._begun = self._begun or now
        if now < self._look_due:
            return False
        self._look_due = now + BEAT / 4
        peers = watchdog.peers
        peers.refresh(board, peers.others)
        for rank in peers.others:
            failure = watchdog.lost(rank, self._position, _SILENT_BEATS * BEAT)
            if failure is not None:
                watchdog.post(failure)
                watchdog.break_groups(failure)
                return True
        over = now - self._begun > _NEWS_SECONDS and not any(peers.silent_for(r) > 1.5 * BEAT for r in peers.others)
        absent = watchdog.absent(self._ranks, self._position) if over else None
        if absent is not None:
            watchdog.post(absent)
            watchdog.break_groups(absent)
        return over


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError | ConnectionError) and _COMMUNICATION.search(str(error)) is not None
