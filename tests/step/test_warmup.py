"""`step.warmup(*args)`: the graphs of the first calls are there before anything ran, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws
from harness import differences, frame
from ranks import run_ranks
from wholestep import step as stages

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": torch.optim.NAdam,
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
}


def run_of(make: Optimizers) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = make(model.parameters())

    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, train_step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_warmup_nothing_has_changed_and_no_call_is_traced(name: str) -> None:
    model, optimizer, train_step = run_of(OPTIMIZERS[name])
    step = ws.compile(train_step, lower="eager")
    before = frame("before", None, {"model": model, "optimizer": optimizer})
    step.warmup(torch.ones(3, 4))
    assert not differences(before, frame("after", None, {"model": model, "optimizer": optimizer}))
    assert list(optimizer.state) == []
    found = []
    with mock.patch.object(stages, "trace_step", side_effect=AssertionError("traced")):
        for i in range(3):
            found.append(step(torch.full((3, 4), float(i))))
    other, _, eager = run_of(OPTIMIZERS[name])
    assert all(map(torch.equal, found, [eager(torch.full((3, 4), float(i))) for i in range(3)]))
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    step.warmup(torch.ones(3, 4))
    assert len(step.graphs) == (1 if name == "sgd" else 2)


def test_gradients_that_stay_between_calls_are_part_of_a_warmup() -> None:
    weight = nn.Parameter(torch.ones(3))

    def accumulate(x: Tensor) -> Tensor:
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    step = ws.compile(accumulate, lower="eager")
    step.warmup(torch.ones(3))
    assert weight.grad is None
    with mock.patch.object(stages, "trace_step", side_effect=AssertionError("traced")):
        step(torch.ones(3))
        step(torch.ones(3))
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_a_step_that_cannot_be_captured_is_refused_by_the_warmup_and_nothing_is_left() -> None:
    model, optimizer, train_step = run_of(OPTIMIZERS["adamw"])

    def branches(x: Tensor) -> Tensor:
        loss = train_step(x)
        return loss if loss > 0 else -loss

    with pytest.raises(ws.WholestepError, match="WS-CONTROL-FLOW"):
        ws.compile(branches, lower="eager").warmup(torch.ones(3, 4))
    assert list(optimizer.state) == []
    assert model[0].weight.grad is None


def sharded_warmup(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    _, optimizer, train_step = run_of(OPTIMIZERS["adamw"])
    step = ws.compile(train_step, parallel=ws.FullyShard(mesh), lower="eager")
    step.warmup(torch.ones(4, 4))
    empty = list(optimizer.state) == []
    with mock.patch.object(stages, "trace_step", side_effect=AssertionError("traced")):
        for i in range(3):
            step(torch.full((4, 4), float(i + rank)))
    return empty, len(step.graphs)


def test_ranks_warm_up_together() -> None:
    assert run_ranks(sharded_warmup, 2) == [(True, 2)] * 2
