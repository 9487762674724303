"""The timeline of a schedule: predicted, recorded, and drawn. Start and end of each action, bubbles, peak memory.

Peak memory follows from the lists of actions alone, whatever the times, because a rank runs its actions in order. An
activation is alive from the start of its forward to the end of its backward: of B, or of W where I and W are separate.

`Recorder` records when the stages of a run compute, for comparison with the prediction.

    recorder = Recorder(stage)                       # or all stages of this rank
    with recorder:
        schedule.step(x, target=y)
    Path(f"rank{rank}.json").write_text(recorder.to_json())

    records = [record for text in texts for record in read_json(text)]          # anywhere, of all ranks' files
    measured = timeline_of(records, schedule)

While it is open, a recorder wraps the three methods of the stage objects that every schedule of torch calls. On a GPU
it records CUDA events and reads their times when it closes. Ranks of one machine share a clock; clocks of different
machines are not synchronised. Time that a schedule spends between the calls (waiting, the loss) shows as a gap.

`svg` draws timelines, `perfetto` writes a trace for https://ui.perfetto.dev and chrome://tracing.

    picture = svg(predicted, measured, titles=("predicted", "measured"))

SVG: one lane per rank, one block per action, several timelines below each other on one axis. Forwards are blue,
backwards orange, or teal (for the input) and green (for the weights). Every second stage of a rank is paler. Blocks are
labelled with stage and microbatch if the label fits, and have tooltips.

Perfetto: JSON with one process per timeline and one row per rank. Transfers have rows of their own, one per pair of
ranks and direction, and an arrow to the action that uses the value. A counter shows the live activations of each rank.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from wholestep.errors import ScheduleError
from wholestep.ir.readable import html_in_notebooks
from wholestep.simulate.schedule import (
    COMPUTE,
    RECEIVES,
    Action,
    ActionKind,
    Number,
    Schedule,
    Time,
    Times,
    at,
    counterpart,
)
from wholestep.simulate.schedule_engine import Deadlock


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

    _repr_html_ = html_in_notebooks

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


_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_VERSION = 1


class Record(NamedTuple):
    """One computation, in seconds of the machine's clock. `step` counts the recorded steps."""

    step: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


class StageRecorder:
    """Records the computations of the given stages while it is open (`with`). A recurring action begins a new step."""

    def __init__(self, *stages: Any) -> None:
        self._stages = stages
        self._marks: list[tuple[int, str, int, Any, Any]] = []
        self._device = next((stage.device for stage in stages if torch.device(stage.device).type == "cuda"), None)
        self._origin: tuple[float, Any] | None = None
        self._own: list[dict[str, Any]] = []  # per stage: instance attributes that the wrappers replace
        self._seen: dict[tuple[int, str, int], int] = {}
        self.records: list[Record] = []

    def __enter__(self) -> StageRecorder:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            self._origin = (time.perf_counter(), self._now())
        for stage in self._stages:
            self._own.append({name: vars(stage)[name] for name in _METHODS if name in vars(stage)})
            for name in _METHODS:
                setattr(stage, name, self._wrapped(stage, name, getattr(stage, name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stage in reversed(self._stages):
            for name in _METHODS:
                delattr(stage, name)
            vars(stage).update(self._own.pop())
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        for stage_index, what, microbatch, begin, end in self._marks:
            key = (stage_index, what, microbatch)
            self._seen[key] = step = self._seen.get(key, -1) + 1
            self.records.append(Record(step, *key, self._seconds(begin), self._seconds(end)))
        self._marks.clear()

    def to_json(self) -> str:
        """All records as JSON; inverse of `read_json`."""
        return json.dumps({"version": _VERSION, "records": self.records})

    def _wrapped(self, stage: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **named: Any) -> Any:
            begin = self._now()
            result = method(chunk, *args, **named)
            self._marks.append((stage.stage_index, _kind(name, args, named), chunk, begin, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: Any) -> float:
        if self._origin is None:
            return float(mark)
        begin, event = self._origin
        return begin + float(event.elapsed_time(mark)) / 1000


def read_json(text: str) -> list[Record]:
    """Records from the JSON of `StageRecorder.to_json`."""
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ScheduleError("not a pipeline recording, or one of another version.", fix="record it again.")
    return [Record(*each) for each in found["records"]]


def timeline_of(records: Iterable[Record], schedule: Schedule, step: int = 0) -> Timeline:
    """The records of one step of all ranks as a timeline, to be compared with the simulated one."""
    chosen = sorted((each for each in records if each.step == step), key=lambda each: each.start)
    if not chosen:
        raise ScheduleError(f"there are no records of step {step}.", fix="record all ranks, and count steps from 0.")
    begin = chosen[0].start
    spans = tuple(
        Span(
            schedule.rank_of[each.stage],
            Action(each.stage, ActionKind(each.kind), each.microbatch),
            each.start - begin,
            each.end - begin,
        )
        for each in chosen
    )
    return Timeline(schedule, spans, peak_activations=peak_activations(schedule))


def times_of(records: Sequence[Record], **others: Any) -> Times:
    """Median times per stage, for `simulate`; `others` are the times that a recording does not contain (`send`)."""
    stages = 1 + max((each.stage for each in records), default=-1)
    lengths: dict[str, list[list[float]]] = {each.kind: [[] for _ in range(stages)] for each in records}
    for each in records:
        lengths[each.kind][each.stage].append(each.end - each.start)
    found = {kind: [statistics.median(one) if one else 0.0 for one in rows] for kind, rows in lengths.items()}
    return Times(**(found | others))


def _kind(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> str:
    if name == "forward_one_chunk":
        return "F"
    if name == "backward_weight_one_chunk":
        return "W"
    full = named.get("full_backward", args[1] if len(args) > 1 else True)
    return "B" if full else "I"


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

    yield naming_event("process_name", process, 0, title)
    for rank in range(len(timeline.schedule.ranks)):
        yield naming_event("thread_name", process, rank, f"rank {rank}")
    links = sorted({(span.rank, span.to) for span in timeline.transfers if span.to is not None})
    row_of = {link: _LINKS + index for index, link in enumerate(links)}
    for (sender, receiver), row in row_of.items():
        yield naming_event("thread_name", process, row, f"rank {sender} to rank {receiver}")
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


def naming_event(what: str, process: int, row: int, name: str) -> Event:
    """The event by which Perfetto names a process or a row."""
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}
