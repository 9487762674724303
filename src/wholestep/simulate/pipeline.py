"""Simulate a pipeline schedule before any rank starts: its timeline, peak memory and deadlocks.

    from wholestep.simulate import pipeline

    timeline = pipeline.simulate("1F1B", pipeline.Times(F=1, B=2), ranks=4, microbatches=8)
    timeline.makespan, timeline.bubble, timeline.peak_activations
    timeline.deadlock  # None: there is none, for any times

A schedule is the name of one of torch's, a schedule object of torch, lists of actions, or a CSV file
(`Schedule.read_csv`). Times are exact: integers and fractions stay integers and fractions, floats are added without
rounding.
"""

from __future__ import annotations

from typing import Any

from wholestep.errors import OptionError
from wholestep.simulate.engine import UNSET, Blocked, Deadlock, Engine, Run, find_deadlock
from wholestep.simulate.program import Network, ScheduleProgram, build_program
from wholestep.simulate.schedule import (
    Action,
    ActionKind,
    Number,
    Receives,
    Schedule,
    Time,
    Times,
    parse,
    with_communication,
)
from wholestep.simulate.timeline import (
    Bytes,
    Record,
    Span,
    StageRecorder,
    Timeline,
    peak_activations,
    peak_bytes,
    read_json,
    timeline_of,
    times_of,
)
from wholestep.simulate.timeline_export import perfetto, svg, write_perfetto, write_svg
from wholestep.simulate.torch_schedules import NAMES, named_schedule, schedule_of

Kind, Recorder = ActionKind, StageRecorder

__all__ = [
    "NAMES",
    "Action",
    "ActionKind",
    "Blocked",
    "Bytes",
    "Deadlock",
    "Kind",
    "Network",
    "Number",
    "Receives",
    "Record",
    "Recorder",
    "Schedule",
    "Span",
    "StageRecorder",
    "Time",
    "Timeline",
    "Times",
    "named_schedule",
    "parse",
    "perfetto",
    "read_json",
    "schedule_of",
    "simulate",
    "svg",
    "timeline_of",
    "times_of",
    "with_communication",
    "write_perfetto",
    "write_svg",
]


def simulate(
    schedule: Schedule | str | Any,
    times: Times | None = None,
    *,
    bytes: Bytes | None = None,
    network: Network | None = None,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
) -> Timeline:
    """The timeline of a schedule. Give `ranks` and `microbatches` with a name; other forms determine them."""
    listed = _schedule(schedule, ranks, microbatches, stages_per_rank)
    network = network or Network()
    program = build_program(listed, times or Times(), network)
    run = Engine(program, network).run()
    return Timeline(
        listed,
        _spans(program, run),
        _transfers(program, run),
        find_deadlock(program, run),
        peak_activations(listed),
        peak_bytes(listed, bytes) if bytes is not None else (),
    )


def _schedule(given: Any, ranks: int | None, microbatches: int | None, stages_per_rank: int | None) -> Schedule:
    if isinstance(given, str):
        if ranks is None or microbatches is None:
            fix = 'simulate("1F1B", ranks=4, microbatches=8).'
            raise OptionError(f"{given} is a name: ranks and microbatches are missing.", fix=fix)
        return named_schedule(given, ranks, microbatches, stages_per_rank)
    if (ranks, microbatches, stages_per_rank) != (None, None, None):
        raise OptionError(
            "ranks, microbatches and stages_per_rank are options of a schedule given by name.", fix="leave them out."
        )
    if isinstance(given, list | tuple | dict):
        given = Schedule.of(given)
    return schedule_of(given)


def _spans(program: ScheduleProgram, run: Run) -> tuple[Span, ...]:
    number = program.clock.number
    return tuple(
        Span(rank, action, number(run.began[index]), number(run.ended[index]))
        for index, (rank, action) in enumerate(program.blocks)
        if run.ended[index] != UNSET
    )


def _transfers(program: ScheduleProgram, run: Run) -> tuple[Span, ...]:
    number, first = program.clock.number, program.first_transfer
    return tuple(
        Span(each.sender, each.send, number(run.began[index]), number(run.ended[index]), each.receiver)
        for index, each in enumerate(program.transfers, first)
        if run.ended[index] != UNSET
    )
