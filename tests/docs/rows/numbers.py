"""Rows of "Python around the tensors" on what changes from call to call: numbers, states, learning rates."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from docs.rows.page import refused, row, same, same_function, train
from harness import device


class Config(dict[str, Any]):
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@row("a number in a list, deque or dict")
def numbers_in_containers() -> None:
    cfg: Any = Config(loss={"w": 1.0}, scale=1.0)
    weights = [1.0, 2]

    def step(x: Tensor) -> Tensor:
        return x * cfg.loss["w"] * cfg.scale + sum(weights)

    def batch(i: int) -> Tensor:
        cfg["loss"]["w"], cfg.scale, weights[1] = 0.5**i, 0.3 * i, i
        return torch.ones(3)

    same_function(step, batch, steps=6, graphs=2)
    pair = types.SimpleNamespace(weights=(1.0, 0.0))

    def weighted(x: Tensor) -> Tensor:
        first, second = pair.weights
        return x * first + x.square() * second

    def replaced(i: int) -> Tensor:
        pair.weights = (0.9**i, 1 - 0.9**i)
        return torch.ones(3)

    same_function(weighted, replaced, steps=5, graphs=2)


@row("an element of a list or tuple of numbers")
def tables() -> None:
    betas, cfg = np.linspace(0.1, 0.9, 50), types.SimpleNamespace(schedule=[0.9**k for k in range(9)])
    cfg.single = np.ones(9, np.float32)
    at = {"it": 0}

    def step(x: Tensor) -> Tensor:
        return x * betas[at["it"] + 7] * (1 - cfg.schedule[at["it"] // 2])

    def others(x: Tensor) -> Tensor:
        return x * float(cfg.single[at["it"]]) * {k: 0.5**k for k in range(9)}[at["it"]]

    def batch(i: int) -> Tensor:
        at["it"] = i
        return torch.ones(3)

    same_function(step, batch, steps=6, graphs=2)
    same_function(others, batch, graphs=None)


@row("a size computed from a float that changes")
def derived_sizes() -> None:
    cfg = types.SimpleNamespace(fraction=0.9)

    def step(x: Tensor) -> Tensor:
        return x.topk(int(cfg.fraction * x.numel())).values * float(cfg.fraction)

    def batch(i: int) -> Tensor:
        cfg.fraction = 0.9 - 0.02 * i
        return torch.arange(10.0)

    same_function(step, batch, steps=9, graphs=4)


@row("several optimizers with their schedulers")
def several_schedulers() -> None:
    held: dict[int, tuple[list[Optimizer], list[Any]]] = {}

    def build(model: nn.Module) -> Optimizer:
        optimizers = [
            torch.optim.SGD(layer.parameters(), lr=0.1)
            for layer in model.children()
            if any(True for _ in layer.parameters())
        ]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
        held[id(optimizers[0])] = optimizers, schedulers
        return optimizers[0]

    def body(model: nn.Module, first: Optimizer, x: Tensor) -> Any:
        optimizers, schedulers = held[id(first)]
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            loss = train(model, optimizer, x)
            scheduler.step()
        return loss, [scheduler.get_last_lr() for scheduler in schedulers]

    same(body, optimizer=build, steps=6)


@row("the same set to a tuple, list or dict of tensors")
def recurrent_state() -> None:
    def build() -> nn.Module:
        model: Any = nn.Sequential(nn.LSTM(6, 8), nn.Linear(8, 4))
        model.hidden = None
        return model

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        out, hidden = model[0](x[None], model.hidden)
        loss = model[1](out).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.hidden = tuple(h.detach() for h in hidden)
        return loss

    same(body, model=build)

    def own(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        model.hidden = (x, loss.detach())
        return loss

    refused("WS-SIDE-EFFECT", own)


@row("the probability of dropout")
def annealed_dropout() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean() + torch.alpha_dropout(x, model.alpha, True).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def build() -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        model.alpha = 0.2
        return model

    def anneal(i: int, model: Any, optimizer: Optimizer) -> None:
        model[1].p *= 0.9
        model.alpha = 0.2 if i < 4 else 0.1

    same(body, model=build, between=anneal, steps=6, graphs=4 if device().type == "cpu" else None)
