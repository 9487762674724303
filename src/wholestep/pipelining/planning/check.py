"""Refuse a schedule that cannot work, before any rank starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.errors import OptionError, ScheduleError
from wholestep.ir.memory_report import as_bytes
from wholestep.pipelining.planning.stage_costs import HasStages, StageCosts, bytes_from, estimate_costs, times_from
from wholestep.simulate.cost_model import DEFAULT_MACHINE, Machine
from wholestep.simulate.pipeline import Network, Schedule, Timeline, simulate
from wholestep.simulate.torch_schedules import ONE_STAGE_PER_RANK, V_SHAPED, known_name, named_schedule, schedule_of

_MIB = 2**20


def check(
    pipe: HasStages,
    schedule: Any,
    *,
    memory: float | str | None = None,
    ranks: int | None = None,
    microbatches: int | None = None,
    machine: Machine = DEFAULT_MACHINE,
    state_copies: float = 3,
    network: Network | None = None,
    costs: Sequence[StageCosts] | None = None,
) -> Timeline:
    """What the schedule will do with the stages of a pipe; raises WS-SCHEDULE if that ends in a deadlock, if a rank
    needs more than `memory` (bytes, or a text such as "16GB"), or if the schedule is for another number of stages.

    `schedule`: an object of torch's, a `Schedule`, lists of actions, or a name. With a name `ranks` is needed where the
    schedule can have any number of stages on a rank; without `microbatches` there are two for each rank. Where
    the pipe's parameters are on CUDA, transfers are in order per pair of ranks, as NCCL does them. Microbatches are of
    the size with which the pipe was made.
    """
    most = as_bytes(memory, "memory")
    listed = _listed(pipe, schedule, ranks, microbatches)
    if listed.stages != pipe.num_stages:
        fix = "cut the model into as many stages as the schedule has."
        raise ScheduleError(f"{listed.name} has {listed.stages} stages, the pipe has {pipe.num_stages}.", fix=fix)
    network = network or Network("ordered" if _on_cuda(pipe) else "rendezvous")
    timeline = simulate(listed, network=network)  # a deadlock does not depend on times, so costs come behind it
    if timeline.deadlock is not None:
        fix = "let the receive of one of them come before its send; torch's own schedules do."
        raise _refused(f"{listed.name} ends in a deadlock. {timeline.deadlock}", fix, timeline)
    known = tuple(costs) if costs is not None else estimate_costs(pipe, machine)
    timeline = simulate(listed, times_from(known, machine), bytes=bytes_from(known, state_copies), network=network)
    if most is not None:
        _check_memory(timeline, most)
    return timeline


def _check_memory(timeline: Timeline, memory: float) -> None:
    over = [rank for rank, peak in enumerate(timeline.peak_bytes) if peak > memory]
    if over:
        worst = max(over, key=lambda rank: timeline.peak_bytes[rank])
        alive = timeline.peak_activations[worst]
        what = (
            f"{timeline.schedule.name} needs {timeline.peak_bytes[worst] / _MIB:.1f} MiB on rank {worst}, where "
            f"{memory / _MIB:.1f} MiB are allowed: {alive} activations are alive at once"
        )
        others = f" (ranks {', '.join(map(str, over))} are over)" if len(over) > 1 else ""
        fix = "ws.pipelining.plan lists schedules that fit."
        raise _refused(f"{what}{others}.", fix, timeline)


def _refused(what: str, fix: str, timeline: Timeline) -> ScheduleError:
    error = ScheduleError(what, fix=fix)
    error.timeline = timeline
    return error


def _listed(pipe: HasStages, schedule: Any, ranks: int | None, microbatches: int | None) -> Schedule:
    if isinstance(schedule, str):
        schedule = known_name(schedule)
        ranks = _ranks(pipe.num_stages, schedule) if ranks is None else ranks
        if schedule in ONE_STAGE_PER_RANK:
            return named_schedule(schedule, ranks, microbatches or 2 * ranks)
        if ranks < 1 or pipe.num_stages % ranks:
            fix = "cut the model into a multiple of the ranks."
            raise ScheduleError(f"{pipe.num_stages} stages cannot be shared by {ranks} ranks evenly.", fix=fix)
        return named_schedule(schedule, ranks, microbatches or 2 * ranks, pipe.num_stages // ranks)
    if isinstance(schedule, list | tuple | dict):
        schedule = Schedule.of(schedule)
    return schedule_of(schedule)


def _ranks(stages: int, schedule: str) -> int:
    """How many ranks there are, where the schedule leaves no choice."""
    if schedule in ONE_STAGE_PER_RANK:
        return stages
    if schedule not in V_SHAPED:
        possible = ", ".join(str(ranks) for ranks in range(1, stages + 1) if stages % ranks == 0)
        what = f"{schedule} can run {stages} stages on different numbers of ranks."
        raise OptionError(what, fix=f"say on how many: ranks=, one of {possible}.")
    if stages % 2:
        raise ScheduleError(f"{schedule} has two stages on each rank; the pipe has {stages}.", fix="cut it once more.")
    return stages // 2


def _on_cuda(pipe: HasStages) -> bool:
    first: torch.nn.Parameter | None = next(iter(pipe.get_stage_module(0).parameters()), None)
    return first is not None and first.device.type == "cuda"
