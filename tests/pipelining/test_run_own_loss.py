"""A model that returns its loss, on ranks: the schedule uses the loss that `pipeline` was given."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ranks import run_ranks
from wholestep.pipelining import Pipe, pipe_split, pipeline, schedule


class Training(nn.Module):
    """Losses in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        size = hidden.square().mean()
        pipe_split()
        result = self.second(hidden.relu())
        return {"total": nn.functional.mse_loss(result, y) + 0.1 * size, "size": size, "result": result}


def train(rank: int, pipe: Pipe, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    for kind in ("GPipe", "InterleavedZeroBubble"):
        stage = pipe.build_stage(rank, "cpu")
        stage.submod.zero_grad()
        model.zero_grad()
        losses: list[torch.Tensor] = []
        schedule(kind, [stage], 4).step(*((x, y) if rank == 0 else ()), losses=losses)
        expected = []
        for part in zip(x.chunk(4), y.chunk(4), strict=True):
            expected.append(model(*part)["total"])
            (expected[-1] / 4).backward()
        if rank == 1:
            torch.testing.assert_close([loss.detach() for loss in losses], [loss.detach() for loss in expected])
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_a_schedule_without_loss_fn_uses_the_loss_of_the_pipe():
    torch.manual_seed(0)
    model, x, y = Training(), torch.randn(8, 6), torch.randn(8, 6)
    pipe = pipeline(model, (x[:2], y[:2]), loss="total")
    run_ranks(train, 2, pipe, copy.deepcopy(model), x, y)
