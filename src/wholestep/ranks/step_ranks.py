"""What one compiled step says to the other ranks: around a capture, before a first run, and around each run.

Without other ranks (a world of one, a fake process group) every method does nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from wholestep.ir.captured_step import CapturedStep, constants_of
from wholestep.ir.step_graph import StepGraph
from wholestep.ranks.agreement import Agreement
from wholestep.ranks.channel import Channel
from wholestep.ranks.digest import GraphDigest, LinesDigest, RankScalars, digest_of, local_shapes
from wholestep.ranks.scalar_watch import ScalarTrail
from wholestep.ranks.shared_scalars import Named, SharedScalars, update_constants

_steps: dict[str, itertools.count[int]] = {}
_nothing = nullcontext()
_PATIENCE = 20
"""Deadlines that a rank may be late for a call whose graphs are all known: it may load data, evaluate, save."""


@dataclass(frozen=True)
class RankTerms:
    """What a plan says of ranks."""

    deadline: float
    """Seconds without a sign of life after which a rank that should come counts as missing."""
    axes: Sequence[tuple[str, Sequence[int]]] = ()
    """Each mesh axis of the plan, and the ranks of this one's group along it."""
    data_groups: Sequence[str] = ()
    """Names of the process groups over which data is spread."""
    per_rank: Sequence[str] = ()
    """Paths of scalars that may differ between ranks."""


@dataclass(frozen=True)
class _Known:
    """What was worked out of a graph when ranks agreed on it."""

    digest: GraphDigest
    scalars: SharedScalars


class Ranks:
    """The side of one compiled step that talks to other ranks."""

    def __init__(self, name: str, terms: RankTerms) -> None:
        number = next(_steps.setdefault(name, itertools.count()))
        self._step = f"{name}#{number}" if number else name
        """The same on all ranks, which make their steps in the same order."""
        self._terms = terms
        self._deadline = terms.deadline
        self._members = sorted({rank for _, ranks in terms.axes for rank in ranks})
        self._last: StepGraph | None = None
        self._known: WeakKeyDictionary[StepGraph, _Known] = WeakKeyDictionary()
        self._samples: dict[str, float] = {}
        """Of scalars on an accelerator, the last value that was read."""
        self._trail: ScalarTrail | None = None
        self._trail_of: Channel | None = None

    def compiling(self, call: int) -> AbstractContextManager[None]:
        """While the body captures, this rank counts as alive."""
        channel = Channel.current()
        return _nothing if channel is None else channel.compiling(self._step, call)

    def agree_on_models(self, call: int, lines: list[str]) -> None:
        """Before parameters are sent around: all ranks place the same models by the same plan."""
        channel = Channel.current()
        if channel is not None and lines:
            channel.deadline = self._deadline
            place = f"{self._step}, placing its models"
            Agreement(channel, place, self._deadline).agree(call, LinesDigest(lines))

    def agree(self, call: int, captured: CapturedStep, state: list[Any], pending: Sequence[int]) -> None:
        """Before a graph runs for the first time: all ranks must have the same, or one that communicates the same.

        `pending`: inputs whose update may still be under way when the graph starts.
        """
        channel = Channel.current()
        if channel is None:
            return
        graph = captured.step_graph
        constants = _constants(captured)
        groups, excluded = self._terms.data_groups, self._terms.per_rank
        scalars = SharedScalars(captured, groups, excluded, self._samples, pending, constants)
        values = scalars.named(scalars.read(state, call))
        here = RankScalars(values, _teams(self._terms.axes), constants, update_constants(graph, groups))
        digest = digest_of(graph.gm, graph.signature, local_shapes(graph.signature), here)
        self._known[graph] = _Known(digest, scalars)
        channel.deadline = self._deadline
        Agreement(channel, self._step, self._deadline).agree(call, digest)

    def agree_on_choice(self, call: int, graph: StepGraph) -> None:
        """Before another graph runs than in the last call: the others must have chosen one that fits.

        A rank that goes on with the same graph asks nobody; its watchdog answers for it.
        """
        channel = Channel.current()
        known = self._known.get(graph)
        if graph is self._last or channel is None or known is None:
            return
        Agreement(channel, self._step, _PATIENCE * self._deadline).agree(call, known.digest)

    def running(self, call: int, graph: StepGraph, state: list[Any]) -> AbstractContextManager[None]:
        """While the body runs a graph, failures of other ranks end its waits. `state`: the inputs of the graph."""
        self._last = graph
        channel = Channel.current()
        if channel is None:
            return _nothing
        known = self._known.get(graph)
        if known is None:
            return channel.running(self._step, call)
        trail = self._trail
        if trail is None or self._trail_of is not channel:
            trail = self._trail = channel.watchdog.scalars.trail(
                self._step, _neighbours(channel.rank, self._terms.axes)
            )
            self._trail_of = channel
        trail.note(call, known.scalars, known.scalars.read(state, call))
        return channel.running(self._step, call, known.digest, self._members)

    def completing(self, call: int) -> AbstractContextManager[None]:
        """While the body completes what a call left: it waits for what is under way, and sends nothing."""
        channel = Channel.current()
        return _nothing if channel is None else channel.completing(self._step, call)


def _teams(axes: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
    return [f"{name} {min(ranks)}" for name, ranks in axes]


def _neighbours(here: int, axes: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """The next rank along each axis: where two ranks of a plan differ, two neighbours do."""
    found = [ranks[(list(ranks).index(here) + 1) % len(ranks)] for _, ranks in axes]
    return sorted({rank for rank in found if rank != here})


def _constants(captured: CapturedStep) -> Named:
    """Python numbers, flags and strings that the capture took for constants, by path."""
    plain = (bool, int, float, str)
    return {path: repr(value) for path, value in constants_of(captured.guards) if isinstance(value, plain)}
