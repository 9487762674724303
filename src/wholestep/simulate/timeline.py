"""What a schedule does when: each action with its begin and end, and what that comes to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from wholestep.simulate.actions import Action
from wholestep.simulate.deadlock import Deadlock
from wholestep.simulate.schedule import Schedule
from wholestep.simulate.times import Number


class Span(NamedTuple):
    """Something that lasts: a computation on a rank, or a transfer (then `to` is the rank that receives)."""

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
    """The result of a simulation, or of a recording.

    `spans`: computations, in the order in which they began on each rank. `transfers`: only those that happened. With a
    `deadlock` everything is as far as it came. `peak_activations` counts (stage, microbatch) pairs, `peak_bytes` bytes.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...] = ()
    deadlock: Deadlock | None = None
    peak_activations: tuple[int, ...] = ()
    peak_bytes: tuple[Number, ...] = ()

    @cached_property
    def makespan(self) -> Number:
        """When the last computation ends; a step begins at 0."""
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
        """Per rank the sum of its computations."""
        return tuple(sum(span.length for span in spans) for spans in self.of_rank)

    @cached_property
    def bubble(self) -> tuple[Number, ...]:
        """Per rank the time of the whole step in which it does not compute."""
        return tuple(self.makespan - work for work in self.work)

    @cached_property
    def stall(self) -> tuple[Number, ...]:
        """Per rank the same between its own first and last computation only."""
        spans = [(max(s.end for s in each) - min(s.start for s in each)) if each else 0 for each in self.of_rank]
        return tuple(span - work for span, work in zip(spans, self.work, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time that is bubble."""
        whole = self.makespan * len(self.schedule.ranks)
        return float(sum(self.bubble) / whole) if whole else 0.0

    def span(self, action: str | Action) -> Span:
        """The span of an action: `timeline.span("2F0")`. Of `2SEND_F0`: the transfer."""
        found = self._by_text.get(str(action))
        if found is None:
            raise KeyError(f"{action} did not happen")
        return found

    @cached_property
    def _by_text(self) -> dict[str, Span]:
        return {str(span.action): span for span in (*self.spans, *self.transfers)}

    def __str__(self) -> str:
        rows = [
            ("rank", "works", "bubble", "stall", "activations", *(("bytes",) if self.peak_bytes else ())),
            *(self._row(rank) for rank in range(len(self.schedule.ranks))),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        head = f"{self.schedule.name}: {short(self.makespan)} in all, bubble {self.bubble_fraction:.1%}"
        return "\n".join([head, *lines, *([str(self.deadlock)] if self.deadlock else [])])

    def _row(self, rank: int) -> tuple[str, ...]:
        kept = (str(self.peak_activations[rank]) if self.peak_activations else "",)
        size = (short(self.peak_bytes[rank]),) if self.peak_bytes else ()
        return (str(rank), short(self.work[rank]), short(self.bubble[rank]), short(self.stall[rank]), *kept, *size)


def short(number: Number) -> str:
    """A number for a table."""
    return f"{number:.4g}" if isinstance(number, float) else str(number)
