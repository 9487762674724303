"""Simulate a pipeline schedule before any rank starts: its timeline, peak memory and deadlocks.

    from wholestep.simulate import pipeline

    timeline = pipeline.simulate("1F1B", pipeline.Times(F=1, B=2), ranks=4, microbatches=8)
    timeline.makespan, timeline.bubble, timeline.peak_activations
    timeline.deadlock  # None: there is none, for any times

A schedule is the name of one of torch's, a schedule object of torch, lists of actions, or a CSV file
(`Schedule.read_csv`). Times are exact: integers and fractions stay integers and fractions, floats are added without
rounding.

`named_schedule` gives the lists of actions of a schedule of torch by its name. Schedules with several stages per rank
are lists in torch and are read from there. GPipe, 1F1B and forward-only are loops in torch; here they are written as
the actions of these loops. (torch's own lists for them, which only its visualizer uses, differ from the loops: the last
rank of its 1F1B runs microbatches 1 to m instead of 0 to m-1.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wholestep.errors import OptionError, ScheduleError
from wholestep.simulate.schedule import (
    Action,
    ActionKind,
    Number,
    Receives,
    Schedule,
    Time,
    Times,
    compound_action,
    parse,
    with_communication,
)
from wholestep.simulate.schedule_engine import UNSET, Blocked, Deadlock, Engine, Run, find_deadlock
from wholestep.simulate.schedule_program import Network, ScheduleProgram, build_program
from wholestep.simulate.timeline import (
    Bytes,
    Record,
    Span,
    StageRecorder,
    Timeline,
    peak_activations,
    peak_bytes,
    perfetto,
    read_json,
    svg,
    timeline_of,
    times_of,
    write_perfetto,
    write_svg,
)
from wholestep.torch_private import pipelining as torchs

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


NAMES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
ONE_STAGE_PER_RANK = ("GPipe", "1F1B", "ForwardOnly")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def known_name(name: str) -> str:
    """The canonical spelling of a schedule's name; like torch, case is ignored."""
    found = next((known for known in (*NAMES, "ForwardOnly") if known.lower() == name.lower()), None)
    if found is None:
        raise OptionError(f"torch has no schedule {name!r}.", fix=f"one of {', '.join(NAMES)}.")
    return found


def named_schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, *, sharded: bool = False
) -> Schedule:
    """The schedule of a name ("1F1B") with its communication; by default two stages per rank if it supports several.

    `sharded` adds the UNSHARD and RESHARD actions of stages under `fully_shard`.
    """
    if ranks < 1 or microbatches < 1:
        raise OptionError(f"{ranks} ranks and {microbatches} microbatches make no pipeline.", fix="at least 1 of each.")
    if name == "ForwardOnly":
        return Schedule.of([list(forward_only(rank, ranks, microbatches)) for rank in range(ranks)], name)
    try:
        cls = torchs.schedule_class(name)
    except ValueError as error:
        raise OptionError(f"torch has no schedule {name!r}.", fix=f"one of {', '.join(NAMES)}.") from error
    if torchs.is_single(cls):
        if stages_per_rank not in (None, 1):
            raise OptionError(f"{name} has one stage per rank, not {stages_per_rank}.", fix="use Interleaved1F1B.")
        return _loop(_short(cls), ranks, microbatches)
    try:
        each = stages_per_rank or 2
        lists = torchs.listed_actions(cls, ranks, microbatches, each)
        lists = torchs.with_torchs_communication(lists, ranks * each, microbatches, sharded)
    except (ValueError, AssertionError, IndexError, KeyError) as error:
        size = f"{ranks} ranks with {stages_per_rank or 2} stages each and {microbatches} microbatches"
        raise ScheduleError(f"torch has no {name} for {size}: {error}", fix="change one of these numbers.") from error
    return Schedule.of(lists, _short(cls))


def schedule_of(given: Any) -> Schedule:
    """The actions of a schedule object of torch; a `Schedule` is returned with its communication."""
    if isinstance(given, Schedule):
        return with_communication(given)
    microbatches = torchs.microbatches_of(given)
    if torchs.is_single(given):
        stages, _ = torchs.stages_and_ranks(given)
        return _loop(_short(torchs.class_of_loop(given)), stages, microbatches)
    return with_communication(Schedule.of(torchs.actions_that_run(given), _short(type(given))))


def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards. Each of the two phases ends by waiting for its sends."""
    for back in (False, True):
        yield from _phase(rank, ranks, microbatches, back)


def _phase(rank: int, ranks: int, microbatches: int, back: bool) -> Iterator[Action]:
    sent = []
    for microbatch in range(microbatches):
        receive, compute, send = _around(rank, ranks, microbatch, back)
        yield from _exchange(receive)
        yield compute
        yield from send
        sent += send
    yield from _await(sent)


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Warm-up, then alternating backwards and forwards with batched exchanges, then cool-down."""
    warmup = min(microbatches, ranks - rank)
    pending: list[Action] = []
    last_send: list[Action] = []
    for microbatch in range(warmup):
        receive, compute, send = _around(rank, ranks, microbatch, False)
        yield from _exchange(receive)
        yield compute
        yield from _await(pending)
        last_send, pending = send, []
        if microbatch != warmup - 1:
            yield from send
            pending = send
    for back in range(microbatches):
        receive, compute, sending = _around(rank, ranks, back, True)
        ahead = back + warmup
        if back <= microbatches - warmup:
            yield from _exchange(last_send + receive)
            yield compute
            if ahead < microbatches:
                receive, compute, last_send = _around(rank, ranks, ahead, False)
                yield from _exchange(sending + receive)
                yield compute
                continue
        else:
            yield from _exchange(receive)
            yield compute
            yield from _await(pending)
        yield from sending
        pending = sending
    yield from _await(pending)


def forward_only(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The forwards, as `schedule.eval` runs them."""
    return _phase(rank, ranks, microbatches, back=False)


def _loop(name: str, ranks: int, microbatches: int) -> Schedule:
    loop = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "ForwardOnly": forward_only}.get(name)
    if loop is None:
        fix = "pass its lists of actions: Schedule.of."
        raise ScheduleError(f"{name} is a loop whose actions are not known here.", fix=fix)
    if name == "1F1B" and microbatches < ranks:
        fix = "more microbatches, or GPipe."
        raise ScheduleError(f"torch has no 1F1B with {microbatches} microbatches for {ranks} stages.", fix=fix)
    return Schedule.of([list(loop(rank, ranks, microbatches)) for rank in range(ranks)], name)


def _around(rank: int, ranks: int, microbatch: int, back: bool) -> tuple[list[Action], Action, list[Action]]:
    """The receive before a computation, the computation, and the send after it."""
    receive = [Action(rank, ActionKind.RECV_B if back else ActionKind.RECV_F, microbatch)]
    send = [Action(rank, ActionKind.SEND_B if back else ActionKind.SEND_F, microbatch)]
    first, last = rank == 0, rank == ranks - 1
    compute = Action(rank, ActionKind.B if back else ActionKind.F, microbatch)
    return ([] if (last if back else first) else receive), compute, ([] if (first if back else last) else send)


def _exchange(actions: list[Action]) -> list[Action]:
    return [compound_action(ActionKind.EXCHANGE, actions)] if actions else []


def _await(actions: list[Action]) -> list[Action]:
    return [compound_action(ActionKind.AWAIT, actions)] if actions else []


def _short(cls: type[Any]) -> str:
    return {"_ScheduleForwardOnly": "ForwardOnly"}.get(cls.__name__, cls.__name__.removeprefix("Schedule"))


Kind, Recorder = ActionKind, StageRecorder
