"""Simulate a pipeline schedule before any rank starts: when everything happens, how much is kept, whether it can end.

    from wholestep.simulate import pipeline

    timeline = pipeline.simulate("1F1B", pipeline.Times(F=1, B=2), ranks=4, microbatches=8)
    timeline.makespan, timeline.bubble, timeline.peak_activations
    timeline.deadlock  # None: proven, for any times

A schedule is a name of torch's, an object of torch's, lists of actions, or a CSV file (`Schedule.read_csv`). Times are
exact: integers and fractions stay what they are, and floats are added without rounding.
"""

from __future__ import annotations

from typing import Any

from wholestep.errors import OptionError
from wholestep.simulate.actions import Action, Kind, parse
from wholestep.simulate.communication import Receives, with_communication
from wholestep.simulate.deadlock import Blocked, Deadlock, find_deadlock
from wholestep.simulate.draw import svg, write_svg
from wholestep.simulate.engine import UNSET, Engine, Run
from wholestep.simulate.measured import Record, Recorder, read_json, timeline_of, times_of
from wholestep.simulate.memory import Bytes, peak_activations, peak_bytes
from wholestep.simulate.named import NAMES, named_schedule, schedule_of
from wholestep.simulate.network import Network
from wholestep.simulate.program import Program, build
from wholestep.simulate.schedule import Schedule
from wholestep.simulate.timeline import Span, Timeline
from wholestep.simulate.times import Number, Time, Times
from wholestep.simulate.trace import perfetto, write_perfetto

__all__ = [
    "NAMES",
    "Action",
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
    """The timeline of a schedule. `ranks` and `microbatches` go with a name, and are known from anything else."""
    listed = _schedule(schedule, ranks, microbatches, stages_per_rank)
    network = network or Network()
    program = build(listed, times or Times(), network)
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
            raise OptionError(f"{given} is a name: how many ranks and microbatches?", fix=fix)
        return named_schedule(given, ranks, microbatches, stages_per_rank)
    if (ranks, microbatches, stages_per_rank) != (None, None, None):
        raise OptionError("a schedule that is not a name has its own number of ranks and microbatches.")
    if isinstance(given, list | tuple | dict):
        given = Schedule.of(given)
    return schedule_of(given)


def _spans(program: Program, run: Run) -> tuple[Span, ...]:
    number = program.clock.number
    return tuple(
        Span(rank, action, number(run.began[index]), number(run.ended[index]))
        for index, (rank, action) in enumerate(program.blocks)
        if run.ended[index] != UNSET
    )


def _transfers(program: Program, run: Run) -> tuple[Span, ...]:
    number, first = program.clock.number, program.first_transfer
    return tuple(
        Span(each.sender, each.send, number(run.began[index]), number(run.ended[index]), each.receiver)
        for index, each in enumerate(program.transfers, first)
        if run.ended[index] != UNSET
    )
