"""`ctc_loss` with lengths that are numbers, or tensors, trains as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws

FRAMES, TARGETS = torch.linspace(-1, 1, 10 * 2 * 6).reshape(10, 2, 6), torch.tensor([[1, 2, 2, 3], [4, 1, 3, 2]])


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, frames: Any, words: Any, settings: dict[str, Any]
) -> Tensor:
    loss = F.ctc_loss(model(FRAMES).log_softmax(-1), TARGETS, frames, words, **settings).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(how: Any, settings: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = [([10, 9], [4, 2]), ((10, 9), (4, 2)), ([10, 10], [3, 4]), ([10, 3], [0, 4])]
    losses = [how(model, optimizer, *each, settings).detach() for each in lengths]
    return losses + [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"blank": 4}], ids=str)
def test_lengths_that_are_numbers_train_to_the_bits_of_eager(settings: dict[str, Any]) -> None:
    settings = {"zero_infinity": True, **settings}
    ours, eager = trained(ws.compile(step, lower="eager"), settings), trained(step, settings)
    assert all(map(torch.equal, ours, eager)), (ours, eager)


def test_the_functions_of_torch_and_of_modules_too() -> None:
    def losses(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        module = nn.CTCLoss()
        return torch.ctc_loss(log_probs, TARGETS, [10, 9], [4, 2], 0, 1), module(log_probs, TARGETS, [10, 9], [4, 2])

    log_probs = FRAMES.log_softmax(-1)
    for ours, eager in zip(ws.compile(losses, lower="eager")(log_probs), losses(log_probs), strict=True):
        assert torch.equal(ours, eager)


def test_lengths_in_tensors_train_to_the_bits_of_eager_in_one_graph() -> None:
    def run(how: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lengths = [([10, 9], [4, 2]), ([10, 10], [3, 4]), ([10, 3], [0, 1])]
        losses = [how(model, optimizer, torch.tensor(f), torch.tensor(w), {}).detach() for f, w in lengths]
        return losses + [p.detach() for p in model.parameters()]

    compiled = ws.compile(step, lower="eager")
    ours, eager = run(compiled), run(step)
    assert all(map(torch.equal, ours, eager)), (ours, eager)
    assert len(compiled.graphs) == 1
