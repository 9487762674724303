"""Small pieces that most cases are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from harness import Run, batch_of


def mlp(where: torch.device, *, bias: bool = True, dropout: float = 0.0, dtype: torch.dtype | None = None) -> nn.Module:
    """6 -> 8 -> 4, enough to have matrices and vectors."""
    layers = [nn.Linear(6, 8, bias=bias), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4, bias=bias)]
    return nn.Sequential(*layers).to(where, dtype)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """The step that everyone writes."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def zero_first(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """The same, whose gradients stay until the next call."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of a case that is about something else."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def plain_run(
    where: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any] = train_step,
    sizes: tuple[int, ...] = (5, 6),
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Run:
    """`step(model, optimizer, x)` on random batches, model and optimizer watched."""
    return Run(
        step=step,
        arguments=lambda i: (model, optimizer, batch_of(where, i, *sizes, dtype=dtype)),
        watch={"model": model, "optimizer": optimizer, **more.pop("watch", {})},
        **more,
    )


def model_run(
    where: torch.device,
    model: nn.Module,
    inputs: Callable[[int], Any],
    loss: Callable[..., torch.Tensor] = lambda out: out.square().mean(),
    **options: Any,
) -> Run:
    """Train any model: `inputs(i)` is the tuple of its arguments, `loss` takes what it returns."""
    optimizer = adamw(model, **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        value = loss(model(*batch))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return Run(step, lambda i: (model, optimizer, inputs(i)), {"model": model, "optimizer": optimizer})


class WithUnusedParts(nn.Module):
    """A used, a frozen and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.used = nn.Linear(8, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(F.relu(self.frozen(x)))


class TiedLanguageModel(nn.Module):
    """Embedding and output share one weight."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.Linear(width, width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.body(self.embed(tokens))))
