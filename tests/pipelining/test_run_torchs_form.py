"""Stages built in torch's form with the user's own module, and torch's public names."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.pipelining as torchs
from torch import nn

import wholestep.pipelining as ours
from ranks import run_ranks
from wholestep.errors import StageError


class Tied(nn.Module):
    """One layer that both stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, shift):
        x = torch.tanh(self.linear(x)) + 1
        ours.pipe_split()
        x.add_(shift)
        return self.linear(x)


class Wrapped(nn.Module):
    """A wrapper that renames parameters, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean()


def run(rank: int, wrapped: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x, shift, target = Tied(), torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)
    eager = copy.deepcopy(model)
    loss_of(eager(x, shift=shift), target).backward()
    pipe = ours.pipeline(model, (x[:2],), {"shift": shift[:2]})
    module = pipe.get_stage_module(rank)
    stage = ours.build_stage(Wrapped(module) if wrapped else module, rank, pipe.info(), torch.device("cpu"))
    steps = ours.ScheduleGPipe(stage, 4, loss_of)
    if rank == 0:
        steps.step(x, shift=shift)
    else:
        steps.step(target=target)
    torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad)
    return [module.linear.weight.grad]


@pytest.mark.parametrize("wrapped", [False, True])
def test_torchs_form_of_build_stage_trains_and_sums_tied_gradients(wrapped):
    (first,), (second,) = run_ranks(run, 2, wrapped)
    assert torch.equal(first, second)


def test_a_pipe_info_without_its_pipe_is_refused():
    info = ours.PipeInfo(torch.fx.Graph(), 2, False)
    with pytest.raises(StageError, match=r"pass pipe\.info"):
        ours.build_stage(nn.Linear(2, 2), 0, info, torch.device("cpu"))


def test_the_public_names_of_torch_are_exported():
    assert set(torchs.__all__) <= set(ours.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)
