"""Programs for the rows about what a step keeps, copies and writes, and about Ctrl-C."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import signal
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from capture.halves import Halves, assert_same, batch, world
from capture.odd_places import at_address
from docs.rows.page import network, refused, row, same

PACKAGE = types.ModuleType("package_with_a_cache")
sys.modules["package_with_a_cache"] = PACKAGE


@functools.lru_cache
def mask(n: int) -> Tensor:
    return torch.tril(torch.ones(n, n))


def train(loss: Tensor, optimizer: Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@row("`functools.lru_cache` filled in the step")
def cached() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        mask.cache_clear()
        out = model(x)
        return train((out @ mask(out.shape[-1])).square().mean(), optimizer)

    same(step)


@row("a tensor kept in a cache of a package")
def kept() -> None:
    PACKAGE.cache = {}  # type: ignore[attr-defined]
    place = id(PACKAGE)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        at_address(place).cache["x"] = x * 2
        return train(model(x).square().mean(), optimizer)

    refused("WS-SIDE-EFFECT", step)
    assert PACKAGE.cache == {}  # type: ignore[attr-defined]


@row("`copy.deepcopy(tensor)`")
def copied() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train((model(copy.deepcopy(x)) + copy.copy(x).sum()).square().mean(), optimizer)

    same(step)


@row("`pickle`, `torch.save`")
def written() -> None:
    def pickles(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        pickle.dumps(x)
        return model(x)

    def saves(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        torch.save(x, io.BytesIO())
        return model(x)

    refused("WS-ITEM", pickles)
    refused("WS-SIDE-EFFECT", saves)


@row("optimizer state in tensors that are made of other tensors")
def wrapped_state() -> None:
    eager, compiled = world(), world()
    step = ws.compile(compiled[2], lower="eager")
    for i in range(3):
        assert torch.equal(eager[2](batch(i)), step(batch(i)))
    assert_same(eager, compiled)


@row("frozen weights and buffers in such tensors")
def frozen_weight() -> None:
    def model() -> nn.Module:
        net = network()
        net.register_buffer("scales", Halves(torch.ones(4, dtype=torch.bfloat16), torch.tensor(0.5), True))
        return net

    step = ws.compile(lambda net, x: (net(x) * net.scales.lerp(torch.zeros(4), 0.0)).sum(), lower="eager")
    eager, x = model(), torch.ones(2, 6)
    with torch.no_grad():
        assert torch.equal(step(model(), x), (eager(x) * 0.5).sum())


@row("state that is another tensor subclass")
def leaf_state() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model(x).square().mean(), optimizer)
        for p in model.parameters():
            optimizer.state[p]["extra"] = torch.zeros(2, requires_grad=True)
        return loss

    refused("WS-SIDE-EFFECT", step)


@row("Ctrl-C during a capture")
def interrupted() -> None:
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start us with Ctrl-C ignored
    before = vars(nn.Module)["__call__"]

    def step(model: Any, x: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return model(x)

    try:
        with pytest.raises(KeyboardInterrupt):
            ws.compile(step)(nn.Linear(3, 3), torch.ones(2, 3))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert vars(nn.Module)["__call__"] is before
    finally:
        signal.signal(signal.SIGINT, found)
