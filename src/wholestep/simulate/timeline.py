"""The timeline of a schedule: start and end of each action, bubbles, and peak memory per rank.

Peak memory follows from the lists of actions alone, whatever the times, because a rank runs its actions in order. An
activation is alive from the start of its forward to the end of its backward: of B, or of W where I and W are separate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from wholestep.simulate.deadlock import Deadlock
from wholestep.simulate.durations import Number, Time, at
from wholestep.simulate.schedule import COMPUTE, RECEIVES, Action, ActionKind, Schedule


class Span(NamedTuple):
    """An interval: a computation on a rank, or a transfer (then `to` is the receiving rank)."""

    rank: int
    action: Action
    start: Number
    end: Number
    to: int | None = None

    @property
    def length(self) -> Number:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation or of a recording.

    `spans`: computations, in order of their start on each rank. `transfers`: only those that took place. With a
    `deadlock` the timeline ends where all ranks are blocked. `peak_activations` counts (stage, microbatch) pairs,
    `peak_bytes` bytes.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...] = ()
    deadlock: Deadlock | None = None
    peak_activations: tuple[int, ...] = ()
    peak_bytes: tuple[Number, ...] = ()

    @cached_property
    def makespan(self) -> Number:
        """The end of the last computation; a step begins at 0."""
        return max((span.end for span in self.spans), default=0)

    @cached_property
    def of_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The computations of each rank."""
        found: list[list[Span]] = [[] for _ in self.schedule.ranks]
        for span in self.spans:
            found[span.rank].append(span)
        return tuple(map(tuple, found))

    @cached_property
    def work(self) -> tuple[Number, ...]:
        """Per rank, the time it computes."""
        return tuple(sum(span.length for span in spans) for spans in self.of_rank)

    @cached_property
    def bubble(self) -> tuple[Number, ...]:
        """Per rank, the time of the whole step in which it does not compute."""
        return tuple(self.makespan - work for work in self.work)

    @cached_property
    def stall(self) -> tuple[Number, ...]:
        """Per rank, its idle time between its own first and last computation."""
        spans = [(max(s.end for s in each) - min(s.start for s in each)) if each else 0 for each in self.of_rank]
        return tuple(span - work for span, work in zip(spans, self.work, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The fraction of all ranks' time that is bubble."""
        whole = self.makespan * len(self.schedule.ranks)
        return float(sum(self.bubble) / whole) if whole else 0.0

    def span(self, action: str | Action) -> Span:
        """The span of an action: `timeline.span("2F0")`; for `2SEND_F0`, the transfer."""
        found = self._by_text.get(str(action))
        if found is None:
            raise KeyError(f"{action} is not in the timeline")
        return found

    @cached_property
    def _by_text(self) -> dict[str, Span]:
        return {str(span.action): span for span in (*self.spans, *self.transfers)}

    def __str__(self) -> str:
        rows = [
            ("rank", "busy", "bubble", "stall", "activations", *(("bytes",) if self.peak_bytes else ())),
            *(self._row(rank) for rank in range(len(self.schedule.ranks))),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        head = f"{self.schedule.name}: makespan {short(self.makespan)}, bubble {self.bubble_fraction:.1%}"
        return "\n".join([head, *lines, *([str(self.deadlock)] if self.deadlock else [])])

    def _row(self, rank: int) -> tuple[str, ...]:
        alive = (str(self.peak_activations[rank]) if self.peak_activations else "",)
        size = (short(self.peak_bytes[rank]),) if self.peak_bytes else ()
        return (str(rank), short(self.work[rank]), short(self.bubble[rank]), short(self.stall[rank]), *alive, *size)


def short(number: Number) -> str:
    """A number as it is printed in tables."""
    return f"{number:.4g}" if isinstance(number, float) else str(number)


@dataclass(frozen=True)
class Bytes:
    """Bytes per stage (or per stage and microbatch).

    `static`: parameters, gradients and optimizer state, always resident. `activation`: what a forward saves for its
    backward. `for_weights`: the part of it that is still saved between I and W (all of it if not given). `arriving` and
    `arriving_back`: a received activation and gradient, from its receive to the end of the action that uses it.
    """

    static: Time = 0
    activation: Time = 0
    for_weights: Time | None = None
    arriving: Time = 0
    arriving_back: Time = 0


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the largest number of (stage, microbatch) pairs whose activations are alive at once."""
    return tuple(int(_peak(0, _activations(actions))) for actions in schedule.ranks)


def peak_bytes(schedule: Schedule, size: Bytes) -> tuple[Number, ...]:
    """Per rank, its peak memory in bytes."""
    static: list[Number] = [0] * len(schedule.ranks)
    for stage, rank in schedule.rank_of.items():
        static[rank] += at(size.static, stage, 0)
    return tuple(_peak(static[rank], _bytes(actions, size)) for rank, actions in enumerate(schedule.ranks))


def _peak(start: Number, changes: Iterator[Number]) -> Number:
    now = highest = start
    for change in changes:
        now += change
        highest = max(highest, now)
    return highest


def _activations(actions: Sequence[Action]) -> Iterator[Number]:
    for action in actions:
        for leaf in action.parts or (action,):
            if leaf.kind is ActionKind.F:
                yield 1
        for leaf in action.parts or (action,):
            if leaf.kind is ActionKind.B or leaf.kind is ActionKind.W:
                yield -1


def _bytes(actions: Sequence[Action], size: Bytes) -> Iterator[Number]:
    """Allocations before and releases after each action; the parts of a compound action allocate together."""
    waiting: set[Action] = set()
    for action in actions:
        leaves = action.leaves()
        if leaves[0].kind in RECEIVES or action.kind is ActionKind.EXCHANGE:
            for leaf in leaves:
                if leaf.kind in RECEIVES:
                    waiting.add(leaf)
                    yield _arriving(leaf, size)
        elif leaves[0].kind in COMPUTE:
            yield from (_saved(leaf, size) for leaf in leaves if leaf.kind is ActionKind.F)
            for leaf in leaves:
                yield -_released(leaf, size)
                receive = leaf._replace(kind=ActionKind.RECV_F if leaf.kind is ActionKind.F else ActionKind.RECV_B)
                if leaf.kind is not ActionKind.W and receive in waiting:
                    waiting.remove(receive)
                    yield -_arriving(receive, size)


def _saved(leaf: Action, size: Bytes) -> Number:
    return at(size.activation, leaf.stage, leaf.microbatch or 0)


def _for_weights(leaf: Action, size: Bytes) -> Number:
    return at(size.activation if size.for_weights is None else size.for_weights, leaf.stage, leaf.microbatch or 0)


def _released(leaf: Action, size: Bytes) -> Number:
    if leaf.kind is ActionKind.B:
        return _saved(leaf, size)
    if leaf.kind is ActionKind.I:
        return _saved(leaf, size) - _for_weights(leaf, size)
    return _for_weights(leaf, size) if leaf.kind is ActionKind.W else 0


def _arriving(receive: Action, size: Bytes) -> Number:
    table = size.arriving if receive.kind is ActionKind.RECV_F else size.arriving_back
    return at(table, receive.stage, receive.microbatch or 0)
