"""`plan`: choose schedule, number of stages and number of microbatches by simulating all combinations.

plan = ws.pipelining.plan(model, ranks=4, memory=40 * 2**30, mb_args=(tokens,), batch=64)
print(plan)          a row per choice, the fastest that fits first
plan.best.schedule, plan.best.stages, plan.best.microbatches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from wholestep.errors import CutError, OptionError, ScheduleError, invalid_value
from wholestep.ir.io.node_values import hint_of
from wholestep.ir.readable import html_in_notebooks
from wholestep.ir.step_graph import as_bytes
from wholestep.pipelining.build.pipeline import pipeline
from wholestep.pipelining.pipe import Pipe
from wholestep.pipelining.planning.stage_costs import (
    HasStages,
    StageCosts,
    bytes_from,
    estimate_costs,
    measure_costs,
    times_from,
)
from wholestep.simulate.machine import DEFAULT_MACHINE, Machine
from wholestep.simulate.pipeline import NAMES, ONE_STAGE_PER_RANK, V_SHAPED, Bytes, Network, Timeline, Times, simulate

_MAY_HAVE_ONE = ("InterleavedZeroBubble",)
_MIB = 2**20


@dataclass(frozen=True)
class Choice:
    """One combination of schedule, number of stages and number of microbatches, and its simulation."""

    schedule: str
    stages: int
    microbatches: int
    seconds: float
    """The time of one step."""
    seconds_per_microbatch: float
    """Per microbatch of the captured size: choices are ranked by it, because steps may differ in size."""
    bubble: float
    """The fraction of all ranks' time that is idle."""
    peak_bytes: int
    """The peak memory of the rank that needs most."""
    fits: bool
    timeline: Timeline

    def __str__(self) -> str:
        return f"{self.schedule}, {self.stages} stages, {self.microbatches} microbatches"


@dataclass(frozen=True)
class PipelinePlan:
    """All choices, best first: those that fit by time, then those that do not fit by memory."""

    choices: tuple[Choice, ...]
    left_out: Mapping[str, str]
    """Combinations that are not possible, and why."""

    _repr_html_ = html_in_notebooks

    @property
    def best(self) -> Choice:
        if not self.choices:
            reasons = "; ".join(f"{what}: {why}" for what, why in self.left_out.items())
            raise ScheduleError(f"no schedule is possible. {reasons}", fix="use fewer ranks, or more microbatches.")
        if not self.choices[0].fits:
            least = min(choice.peak_bytes for choice in self.choices)
            fix = "use more ranks, more microbatches, activation checkpointing, or sharding inside a stage."
            what = f"the smallest peak of all choices is {least / _MIB:.3g} MiB on a rank"
            raise ScheduleError(f"no schedule fits: {what}.", fix=fix)
        return self.choices[0]

    def __str__(self) -> str:
        if not self.choices:
            return "\n".join(["no schedule is possible", *(f"  {what}: {why}" for what, why in self.left_out.items())])
        table = [_HEAD, *_rows(self.choices)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in row)
            for row in (list(enumerate(zip(row, widths, strict=True))) for row in table)
        )

    def __rich__(self) -> Any:
        """A coloured table, for `rich.print`."""
        from rich.table import Table

        table = Table(title="pipeline schedules, best first")
        for index, name in enumerate(_HEAD):
            table.add_column(name, justify="right" if index else "left")
        for choice, row in zip(self.choices, _rows(self.choices), strict=True):
            table.add_row(*row, style=None if choice.fits else "dim red")
        return table


_HEAD = ("schedule", "stages", "microbatches", "ms per step", "ms per microbatch", "bubble", "peak MiB", "fits")


def _rows(choices: Iterable[Choice]) -> Iterator[tuple[str, ...]]:
    for each in choices:
        yield (
            each.schedule,
            str(each.stages),
            str(each.microbatches),
            f"{each.seconds * 1e3:.3f}",
            f"{each.seconds_per_microbatch * 1e3:.3f}",
            f"{each.bubble:.1%}",
            f"{each.peak_bytes / _MIB:.1f}",
            "yes" if each.fits else "no",
        )


def plan(
    model: nn.Module | Pipe | HasStages,
    ranks: int,
    memory: float | str | None = None,
    *,
    mb_args: Sequence[Any] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    batch: int | None = None,
    schedules: Sequence[str] = NAMES,
    stages_per_rank: Sequence[int] = (1, 2, 4),
    microbatches: Sequence[int] | None = None,
    machine: Machine = DEFAULT_MACHINE,
    state_copies: float = 3,
    network: Network | None = None,
    cut: Callable[[int], HasStages] | None = None,
    costs: Literal["estimated", "measured"] | Callable[[HasStages], Sequence[StageCosts]] = "estimated",
) -> PipelinePlan:
    """Simulate all schedules, numbers of stages and numbers of microbatches on `ranks` ranks with `memory` each: bytes,
    or a string such as "16GB".

    `model` is a model, which is cut into each number of stages with `mb_args` as its microbatch (or by `cut`), or a
    pipe, whose stages are used unchanged. `batch`: rows of a whole step, divided among the microbatches; without it the
    size of a microbatch is fixed and a step grows with their number. `costs`: costs of stages, estimated for `machine`,
    measured here on `mb_args`, or computed by a function. `state_copies`: extra bytes per byte of a parameter (3: a
    gradient and Adam's two moments).
    """
    if type(ranks) is not int or ranks < 1:
        raise invalid_value("ranks", ranks, "use a whole number, 1 or more; an example call goes to mb_args=.")
    most = as_bytes(memory, "memory")
    is_pipe, is_given = hasattr(model, "get_stage_module"), bool(mb_args or mb_kwargs)
    if not is_given and (costs == "measured" or not (is_pipe or cut is not None)):
        raise OptionError("cutting a model or measuring stages requires a microbatch.", fix="pass mb_args=(x,).")
    pipes = _pipes(model, ranks, stages_per_rank, mb_args, mb_kwargs, cut)
    choices: list[Choice] = []
    left_out: dict[str, str] = {}
    for each, made in pipes.items():
        if isinstance(made, str):
            left_out[f"{ranks * each} stages"] = made
            continue
        known = _costs(made, costs, machine, mb_args, mb_kwargs)
        rows = _rows_of(made) if batch is not None else None
        for name in _allowed(schedules, each):
            for count in microbatches or [ranks * factor for factor in (1, 2, 4, 8)]:
                if batch is not None and count > batch:
                    left_out[f"{name}, {ranks * each} stages, {count} microbatches"] = f"the batch has {batch} rows."
                    continue
                scale = 1.0 if batch is None or rows is None else batch / count / rows
                try:
                    size = bytes_from(known, state_copies, scale)
                    times = times_from(known, machine, scale)
                    found = _choice(name, ranks, each, count, times, size, scale, most, network)
                except (ScheduleError, OptionError) as error:
                    left_out[f"{name}, {ranks * each} stages, {count} microbatches"] = error.what
                else:
                    choices.append(found)
    choices.sort(key=lambda c: (not c.fits, c.seconds_per_microbatch if c.fits else c.peak_bytes, c.peak_bytes, str(c)))
    return PipelinePlan(tuple(choices), left_out)


def _choice(
    name: str,
    ranks: int,
    each: int,
    microbatches: int,
    times: Times,
    size: Bytes,
    scale: float,
    memory: float | None,
    network: Network | None,
) -> Choice:
    timeline = simulate(
        name,
        times,
        bytes=size,
        network=network,
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=None if name in ONE_STAGE_PER_RANK else each,
    )
    if timeline.deadlock is not None:
        raise ScheduleError(str(timeline.deadlock))
    seconds, peak = float(timeline.makespan), int(max(timeline.peak_bytes))
    fits = memory is None or peak <= memory
    per_microbatch = seconds / (microbatches * scale)
    return Choice(
        name, ranks * each, microbatches, seconds, per_microbatch, timeline.bubble_fraction, peak, fits, timeline
    )


def _costs(
    pipe: Any, costs: Any, machine: Machine, mb_args: Sequence[Any], mb_kwargs: Mapping[str, Any] | None
) -> tuple[StageCosts, ...]:
    if callable(costs):
        return tuple(costs(pipe))
    if costs == "measured":
        return measure_costs(pipe, mb_args, mb_kwargs, machine)
    if costs != "estimated":
        raise OptionError(f"costs={costs!r} is not known.", fix='"estimated", "measured" or a function of a pipe.')
    return estimate_costs(pipe, machine)


def _allowed(schedules: Sequence[str], each: int) -> list[str]:
    """The schedules that support `each` stages per rank."""
    if each == 1:
        return [name for name in schedules if name in ONE_STAGE_PER_RANK or name in _MAY_HAVE_ONE]
    several = [name for name in schedules if name not in ONE_STAGE_PER_RANK]
    return several if each == 2 else [name for name in several if name not in V_SHAPED]


def _pipes(
    model: Any,
    ranks: int,
    stages_per_rank: Sequence[int],
    mb_args: Sequence[Any],
    mb_kwargs: Mapping[str, Any] | None,
    cut: Callable[[int], HasStages] | None,
) -> dict[int, HasStages | str]:
    """A pipe for each number of stages per rank, or the reason why there is none."""
    if hasattr(model, "get_stage_module"):
        if model.num_stages % ranks:
            fix = "cut it into a multiple of the ranks."
            raise OptionError(f"{model.num_stages} stages cannot be divided evenly among {ranks} ranks.", fix=fix)
        return {model.num_stages // ranks: model}
    found: dict[int, HasStages | str] = {}
    for each in dict.fromkeys(stages_per_rank):
        try:
            found[each] = (cut or _cut_into(model, mb_args, mb_kwargs))(ranks * each)
        except CutError as error:
            found[each] = error.what
    return found


def _cut_into(
    model: nn.Module, mb_args: Sequence[Any], mb_kwargs: Mapping[str, Any] | None
) -> Callable[[int], HasStages]:
    return lambda stages: pipeline(model, mb_args, mb_kwargs, stages=stages)


def _rows_of(pipe: HasStages) -> int:
    """The rows of a microbatch: dim 0 of the first input that has one."""
    for name in pipe.routing.inputs[0]:
        value = pipe.routing.values[name].meta
        if value is not None and value.dim():
            return max(1, int(hint_of(value.shape[0]) or 1))
    return 1
