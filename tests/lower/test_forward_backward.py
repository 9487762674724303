"""A region cut into forward and backward gives the same results: old values, random ops and layouts are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from cases.parts import train_step
from wholestep.lower.report import lowering_of

LONG = pytest.mark.long


class Gain(nn.Module):
    """The backward needs what a buffer held before the forward wrote it; cheap enough to compute again from it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("gain", torch.ones(4, 16))

    def scale(self) -> Tensor:
        return self.gain + 0.5

    def forward(self, x: Tensor) -> Tensor:
        out = ((x @ self.w) * self.scale()).sin()
        self.gain.copy_(self.gain * 1.5)
        return out.exp() * 0.1


class GainSeenThroughAView(Gain):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.ones(16, 4).t()

    def scale(self) -> Tensor:
        return self.gain.t().reshape(4, 16).sin()


class StatisticsInTheForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(x.reshape(4, 1, 4, 4)))
        return out.tanh()


def noisy(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """A draw that needs the backward stands before one that does not."""
    loss = F.dropout(model(x), 0.3).sin().exp().square().mean()
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.add_(torch.randn_like(param.grad), alpha=0.1)
    noise = torch.rand(8).exp() * 2
    optimizer.step()
    optimizer.zero_grad()
    return loss, noise


def out_of_order(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, ...]:
    """Random ops of all kinds, whose results are used in another order."""
    h = model(x)
    a, b = torch.rand(4, 16) < 0.5, torch.empty_like(h).bernoulli_(0.5)
    c, d, e = (torch.empty_like(h) for _ in range(3))
    c.uniform_(), d.normal_(), e.exponential_()
    loss = ((h * e).tanh() * d + (h * c).sin() + (h * b).cos() * a).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, e, d, c, b


def drawn_alike(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Two equal random ops give different numbers."""
    a, b = (model(x + torch.randn_like(x)).tanh() for _ in range(2))
    c, d = (x.sigmoid().bernoulli() + torch.bernoulli(x, 0.5) + torch.randint_like(x, 9) for _ in range(2))
    loss = ((a - b).square() + (a * c + b * d).sin() * 0.1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def noise_on_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Draws that the backward does not need, like tensors that it has."""
    loss = model(x).sin().exp().square().mean()
    loss.backward()
    for param in model.parameters():
        param.grad = param.grad + torch.randn_like(param) * 0.1 + torch.bernoulli(param, 0.5)
    torch.rand_like(x)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(make: Callable[[], nn.Module], step: Callable[..., Any]) -> tuple[list[Tensor], nn.Module]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for i in range(3):
        torch.manual_seed(i)
        results = step(model, optimizer, torch.randn(4, 16))
        seen += [results] if isinstance(results, Tensor) else results
    seen.append(torch.rand(3))  # the generator is where eager leaves it
    return [value.detach() for value in seen], model


@pytest.mark.parametrize(
    ("make", "step"),
    [
        pytest.param(Gain, train_step, id="a_buffer_written_in_the_forward"),
        pytest.param(
            GainSeenThroughAView, train_step, id="a_buffer_written_in_the_forward_and_read_through_a_view", marks=LONG
        ),
        pytest.param(StatisticsInTheForward, train_step, id="other_layouts_and_statistics", marks=LONG),
        pytest.param(lambda: nn.Linear(16, 16), noisy, id="draws_on_both_sides_of_the_cut"),
        pytest.param(lambda: nn.Linear(16, 16), out_of_order, id="draws_used_out_of_order", marks=LONG),
        pytest.param(lambda: nn.Linear(16, 16), drawn_alike, id="draws_that_look_the_same", marks=LONG),
        pytest.param(lambda: nn.Linear(16, 16), noise_on_gradients, id="draws_like_what_the_backward_has", marks=LONG),
    ],
)
def test_a_step_in_two_calls_trains_as_eager(make: Callable[[], nn.Module], step: Callable[..., Any]) -> None:
    expected, model = train(make, step)
    compiled = ws.compile(step, lower="inductor", lower_options=ws.lower.LowerOptions(strict=True))
    actual, ours = train(make, compiled)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want)
    for (name, want), (_, got) in zip(model.state_dict().items(), ours.state_dict().items(), strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
    assert compiled.executable is not None
    assert lowering_of(compiled.executable).regions
