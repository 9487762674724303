"""The timeline of a schedule: start and end of each action, bubbles, and peak memory per rank.

Peak memory follows from the lists of actions alone, whatever the times, because a rank runs its actions in order. An
activation is alive from the start of its forward to the end of its backward: of B, or of W where I and W are separate.

Record when the stages of a run compute, for comparison with the prediction.

    recorder = Recorder(stage)                       # or all stages of this rank
    with recorder:
        schedule.step(x, target=y)
    Path(f"rank{rank}.json").write_text(recorder.to_json())

    records = [record for text in texts for record in read_json(text)]          # anywhere, of all ranks' files
    measured = timeline_of(records, schedule)

While it is open, a recorder wraps the three methods of the stage objects that every schedule of torch calls. On a GPU
it records CUDA events and reads their times when it closes. Ranks of one machine share a clock; clocks of different
machines are not synchronised. Time that a schedule spends between the calls (waiting, the loss) shows as a gap.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import torch

from wholestep.errors import ScheduleError
from wholestep.simulate.engine import Deadlock
from wholestep.simulate.schedule import COMPUTE, RECEIVES, Action, ActionKind, Number, Schedule, Time, Times, at


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
