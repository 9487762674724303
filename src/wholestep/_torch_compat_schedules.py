"""Private names of `torch.distributed.pipelining` that tell what a schedule does, without any rank.

Tried on 2.11 and 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

Actions = dict[int, list[Any]]
"""Per rank a list of torch's `_Action`, or None for a step of waiting."""


class _StandIn:
    """What a schedule reads of a stage when it is made: its place among the others, and no module."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0
        self.submod = None
        self.is_first = index == 0
        self.is_last = index == stages - 1


def _stand_ins(ranks: int, stages_per_rank: int) -> list[Any]:
    return [_StandIn(index * ranks, ranks * stages_per_rank, ranks) for index in range(stages_per_rank)]


def schedule_class(name: str) -> type[Any]:
    """torch's class of a name (`get_schedule_class`); raises ValueError for an unknown one."""
    found: type[Any] = torch_schedules.get_schedule_class(name)
    return found


def is_single(schedule: Any) -> bool:
    """Whether a schedule, or a class of them, has one stage per rank: a loop and not a list of actions."""
    cls = schedule if isinstance(schedule, type) else type(schedule)
    return issubclass(cls, PipelineScheduleSingle)


def class_of_loop(schedule: Any) -> type[Any]:
    """The class whose loop a schedule with one stage per rank runs (`_step_microbatches`); ours call torch's."""
    having = (cls for cls in type(schedule).__mro__ if "_step_microbatches" in vars(cls))
    return next(cls for cls in having if not cls.__module__.startswith("wholestep."))


def listed_actions(cls: type[Any], ranks: int, microbatches: int, stages_per_rank: int) -> Actions:
    """The lists of a schedule with several stages per rank, computation alone (`pipeline_order`).

    A subclass leaves out what `_prepare_schedule_with_comms` does, which takes time quadratic in microbatches.
    """
    quick = type(cls.__name__, (cls,), {"_prepare_schedule_with_comms": lambda self, actions, format="": None})
    lists: Actions = quick(_stand_ins(ranks, stages_per_rank), microbatches).pipeline_order
    return lists


def with_torchs_communication(lists: Actions, stages: int, microbatches: int, sharded: bool) -> Actions:
    """What torch's runtime makes of lists of computation (the steps of `_prepare_schedule_with_comms`).

    UNSHARD and RESHARD stay only where asked for; they are added in any case, since torch always runs the lists that
    have them and they decide where a receive stands. Raises AssertionError where torch finds the lists wrong.
    """
    rank_of = torch_schedules._validate_schedule(lists, len(lists), stages, microbatches)
    add_shards: Any = torch_schedules._add_unshard_reshard
    add_sums: Any = torch_schedules._add_reduce_grad
    add_travel: Any = torch_schedules._add_send_recv
    per_rank = max(Counter(rank_of.values()).values())
    # At most 3 stages are prefetched; asking for no more than there are gives the same, without a quadratic search.
    listed = {rank: add_shards(row, min(3, per_rank)) for rank, row in lists.items()}
    summed = {rank: add_sums(row, microbatches) for rank, row in listed.items()}
    lowered: Actions = add_travel(summed, stage_to_rank=rank_of.__getitem__, num_stages=stages)
    if sharded:
        return lowered
    left_out = (torch_schedules.UNSHARD, torch_schedules.RESHARD)
    return {rank: [a for a in row if a.computation_type not in left_out] for rank, row in lowered.items()}


def torchs_action(text: str) -> Any:
    """(`_Action.from_str`)"""
    read: Any = torch_schedules._Action.from_str
    return read(text)


def microbatches_of(schedule: Any) -> int:
    """(`_n_microbatches`)"""
    return int(schedule._n_microbatches)


def stages_and_ranks(schedule: Any) -> tuple[int, int]:
    """How many stages there are in all, and how many ranks (`_num_stages`, `_stage`)."""
    if is_single(schedule):
        return int(schedule._num_stages), int(schedule._stage.group_size)
    return int(schedule._num_stages), int(schedule.pp_group_size)


def actions_that_run(schedule: PipelineScheduleMulti) -> Mapping[int, Sequence[Any]]:
    """The lists of a schedule object as it will run them; computation alone where it has nothing else."""
    return getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order


def has_loss(schedule: Any) -> bool:
    """Whether `step` runs the backward (`_has_backward`)."""
    return bool(schedule._has_backward)
