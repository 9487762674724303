"""A timeline as SVG, or as a trace for https://ui.perfetto.dev and chrome://tracing.

    picture = svg(predicted, measured, titles=("predicted", "measured"))

SVG: one lane per rank, one block per action, several timelines below each other on one axis. Forwards are blue,
backwards orange, or teal (for the input) and green (for the weights). Every second stage of a rank is paler. Blocks are
labelled with stage and microbatch if the label fits, and have tooltips.

Perfetto: JSON with one process per timeline and one row per rank. Transfers have rows of their own, one per pair of
ranks and direction, and an arrow to the action that uses the value. A counter shows the live activations of each rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from wholestep.simulate.schedule import ActionKind, Number, counterpart
from wholestep.simulate.timeline import Span, Timeline, short

_COLOURS = {
    ActionKind.F: "#7fb2e5",
    ActionKind.B: "#f2a65a",
    ActionKind.I: "#5fb8b0",
    ActionKind.W: "#8cc77b",
    ActionKind.OVERLAP_F_B: "#b79ad8",
    ActionKind.REDUCE_GRAD: "#b5b5b5",
}
_MEANINGS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward for the input",
    ActionKind.W: "backward for the weights",
    ActionKind.OVERLAP_F_B: "forward and backward together",
    ActionKind.REDUCE_GRAD: "gradients reduced",
}
_LEFT, _RIGHT, _LANE, _GAP, _HEAD, _AXIS = 64, 24, 26, 6, 30, 26
_LETTER = 5.4  # width of a letter of the blocks


def svg(*timelines: Timeline, titles: Sequence[str] = (), width: int = 1200, transfers: bool = True) -> str:
    """The SVG as text. `transfers` draws a line for each transfer."""
    end = float(max((each.makespan for each in timelines), default=0)) or 1.0
    scale = (width - _LEFT - _RIGHT) / end
    body: list[str] = []
    top = 34
    for index, timeline in enumerate(timelines):
        title = titles[index] if index < len(titles) else timeline.schedule.name
        body += _panel(timeline, title, top, scale, width, transfers)
        top += _height(timeline)
    body += _axis(end, scale, top)
    height = top + _AXIS
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="system-ui, sans-serif" font-size="11"'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([f"{head} {style}>", background, *_legend(timelines), *body, "</svg>", ""])


def write_svg(path: str | Path, *timelines: Timeline, titles: Sequence[str] = (), width: int = 1200) -> None:
    """Write `svg` to a file."""
    Path(path).write_text(svg(*timelines, titles=titles, width=width), encoding="utf-8")


def _height(timeline: Timeline) -> int:
    return _HEAD + len(timeline.schedule.ranks) * (_LANE + _GAP) + 8


def _panel(timeline: Timeline, title: str, top: int, scale: float, width: int, transfers: bool) -> Iterator[str]:
    summary = f"makespan {short(timeline.makespan)}, bubble {timeline.bubble_fraction:.1%}"
    stuck = ", then a deadlock" if timeline.deadlock else ""
    yield f'<text x="8" y="{top + 17}" font-weight="600">{escape(title)}: {summary}{stuck}</text>'
    for rank in range(len(timeline.schedule.ranks)):
        lane = _lane(top, rank)
        yield f'<text x="8" y="{lane + 17}">rank {rank}</text>'
        yield f'<rect x="{_LEFT}" y="{lane}" width="{width - _LEFT - _RIGHT}" height="{_LANE}" fill="#f3f3f3"/>'
    pale = {stage for stages in _stages(timeline) for stage in stages[1::2]}
    for span in timeline.spans:
        if span.length or span.action.kind is not ActionKind.REDUCE_GRAD:
            yield _block(span, top, scale, span.action.stage in pale)
    for span in timeline.transfers if transfers else ():
        yield _line(span, top, scale)


def _lane(top: int, rank: int) -> int:
    return top + _HEAD + rank * (_LANE + _GAP)


def _stages(timeline: Timeline) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in timeline.schedule.ranks]
    for stage in sorted(timeline.schedule.rank_of):
        found[timeline.schedule.rank_of[stage]].append(stage)
    return found


def _block(span: Span, top: int, scale: float, pale: bool) -> str:
    x, w = _LEFT + float(span.start) * scale, float(span.length) * scale
    y = _lane(top, span.rank)
    parts = span.action.leaves()
    label = " ".join(f"{part.stage}.{part.microbatch}" for part in parts if part.microbatch is not None)
    what = f"{span.action} on rank {span.rank}: {short(span.start)} to {short(span.end)}"
    fill = f'fill="{_COLOURS[span.action.kind]}"' + (' fill-opacity="0.6"' if pale else "")
    size = f'width="{w:.2f}" height="{_LANE}"'
    box = f'<rect x="{x:.2f}" y="{y}" {size} {fill} stroke="white" stroke-width="0.7"/>'
    inside = f'<text x="{x + w / 2:.2f}" y="{y + 17}" font-size="9" text-anchor="middle">{label}</text>'
    return f"<g><title>{escape(what)}</title>{box}{inside if len(label) * _LETTER < w else ''}</g>"


def _line(span: Span, top: int, scale: float) -> str:
    assert span.to is not None
    x1, x2 = (_LEFT + float(at) * scale for at in (span.start, span.end))
    down = span.to > span.rank
    y1 = _lane(top, span.rank) + (_LANE if down else 0)
    y2 = _lane(top, span.to) + (0 if down else _LANE)
    what = f"{span.action} to rank {span.to}: {short(span.start)} to {short(span.end)}"
    line = f'<line x1="{x1:.2f}" y1="{y1}" x2="{x2:.2f}" y2="{y2}" stroke="#555" stroke-width="0.6" opacity="0.6"/>'
    return f"<g><title>{escape(what)}</title>{line}</g>"


def _legend(timelines: Sequence[Timeline]) -> Iterator[str]:
    there = {span.action.kind for timeline in timelines for span in timeline.spans if span.length}
    x = 8
    for kind, meaning in _MEANINGS.items():
        if kind in there:
            yield f'<rect x="{x}" y="10" width="12" height="12" fill="{_COLOURS[kind]}"/>'
            yield f'<text x="{x + 17}" y="20">{meaning}</text>'
            x += 35 + int(len(meaning) * 6)
    yield f'<text x="{x}" y="20" fill="#666">blocks: stage.microbatch</text>'


def _axis(end: float, scale: float, y: int) -> Iterator[str]:
    step = _round_step(end / 10)
    yield f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + end * scale:.2f}" y2="{y}" stroke="#555"/>'
    for index in range(int(end / step + 1e-9) + 1):
        x = _LEFT + index * step * scale
        yield f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 4}" stroke="#555"/>'
        yield f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle" font-size="9">{index * step:.6g}</text>'


def _round_step(about: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not smaller."""
    power = 10.0 ** (len(f"{about:.0f}") - 1) if about >= 1 else 10.0 ** -(len(f"{1 / about:.0f}"))
    return next(factor * power for factor in (1, 2, 5, 10, 20, 50, 100) if factor * power >= about)


_LINKS = 1000  # rows of links come after those of all ranks
_SECOND = 1_000_000.0  # in microseconds, the unit of the format

Event = dict[str, Any]


def perfetto(*timelines: Timeline, titles: Sequence[str] = (), per_unit: float = _SECOND) -> dict[str, Any]:
    """The trace; `per_unit` is the number of microseconds in a unit of the timelines (default: they are in seconds)."""
    events: list[Event] = []
    for process, timeline in enumerate(timelines):
        title = titles[process] if process < len(titles) else timeline.schedule.name
        events += _events(timeline, process, title, per_unit)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(
    path: str | Path, *timelines: Timeline, titles: Sequence[str] = (), per_unit: float = _SECOND
) -> None:
    """Write `perfetto` to a file."""
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
        kinds = (ActionKind.F,) if receive.kind is ActionKind.RECV_F else (ActionKind.B, ActionKind.I)
        user = next((used[at] for kind in kinds if (at := receive._replace(kind=kind)) in used), None)
        if user is not None:
            flow = {"cat": "value", "name": "arrives", "id": process * 10_000_000 + number, "pid": process}
            yield flow | {"ph": "s", "tid": row, "ts": when(span.start)}
            yield flow | {"ph": "f", "bp": "e", "tid": span.to, "ts": when(user.start)}
    yield from _live_activations(timeline, process, when)


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


def _live_activations(timeline: Timeline, process: int, when: Any) -> Iterator[Event]:
    """A counter event at each change of the number of live activations."""
    for rank, spans in enumerate(timeline.of_rank):
        alive = 0
        for span in spans:
            for leaf in span.action.leaves():
                change = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.W: -1}.get(leaf.kind, 0)
                if change:
                    alive += change
                    at = when(span.start if change > 0 else span.end)
                    name = f"activations of rank {rank}"
                    yield {"ph": "C", "name": name, "pid": process, "ts": at, "args": {"alive": alive}}


def _name(what: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}
