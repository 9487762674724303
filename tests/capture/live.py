"""A run with something of everything that a user may change between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cases.parts import adamw, plain_run
from harness import Run, Story

FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


class Net(nn.Module):
    """Dropout, a buffer, and a plain float that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 4)
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x))))) / self.temperature


def net_run(where: torch.device, **options: Any) -> Run:
    model = Net().to(where)
    return plain_run(where, model, adamw(model, **options))


def parts(story: Story) -> tuple[Any, Any]:
    return story.run.watch["model"], story.run.watch["optimizer"]
