"""Rows about what a trace must not leave behind."""

from __future__ import annotations

import copy
import functools
import io
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from docs.rows.optimizers import own
from docs.rows.page import network, refused, row, run_of, same, train

KEPT: deque[Any] = deque()


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(float(size))


@row("`functools.lru_cache` filled in the step")
def caches() -> None:
    def build() -> nn.Module:
        table.cache_clear()
        return network()

    same(lambda model, optimizer, x: train(model, optimizer, x * table(6)), model=build)
    assert torch.equal(table(6), torch.arange(6.0))


@row("a tensor kept in a cache of a package")
def kept_tensors() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        KEPT.append(x * 2)
        return train(model, optimizer, x)

    refused("WS-SIDE-EFFECT", body)
    assert not KEPT


@row("`copy.deepcopy(tensor)`, `copy.copy(tensor)` in the step")
def copies() -> None:
    def update(self: Any, group: Any, p: Tensor, state: Any) -> None:
        state.setdefault("before", copy.deepcopy(p.data)).lerp_(p.grad, 0.1)
        p.sub_(state["before"], alpha=group["lr"])

    same(train, optimizer=own(update))


@row("`pickle`, `torch.save` of tensors in the step")
def saved() -> None:
    run = run_of(lambda model, optimizer, x: (train(model, optimizer, x), torch.save(x, io.BytesIO())))
    with pytest.raises(ws.errors.WholestepError) as caught:
        ws.compile(run.step)(*run.arguments(0))
    assert caught.value.location is not None


@row("state that is a tensor subclass")
def subclasses() -> None:
    def update(self: Any, group: Any, p: Tensor, state: Any) -> None:
        state["leaf"] = torch.zeros_like(p).requires_grad_()

    run = run_of(train, optimizer=own(update))
    with pytest.raises(ws.errors.WholestepError) as caught:
        ws.compile(run.step)(*run.arguments(0))
    assert caught.value.location is not None


@row("Ctrl-C during a capture")
def interrupted() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        train(model, optimizer, x)
        raise KeyboardInterrupt

    run = run_of(body)
    before = run.watch["model"][0].weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        ws.compile(run.step)(*run.arguments(0))
    assert torch.equal(run.watch["model"][0].weight, before)
