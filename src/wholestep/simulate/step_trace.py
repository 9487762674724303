"""A simulated step as a trace for https://ui.perfetto.dev and chrome://tracing, with the measured one beside it.

One process for the prediction and one for the measurement; in each a row for the compute stream, the host and every
process group. A counter shows live bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholestep.simulate.step_index import Floats, Integers
    from wholestep.simulate.step_timeline import NodeSpan

_PREDICTED, _MEASURED = 0, 1
_FIRST_ROWS = ("compute", "host")

TraceEvent = dict[str, Any]


def write_step_trace(
    path: str | Path,
    spans: Sequence[NodeSpan],
    memory: tuple[Floats, Integers],
    measured: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Write the trace as JSON."""
    events = list(step_events(spans, memory, measured))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def step_events(
    spans: Sequence[NodeSpan],
    memory: tuple[Floats, Integers],
    measured: Mapping[str, tuple[float, float]] | None = None,
) -> Iterator[TraceEvent]:
    """The events of the trace."""
    streams = dict.fromkeys((*_FIRST_ROWS, *(span.stream for span in spans)))
    rows = {stream: row for row, stream in enumerate(streams)}
    titles = ("predicted", "measured") if measured else ("predicted",)
    for process, title in enumerate(titles):
        yield _name("process_name", process, 0, title)
        for stream, row in rows.items():
            yield _name("thread_name", process, row, stream if stream in _FIRST_ROWS else f"group {stream}")
    for span in spans:
        yield _complete(span.name, _PREDICTED, rows[span.stream], span.start, span.end)
    stream_of = {span.name: span.stream for span in spans}
    for name, (start, end) in (measured or {}).items():
        yield _complete(name, _MEASURED, rows[stream_of.get(name, "compute")], start, end)
    last = None
    for when, live in zip(memory[0].tolist(), memory[1].tolist(), strict=True):
        if live != last:
            yield {"ph": "C", "name": "live bytes", "pid": _PREDICTED, "ts": when, "args": {"bytes": live}}
            last = live


def _complete(name: str, process: int, row: int, start: float, end: float) -> TraceEvent:
    return {"ph": "X", "name": name, "pid": process, "tid": row, "ts": start, "dur": end - start}


def _name(what: str, process: int, row: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}
