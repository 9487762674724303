"""One plan for all ranks: what the first rank decided is written to the store, and the others read it.

    rank 0    reads the key: nothing │ makes a plan │ writes it, if the key still has none
    rank 1    reads the key until it is there; if rank 0 will not write it, does as rank 0 would have done

The first write wins: all ranks use the value of the key afterwards. Keys are not deleted: a graph that a rank captures
later and that has the same collectives as an earlier one must have the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wholestep.ranks.channel import Channel
from wholestep.ranks.peers import Position, RankState, StoreClient, StoreGoneError
from wholestep.ranks.watchdog import Job

_LOOK = 0.25
"""Seconds between two polls of the first rank."""
_NOT_SEEN = 1 / 3
"""The part of the deadline for which a rank waits for one that does not compile this call yet."""
_NO_LIMIT = 10 * 365 * 86400.0


class PlanOfRanks:
    """Looks for the plan under a key of the store, on behalf of a rank that compiles a call."""

    def __init__(self, channel: Channel, call: tuple[str, int], key: str, leader: int, deadline: float) -> None:
        self._channel, self._call, self._key = channel, call, key
        self._leader, self._deadline = leader, deadline
        self._plan: str | None = None
        self._begun = self._next_look = time.monotonic()

    def found(self) -> str | None:
        """The plan; None if no other rank will write it in time."""
        self._perform(self._read)
        return self._plan

    def write(self, plan: str) -> str:
        """Offer a plan. Returns the one that all ranks use."""
        self._plan = plan

        def poll(store: StoreClient) -> bool:
            self._plan = store.write_first(self._key, plan)
            return True

        self._perform(poll)
        return self._plan

    def _perform(self, poll: Callable[[StoreClient], bool]) -> None:
        try:
            self._channel.perform(Job(poll), _NO_LIMIT)
        except StoreGoneError:
            return  # the agreement on the graph, which comes next, raises the error of a lost store

    def _read(self, store: StoreClient) -> bool:
        self._plan = store.read(self._key)
        if self._plan is not None or self._channel.rank == self._leader:
            return True
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK
        return not self._is_to_come(store, now)

    def _is_to_come(self, store: StoreClient, now: float) -> bool:
        """Whether the first rank may still write its plan."""
        watchdog, leader = self._channel.watchdog, self._leader
        step, call = self._call
        if any(failure.concerns(step, call) for failure in watchdog.failures):
            return False
        peers = watchdog.peers
        peers.refresh(store, [leader])
        beat = peers.beat(leader)
        at = Position() if beat is None else beat.position
        if at == Position(RankState.COMPILING, step, call):
            return now - max(self._begun, peers.compiled_at(leader)) <= self._deadline
        is_past = at.state in (RankState.AGREEING, RankState.RUNNING) and at.call == call
        if at.state in (RankState.LEFT, RankState.ABORTED) or (at.step == step and (is_past or at.call > call)):
            return False
        return now - self._begun <= _NOT_SEEN * self._deadline
