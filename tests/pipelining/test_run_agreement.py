"""Agreement of ranks before a step: rows, schedules, missing ranks; and which rank is named."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelining.manual_pipes import HandMade
from ranks import RanksFailed, run_ranks
from wholestep.errors import DesyncError, PipelineCallError, PipelineInputError, StageError
from wholestep.pipelining import TensorChunkSpec, build_stage, pipe_split, pipeline, schedule
from wholestep.ranks.channel import Channel


class Masked(nn.Module):
    """Two layers and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, mask=None):
        x = self.first(x)
        if mask is not None:
            x = x * mask
        pipe_split()
        return self.second(x)


def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean()


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def on_one_rank(rank: int, rows: int, mask_rows: int, target_rows: int | None, **options: Any) -> Any:
    mask = None if not mask_rows else torch.ones(mask_rows, 1)
    pipe = pipeline(Masked(), (torch.randn(2, 2),), {} if mask is None else {"mask": torch.ones(2, 1)})
    stages = [pipe.build_stage(i, "cpu") for i in range(2)]
    steps = schedule("Interleaved1F1B", stages, 4, loss_of, **options)
    args = (torch.randn(rows, 2),) if rows else ()
    kwargs = {} if mask is None else {"mask": mask}
    return error_of(lambda: steps.step(*args, **kwargs, target=torch.randn(target_rows, 2) if target_rows else None))


def test_mismatched_rows_are_refused_before_anything_runs():
    assert run_ranks(on_one_rank, 1, 8, 8, 8) == ["returned"]
    assert "the target has 4 rows for 8 rows of input" in run_ranks(on_one_rank, 1, 8, 0, 4)[0]
    assert "mask= has 4 rows and argument 0 has 8" in run_ranks(on_one_rank, 1, 8, 4, 8)[0]


def test_missing_inputs_and_targets_are_named():
    (error,) = run_ranks(on_one_rank, 1, 0, 0, 8)
    assert error.startswith(PipelineCallError.__name__)
    assert "missing a required argument: 'x'" in error
    (error,) = run_ranks(on_one_rank, 1, 8, 0, None)
    assert error.startswith(StageError.__name__)
    assert "loss_fn got no target" in error


def with_spec(rank: int) -> Any:
    pipe = pipeline(Masked(), (torch.randn(2, 2), torch.ones(1, 1)))
    steps = schedule(
        "Interleaved1F1B",
        [pipe.build_stage(i, "cpu") for i in range(2)],
        4,
        loss_of,
        args_chunk_spec=(TensorChunkSpec(0), TensorChunkSpec(0)),
    )
    return error_of(lambda: steps.step(torch.randn(8, 2), torch.ones(4, 1), target=torch.randn(8, 2)))


def test_rows_with_a_chunk_spec_are_not_compared():
    assert run_ranks(with_spec, 1) == ["returned"]


def two_ranks(rank: int, what: str) -> list[str]:
    """The errors of steps in which rank 1 does something else."""
    group = dist.new_group(timeout=timedelta(seconds=3)) if what == "second" else None
    pipe = HandMade([nn.Linear(2, 2), nn.Linear(2, 2)])
    stage = build_stage(pipe, rank, "cpu", group)
    microbatches = 2 if what == "microbatches" and rank == 1 else 4
    kind = "1F1B" if what == "kind" and rank == 1 else "GPipe"
    deadline = 1.0 if what == "never" else 60.0  # longer than that of the ranks: what is found is found before
    steps = schedule(kind, stage, microbatches, loss_of, deadline=deadline)
    x, rows = torch.randn(8, 2), 4 if what == "target" else 8

    def step() -> None:
        steps.step(*((x,) if rank == 0 else ()), target=torch.randn(rows, 2) if rank == 1 else None)

    found: list[str] = []
    if what == "second":
        found.append(error_of(step))
    if rank == 0 or what not in ("never", "second"):
        found.append(error_of(step))
    return found


def test_ranks_with_different_schedules_are_named():
    for error in run_ranks(two_ranks, 2, "microbatches", deadline=40):
        assert error[0].startswith(DesyncError.__name__)
        assert "disagree on the schedule" in error[0]
        assert "rank 0  4 microbatches" in error[0]
        assert "rank 1  2 microbatches" in error[0]
    for error in run_ranks(two_ranks, 2, "kind", deadline=40):
        assert "rank 1  Schedule1F1B" in error[0]


def test_a_rank_that_never_steps_is_named():
    (error,), _ = run_ranks(two_ranks, 2, "never", deadline=40)
    assert error.startswith(DesyncError.__name__)
    assert "rank 1 did not reach call 1 of pipeline" in error


def test_a_rank_that_returns_while_another_steps_is_named():
    (first, second), _ = run_ranks(two_ranks, 2, "second", deadline=40)
    assert first == "returned"
    assert second.startswith(DesyncError.__name__)
    assert "rank 1 is outside of any step (last: call 1 of pipeline)" in second


def test_a_target_on_another_rank_with_fewer_rows_is_refused():
    (first,), (second,) = run_ranks(two_ranks, 2, "target", deadline=40)
    assert "the target has 1 rows for 2 rows of input" in second
    assert "Rank 1 raised" in first


def dies_before_it_steps(rank: int) -> str:
    stage = build_stage(HandMade([nn.Linear(2, 2), nn.Linear(2, 2)]), rank, "cpu")
    dist.barrier()
    channel = Channel.current()
    assert channel is not None
    if rank == 1:
        time.sleep(1.5)  # it has written a heartbeat
        os._exit(3)
    channel.deadline = 2.0
    return error_of(lambda: schedule("GPipe", stage, 4, loss_of).step(torch.randn(8, 2)))


def test_a_rank_that_dies_before_it_steps_is_named_before_the_deadline():
    with pytest.raises(RanksFailed) as raised:
        run_ranks(dies_before_it_steps, 2, deadline=40)
    assert list(raised.value.failures) == [1]
    assert "Rank 1 died or hangs" in raised.value.results[0]


def wrong_inputs(rank: int) -> str:
    pipe = pipeline(Masked(), (torch.randn(2, 2),))
    steps = schedule("GPipe", pipe.build_stage(rank, "cpu"), 4, loss_of)
    errors = [error_of(lambda: steps.step(target=torch.randn(8, 2) if rank else None))]
    x = torch.randn(8, 2)
    errors.append(error_of(lambda: steps.step(*(() if rank else (x,)), target=torch.randn(8, 2) if rank else None)))
    return "\n".join(errors)


def test_the_ranks_can_continue_after_an_invalid_first_call():
    first, second = run_ranks(wrong_inputs, 2, deadline=40)
    assert "missing a required argument" in first
    assert "Rank 0 raised" in second
    assert first.endswith("returned")
    assert second.endswith("returned")


@pytest.mark.parametrize("given", [{}, {"y": torch.ones(2)}])
def test_an_invalid_call_of_a_pipe_names_the_arguments(given):
    pipe = pipeline(Masked(), (torch.randn(2, 2),))
    with pytest.raises(PipelineInputError, match=r"do not match the signature.*\n.*pass x, as"):
        pipe(**given)
