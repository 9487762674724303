"""`Ranks`: what one compiled step exchanges with other ranks around a capture, before a first run and in each run.

Without other ranks (a world of one, a fake process group) every method does nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from wholestep.ir.captured_step import CapturedStep, constants_of
from wholestep.ir.step_graph import StepGraph
from wholestep.ranks.agreement import Agreement
from wholestep.ranks.agreement_records import (
    GraphDigest,
    RankScalars,
    RefusedDigest,
    TextDigest,
    digest_of,
    local_shapes,
)
from wholestep.ranks.channel import Channel
from wholestep.ranks.peers import Position, RankState, StoreClient, StoreGoneError
from wholestep.ranks.scalar_watch import ScalarHistory
from wholestep.ranks.shared_scalars import Named, SharedScalars, update_constants
from wholestep.ranks.watchdog import Job
from wholestep.torch_private.distributed import default_group

_steps: dict[str, itertools.count[int]] = {}
_NO_CONTEXT = nullcontext()
_DEADLINES_FOR_KNOWN_GRAPHS = 20
"""For a call whose graphs have all run before, a rank may be late by this many deadlines: it may load data or save."""
_POLL_SECONDS = 0.25
"""Seconds between two polls of the first rank while another waits for its plan."""
_PART_FOR_ABSENT = 1 / 3
"""The part of the deadline for which a rank waits for the plan of one that does not compile this call yet."""
_NO_LIMIT = 10 * 365 * 86400.0


@dataclass(frozen=True)
class RankOptions:
    """What a plan sets for the communication of ranks."""

    deadline: float
    """Seconds without a heartbeat after which a rank counts as missing."""
    axes: Sequence[tuple[str, Sequence[int]]] = ()
    """Each mesh axis of the plan, and the ranks of this rank's group along it."""
    data_groups: Sequence[str] = ()
    """Names of the process groups over which data is distributed."""
    per_rank: Sequence[str] = ()
    """Paths of scalars that may differ between ranks."""


@dataclass(frozen=True)
class _AgreedGraph:
    """A graph that ranks have agreed on: its digest and its shared scalars."""

    digest: GraphDigest
    scalars: SharedScalars


class Ranks:
    """The part of one compiled step that communicates with other ranks outside of the graph."""

    def __init__(self, name: str, options: RankOptions) -> None:
        number = next(_steps.setdefault(name, itertools.count()))
        self._step = f"{name}#{number}" if number else name
        """The same on all ranks, because they compile their steps in the same order."""
        self._options = options
        self._deadline = options.deadline
        self._members = sorted({rank for _, ranks in options.axes for rank in ranks})
        self._last: StepGraph | None = None
        self._agreed: WeakKeyDictionary[StepGraph, _AgreedGraph] = WeakKeyDictionary()
        self._samples: dict[str, float] = {}
        """The last values that were read of scalars on an accelerator."""
        self._history: ScalarHistory | None = None
        self._history_of: Channel | None = None

    def compiling(self, call: int) -> AbstractContextManager[None]:
        """Context of a capture: this rank counts as alive."""
        channel = Channel.current()
        return _NO_CONTEXT if channel is None else channel.compiling(self._step, call)

    def agree_on_models(self, call: int, lines: list[str]) -> None:
        """Before parameters are distributed: check that all ranks place the same models by the same plan."""
        channel = Channel.current()
        if channel is not None and lines:
            channel.deadline = self._deadline
            place = f"{self._step}, placing its models"
            Agreement(channel, place, self._deadline).agree(call, TextDigest(lines))

    def one_plan(self, call: int, key: str, make: Callable[[], str], of_first: bool = True) -> str:
        """The plan that the ranks of this step use for graphs with this key: that of the first of them.

        If that rank makes none in this call (it runs a graph that it has, or fails), or without `of_first`: the first
        plan that is written.
        """
        channel = Channel.current()
        if channel is None:
            return make()
        channel.deadline = self._deadline
        leader = channel.rank if not of_first else self._members[0] if self._members else 0
        search = PlanOfRanks(channel, (self._step, call), f"plan/{self._step}/{key}", leader, self._deadline)
        return search.found() or search.write(make())

    def agree(self, call: int, captured: CapturedStep, state: list[Any], pending: Sequence[int]) -> Mapping[int, str]:
        """Before a graph runs for the first time: check that the graphs of all ranks fit (`agreement`).

        `pending`: inputs whose update may still be in flight when the graph starts. Returns the refusals by rank: if
        there are any, all ranks run the plain function.
        """
        channel = Channel.current()
        if channel is None:
            return {}
        graph = captured.step_graph
        constants = _constants(captured)
        groups, excluded = self._options.data_groups, self._options.per_rank
        scalars = SharedScalars(captured, groups, excluded, self._samples, pending, constants)
        values = scalars.named(scalars.read(state, call))
        here = RankScalars(values, _axis_groups(self._options.axes), constants, update_constants(graph, groups))
        digest = digest_of(graph.gm, graph.signature, local_shapes(graph.signature), here)
        self._agreed[graph] = _AgreedGraph(digest, scalars)
        channel.deadline = self._deadline
        return Agreement(channel, self._step, self._deadline).agree(call, digest)

    def agree_on_choice(self, call: int, graph: StepGraph, *, always: bool = False) -> Mapping[int, str]:
        """Before a graph runs that is not the one of the last call: check that the other ranks chose one that fits.

        A rank that runs the same graph as before asks no other rank; its watchdog writes its record. `always`: it asks,
        because another rank may want to run the plain function, which all ranks have to do then.
        """
        channel = Channel.current()
        agreed = self._agreed.get(graph)
        if channel is None or agreed is None or (graph is self._last and not always):
            return {}
        deadline = _DEADLINES_FOR_KNOWN_GRAPHS * self._deadline
        return Agreement(channel, self._step, deadline).agree(call, agreed.digest, known=True)

    def agree_on_refusal(self, call: int, text: str) -> Mapping[int, str]:
        """This rank could not capture the call: return once all ranks are about to run the plain function."""
        channel = Channel.current()
        if channel is None:
            return {}
        channel.deadline = self._deadline
        return Agreement(channel, self._step, self._deadline).agree(call, RefusedDigest(text))

    def running_in_eager(self, call: int) -> AbstractContextManager[None]:
        """Context of a run of the plain function: a failure of another rank ends its waits."""
        self._last = None
        channel = Channel.current()
        return _NO_CONTEXT if channel is None else channel.running(self._step, call)

    def running(self, call: int, graph: StepGraph, state: list[Any]) -> AbstractContextManager[None]:
        """Context of a run: a failure of another rank ends its waits. `state`: the inputs of the graph."""
        self._last = graph
        channel = Channel.current()
        if channel is None:
            return _NO_CONTEXT
        agreed = self._agreed.get(graph)
        if agreed is None:
            return channel.running(self._step, call)
        history = self._history
        if history is None or self._history_of is not channel:
            history = self._history = channel.watchdog.scalars.history(
                self._step, _neighbours(channel.rank, self._options.axes)
            )
            self._history_of = channel
        history.note(call, agreed.scalars, agreed.scalars.read(state, call))
        return channel.running(self._step, call, agreed.digest, self._members)

    def speaks(self, call: int) -> bool:
        """Whether this rank reports compilation progress: rank 0, or one that rank 0 waits for in this call."""
        channel = Channel.current()
        if channel is None:
            group = default_group()
            return group is None or group.rank() == 0
        return channel.rank == 0 or channel.waits(0, self._step, call)

    def completing(self, call: int) -> AbstractContextManager[None]:
        """Context for completing pending updates of an earlier call: it waits for collectives and starts none."""
        channel = Channel.current()
        return _NO_CONTEXT if channel is None else channel.completing(self._step, call)


class PlanOfRanks:
    """One plan for all ranks: what the first rank decided is written to the store, and the others read it.

        rank 0    reads the key: nothing │ makes a plan │ writes it, if the key still has none
        rank 1    reads the key until it is there; if rank 0 will not write it, does as rank 0 would have done

    The first write wins: all ranks use the value of the key afterwards. Keys are not deleted: a graph that a rank
    captures later and that has the same collectives as an earlier one must have the same order.
    """

    def __init__(self, channel: Channel, call: tuple[str, int], key: str, leader: int, deadline: float) -> None:
        self._channel, self._call, self._key = channel, call, key
        self._leader, self._deadline = leader, deadline
        self._plan: str | None = None
        self._begun = self._next_poll = time.monotonic()

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
        if now < self._next_poll:
            return False
        self._next_poll = now + _POLL_SECONDS
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
        return now - self._begun <= _PART_FOR_ABSENT * self._deadline


def _axis_groups(axes: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
    return [f"{name} {min(ranks)}" for name, ranks in axes]


def _neighbours(here: int, axes: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """The next rank along each axis: if any two ranks of a plan differ, some two neighbours do."""
    found = [ranks[(list(ranks).index(here) + 1) % len(ranks)] for _, ranks in axes]
    return sorted({rank for rank in found if rank != here})


def _constants(captured: CapturedStep) -> Named:
    """Python numbers, flags and strings that capture burned in as constants, by path."""
    plain = (bool, int, float, str)
    return {path: repr(value) for path, value in constants_of(captured.guards) if isinstance(value, plain)}
