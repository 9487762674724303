"""A rank of a pipeline that raises or is killed ends the others within seconds, with a message that names it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from pipelining.manual_pipes import HandMade
from ranks import RanksFailed, run_ranks
from wholestep.errors import PeerFailedError
from wholestep.pipelining import build_stage, schedule


class Failing(nn.Module):
    """A layer that fails in its third call, or in the backward of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.how = how
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x)
        if self.calls == 3:
            if self.how == "forward":
                raise ArithmeticError("no third microbatch")
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "backward":
                y.register_hook(_refuse)
        return y


def _refuse(gradient: torch.Tensor) -> None:
    raise ArithmeticError("no gradient")


def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean()


def failing_loss(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("no loss")


def run(rank: int, how: str, kind: str, where: int) -> str:
    """The error of this rank, and that its gradients are as before."""
    modules = [Failing(how if place == where else "") for place in range(3)]
    stage = build_stage(HandMade(modules), rank, "cpu")
    stage.submod.linear.weight.grad = torch.ones(2, 2)
    loss_fn = failing_loss if how == "loss" else loss_of
    steps: Any = ScheduleGPipe(stage, 4, loss_fn) if kind == "torch" else schedule(kind, stage, 4, loss_fn)
    try:
        steps.step(*((torch.randn(8, 2),) if rank == 0 else ()), target=torch.randn(8, 2) if rank == 2 else None)
    except Exception as error:
        if kind != "torch":
            assert torch.equal(stage.submod.linear.weight.grad, torch.ones(2, 2))
        return f"{type(error).__name__}: {error}"
    return "returned"


@pytest.mark.parametrize(
    ("how", "kind", "where"), [("forward", "GPipe", 1), ("backward", "1F1B", 2), ("loss", "1F1B", 2)]
)
def test_a_rank_that_raises_is_named_by_the_others(how, kind, where):
    errors = run_ranks(run, 3, how, kind, where, deadline=40)
    assert errors[where].startswith("ArithmeticError: no ")
    for rank, error in enumerate(errors):
        if rank != where:
            assert error.startswith("PeerFailedError: [WS-PEER-FAILED]")
            assert f"Rank {where} raised" in error
            assert "pipeline" in error


def test_a_rank_that_is_killed_is_named_by_the_others():
    with pytest.raises(RanksFailed) as raised:
        run_ranks(run, 3, "killed", "1F1B", 1, deadline=40)
    assert list(raised.value.failures) == [1]
    assert "SIGKILL" in raised.value.failures[1]
    for error in raised.value.results.values():
        assert error.startswith("PeerFailedError: [WS-PEER-FAILED] Rank 1 died")


def test_with_a_schedule_of_torch_the_other_ranks_end_too():
    errors = run_ranks(run, 3, "forward", "torch", 1, deadline=40)
    assert errors[1] == "ArithmeticError: no third microbatch"
    assert all(error != "returned" for error in errors)


def after_a_failure(rank: int) -> str:
    stage = build_stage(HandMade([Failing("forward" if place == 1 else "") for place in range(2)]), rank, "cpu")
    steps = ScheduleGPipe(stage, 4, loss_of)
    for _ in range(40):
        try:
            steps.step(*((torch.randn(8, 2),) if rank == 0 else ()), target=torch.randn(8, 2) if rank == 1 else None)
        except PeerFailedError as error:
            return str(error)
        except (ArithmeticError, RuntimeError):
            time.sleep(0.1)
    return ""


def test_a_rank_that_continues_after_a_failure_raises_in_its_next_step():
    assert "Rank 1 raised" in run_ranks(after_a_failure, 2, deadline=40)[0]
