"""Private names of torch that running stages needs. Tried on 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank that a schedule runs."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def has_merge_spec(schedule: Any) -> bool:
    """Whether the user said how results of microbatches become one."""
    return schedule._output_merge_spec is not None


def chunk_specs(schedule: Any) -> tuple[Any, Any]:
    """How the user said that positional and keyword arguments become microbatches."""
    return schedule._args_chunk_spec, schedule._kwargs_chunk_spec


def reduced_stages(schedule: Any) -> set[int] | None:
    """The stages of this rank whose gradients the list of actions reduces; None if there is no list or no backward."""
    actions = getattr(schedule, "pipeline_order_with_comms", None)
    if not actions or not schedule._has_backward:
        return None
    return {action.stage_index for action in actions[schedule.rank] if action.computation_type.name == "REDUCE_GRAD"}


def let_graph_go(loss: torch.Tensor | None) -> None:
    """After the first half of a backward: the schedule keeps each loss until the step ends, and its graph with it.

    A full backward frees what the graph keeps; halves cannot, as both use it. The second half has what it needs. A loss
    that is a view, which torch cannot detach, keeps its graph.
    """
    if loss is not None and loss.grad_fn is not None and not loss._is_view():
        loss.detach_()
