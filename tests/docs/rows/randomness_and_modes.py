"""Rows of "Random numbers, precision, recomputation" and of the modes of the process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import wholestep as ws
from docs.rows.page import network, refused, row, run_of, same, same_function, train
from harness import batch_of, device


@row("dropout and all random operators of torch")
def random_operators() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        noise = torch.zeros(5, 6)
        noise[1:3].normal_(0, 0.1)
        noise[::2].uniform_()
        return train(
            model, optimizer, F.dropout(x + torch.randn_like(x), 0.3) + torch.bernoulli(noise.abs().clamp(0, 1))
        )

    same(body)


@row("a `torch.Generator` in an argument, attribute or variable")
def generators() -> None:
    def build() -> nn.Module:
        model = network()
        model.generator = torch.Generator().manual_seed(9)
        return model

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x + torch.randn(6, generator=model.generator))

    same(body, model=build)


@row("`torch.manual_seed(3)`, `get_rng_state`")
def states_of_generators() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        first = torch.randn(6)
        state = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            second = torch.randn(6)
        torch.set_rng_state(state)
        return train(model, optimizer, x + first + second + torch.randn(6))

    same(body)


@row("Python's `random`, `numpy.random`")
def other_generators() -> None:
    numbers = np.random.default_rng(3)
    generator = torch.Generator()
    bodies = [
        lambda model, optimizer, x: train(model, optimizer, x * random.random()),
        lambda model, optimizer, x: train(model, optimizer, x * np.random.rand()),
        lambda model, optimizer, x: train(model, optimizer, x * numbers.random()),
        lambda model, optimizer, x: train(model, optimizer, x + torch.randn(6, generator=generator.manual_seed(3))),
        lambda model, optimizer, x: train(model, optimizer, x + torch.seed() * 0),
        lambda model, optimizer, x: train(model, optimizer, x + torch.randn(6, generator=torch.Generator())),
    ]
    for body in bodies:
        refused("WS-RNG", body)


@row("`torch.autocast` in the step or around the call")
def autocast() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return train(model, optimizer, x)

    same(body)
    run = run_of(train)
    step = ws.compile(run.step)
    step(*run.arguments(0))
    step(*run.arguments(1))
    with torch.autocast("cpu", torch.bfloat16):
        step(*run.arguments(2))
    assert "autocast" in str(step.recompiles[-1])


def scaled(*, updates: bool = True, reads: bool = False) -> Any:
    scalers: dict[int, Any] = {}

    def build(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scalers[id(optimizer)] = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        return optimizer

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        scaler = scalers[id(optimizer)]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if updates:
            scaler.update()
        return (loss, scaler.get_scale()) if reads else loss

    return body, build


@row("`GradScaler`: `scale`, `unscale_`, `step`, `update`")
def scalers() -> None:
    body, build = scaled()
    same(
        body, optimizer=build, graphs=3, batch=lambda i: batch_of(device(), i, 5, 6) * (1e30 if i == 2 else 1), steps=5
    )


@row("`scaler.get_scale()` after `update()`")
def scale_after_update() -> None:
    body, build = scaled(reads=True)
    same(body, optimizer=build, graphs=3)


@row("`scaler.step()` without `update()`")
def scaler_without_update() -> None:
    body, build = scaled(updates=False)
    refused("WS-SIDE-EFFECT", body, optimizer=build)


@row("`torch.utils.checkpoint`, both forms")
def checkpointing() -> None:
    for reentrant in (False, True):

        def body(model: Any, optimizer: Optimizer, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            optimizer.zero_grad()
            inside = lambda x: F.dropout(model[1](model[0](x)), 0.3)  # noqa: E731
            hidden = checkpoint(inside, x.requires_grad_(), use_reentrant=reentrant)
            loss = model[2](hidden).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        same(lambda model, optimizer, x, body=body: body(model, optimizer, x.clone()))


@row("bfloat16, float16, float64 and complex parameters")
def precisions() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        same(
            train,
            model=lambda dtype=dtype: network().to(dtype),
            batch=lambda i, dtype=dtype: batch_of(device(), i, 5, 6, dtype=dtype),
        )

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model.weight * x.sum()).abs().sum()
        loss.backward()
        optimizer.step()
        return loss

    def build() -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        return model

    same(body, model=build)


@row("grad mode, inference mode, autocast, default dtype")
def modes_between_calls() -> None:
    run = run_of(train)
    step = ws.compile(run.step)
    for i in range(3):
        step(*run.arguments(i))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        step(*run.arguments(3))
    finally:
        torch.set_float32_matmul_precision(before)
    step(*run.arguments(4))
    assert len(step.graphs) == 3


@row("the number of threads")
def threads() -> None:
    run = run_of(train)
    step = ws.compile(run.step)
    step(*run.arguments(0))
    step(*run.arguments(1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        step(*run.arguments(2))
    finally:
        torch.set_num_threads(before)
    assert len(step.graphs) == 2


@row("`detect_anomaly`, a dispatch or function mode")
def modes_around_a_call() -> None:
    run = run_of(train)
    step = ws.compile(run.step)
    step(*run.arguments(0))
    with pytest.warns(ws.EagerWarning), FlopCounterMode(display=False) as counter:
        step(*run.arguments(1))
    assert counter.get_total_flops() > 0
    with pytest.raises(ws.errors.UnsupportedError), FlopCounterMode(display=False):
        ws.capture(run.step, *run.arguments(2))


@row("`sdpa_kernel`, `no_grad`, autocast, `saved_tensors_hooks` in the step")
def modes_in_the_step() -> None:
    def step(x: Tensor) -> Tensor:
        weight = torch.ones(4, 4, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH), torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            y = F.scaled_dot_product_attention(x[None], x[None], (x @ weight)[None])
        (slope,) = torch.autograd.grad(y.sum(), weight)
        with torch.no_grad():
            return y.detach() + slope

    same_function(step)


@row("a setting that kernels read")
def settings_in_the_step() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            return train(model, optimizer, x)
        finally:
            torch.use_deterministic_algorithms(False)

    def anomaly(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return train(model, optimizer, x)

    refused("WS-UNSUPPORTED", body)
    refused("WS-UNSUPPORTED", anomaly)


@row("a setting that the step leaves changed")
def settings_left_changed() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        torch.set_grad_enabled(False)
        return loss

    try:
        refused("WS-SIDE-EFFECT", body)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
