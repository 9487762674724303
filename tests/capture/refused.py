"""A model in training, and what must be so where a step of it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from cases.parts import adamw
from harness import (
    Frame,
    assert_frames_equal,
    batch_of,
    device,
    frame,
    marked_line,
)

Use = Callable[[torch.Tensor], torch.Tensor]


def step_with(use: Use) -> Callable[..., torch.Tensor]:
    """A training step that does something with the activations."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = use(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class Net(nn.Module):
    """Something of everything that a failed call could disturb: weights, a buffer, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.norm(self.first(x))), 0.2))


class World:
    """A model in the middle of training: optimizer state and gradients exist. A fresh one has neither."""

    def __init__(self, *, fresh: bool) -> None:
        torch.manual_seed(11)
        self.model = Net().to(device())
        self.optimizer = adamw(self.model)
        self.calls = 0
        if not fresh:
            self.train()

    def train(self) -> None:
        """Two steps in eager; the gradients stay."""
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(self.batch()).square().mean().backward()
            self.optimizer.step()
            self.calls += 1

    def batch(self) -> torch.Tensor:
        return batch_of(device(), self.calls, 5, 6)

    def look(self) -> Frame:
        return frame(f"look after {self.calls} calls", None, {"model": self.model, "optimizer": self.optimizer})


def assert_unchanged_and_trainable(world: World, before: Frame, *, fresh: bool) -> None:
    """A call that failed left no trace, and eager goes on as if it had never been made."""
    assert_frames_equal([before], [world.look()])
    world.train()
    twin = World(fresh=fresh)
    twin.train()
    assert_frames_equal([twin.look()], [world.look()])


def assert_refused(step: Callable[..., Any], *kinds: type[ws.errors.CaptureError], fresh: bool = False) -> str:
    """`step(model, optimizer, x)` is refused with one of these errors. Returns what the error says."""
    world = World(fresh=fresh)
    before = world.look()
    with pytest.raises(kinds) as caught:
        ws.compile(step)(world.model, world.optimizer, world.batch())
    assert_unchanged_and_trainable(world, before, fresh=fresh)
    said = str(caught.value)
    assert f"[{caught.value.code}]" in said
    assert caught.value.fix
    assert caught.value.fix in said
    assert f"python -m wholestep explain {caught.value.code}" in said
    return said


def assert_points_at(said: str, function: Callable[..., Any]) -> None:
    assert f"{Path(function.__code__.co_filename).name}:{marked_line(function)}" in said, said
