"""A timeline for https://ui.perfetto.dev or chrome://tracing: JSON with one process per timeline and one row per rank.

Values that travel have rows of their own, one per pair of ranks and direction, and an arrow to where they are used. A
counter shows how many activations each rank keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wholestep.simulate.actions import Kind
from wholestep.simulate.communication import counterpart
from wholestep.simulate.timeline import Span, Timeline
from wholestep.simulate.times import Number

_LINKS = 1000  # rows of links come behind all ranks
_SECOND = 1_000_000.0  # in the microseconds of the format

Event = dict[str, Any]


def perfetto(*timelines: Timeline, titles: Sequence[str] = (), per_unit: float = _SECOND) -> dict[str, Any]:
    """The trace; `per_unit` is how many microseconds a unit of the timelines is (they are in seconds)."""
    events: list[Event] = []
    for process, timeline in enumerate(timelines):
        title = titles[process] if process < len(titles) else timeline.schedule.name
        events += _events(timeline, process, title, per_unit)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(
    path: str | Path, *timelines: Timeline, titles: Sequence[str] = (), per_unit: float = _SECOND
) -> None:
    text = json.dumps(perfetto(*timelines, titles=titles, per_unit=per_unit))
    Path(path).write_text(text, encoding="utf-8")


def _events(timeline: Timeline, process: int, title: str, per_unit: float) -> Iterator[Event]:
    def when(at: Number) -> float:
        return float(at) * per_unit

    yield _name("process_name", process, 0, title)
    for rank in range(len(timeline.schedule.ranks)):
        yield _name("thread_name", process, rank, f"rank {rank}")
    links = sorted({(span.rank, span.to) for span in timeline.transfers if span.to is not None})
    row_of = {link: _LINKS + index for index, link in enumerate(links)}
    for (sender, receiver), row in row_of.items():
        yield _name("thread_name", process, row, f"rank {sender} to rank {receiver}")
    for span in timeline.spans:
        yield _complete(span, process, span.rank, when)
    used = {leaf: span for span in timeline.spans for leaf in span.action.leaves()}
    for number, span in enumerate(timeline.transfers):
        assert span.to is not None
        row = row_of[span.rank, span.to]
        yield _complete(span, process, row, when)
        receive = counterpart(span.action)
        kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
        user = next((used[at] for kind in kinds if (at := receive._replace(kind=kind)) in used), None)
        if user is not None:
            flow = {"cat": "value", "name": "arrives", "id": process * 10_000_000 + number, "pid": process}
            yield flow | {"ph": "s", "tid": row, "ts": when(span.start)}
            yield flow | {"ph": "f", "bp": "e", "tid": span.to, "ts": when(user.start)}
    yield from _kept(timeline, process, when)


def _complete(span: Span, process: int, row: int, when: Any) -> Event:
    begin, end = when(span.start), when(span.end)
    about = [{"stage": leaf.stage, "microbatch": leaf.microbatch} for leaf in span.action.leaves()]
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": span.action.kind.value,
        "pid": process,
        "tid": row,
        "ts": begin,
        "dur": end - begin,
        "args": {"parts": about},
    }


def _kept(timeline: Timeline, process: int, when: Any) -> Iterator[Event]:
    """How many activations are alive, at each change."""
    for rank, spans in enumerate(timeline.of_rank):
        alive = 0
        for span in spans:
            for leaf in span.action.leaves():
                change = {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(leaf.kind, 0)
                if change:
                    alive += change
                    at = when(span.start if change > 0 else span.end)
                    name = f"activations of rank {rank}"
                    yield {"ph": "C", "name": name, "pid": process, "ts": at, "args": {"alive": alive}}


def _name(what: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}
