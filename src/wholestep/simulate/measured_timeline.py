"""Record when the stages of a run compute, for comparison with the prediction.

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
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from wholestep.errors import ScheduleError
from wholestep.simulate.durations import Times
from wholestep.simulate.schedule import Action, ActionKind, Schedule
from wholestep.simulate.timeline import Span, Timeline, peak_activations

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
