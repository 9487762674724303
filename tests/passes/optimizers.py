"""Steps with an optimizer in the graph, captured from torch's own optimizers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

import wholestep as ws
from wholestep.ir import StepGraph
from wholestep.ir.graph_walks import copy_graph

ADAMS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "maximize": True}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
]
SGDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
]
OPTIMIZERS = [(name, {**options, how: True}) for how in ("fused", "foreach") for name, options in ADAMS + SGDS]


def name_of(value: Any) -> str:
    """For the ids of parametrized tests."""
    return "-".join(map(str, value)) if isinstance(value, dict) else str(value)


def training_step(
    optimizer: str,
    options: dict[str, Any],
    *,
    layers: int = 3,
    first: bool = False,
    clip: bool = False,
    scaled: bool = False,
    average: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments; unless it is to be the `first`, the optimizer has state."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    averaged = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    updates = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu") if scaled else None

    def step(
        model: nn.Module, updates: torch.optim.Optimizer, x: Tensor, averaged: nn.Module, scaler: Any = None
    ) -> Tensor:
        loss = model(x).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        if scaler:
            scaler.step(updates)
            scaler.update()
        else:
            updates.step()
        if average:
            with torch.no_grad():
                torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 0.1)
        updates.zero_grad()
        return loss

    args = (model, updates, torch.randn(4, 3), averaged, scaler)
    if not first:
        step(*args)
    return step, args


def optimizer_step(optimizer: str, options: dict[str, Any], **more: Any) -> StepGraph:
    """The graph of such a step. It is captured once; everybody gets a copy."""
    captured = _captured(optimizer, tuple(options.items()), tuple(more.items()))
    gm = fx.GraphModule(captured.gm, copy_graph(captured.gm.graph))
    return StepGraph(gm, captured.signature)


@cache
def _captured(optimizer: str, options: tuple[Any, ...], more: tuple[Any, ...]) -> StepGraph:
    step, args = training_step(optimizer, dict(options), **dict(more))
    return ws.capture(step, *args)
