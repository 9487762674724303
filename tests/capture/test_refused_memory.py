"""Memory that a graph would not follow is refused: unreachable, shared, overlapping or replaced."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from capture.refused import Net, World, assert_points_at, assert_refused, assert_unchanged_and_trainable
from cases.parts import adamw, mlp, plain_run
from harness import (
    Case,
    Run,
    assert_parity_or_refusal,
    batch_of,
    device,
)


def test_a_tensor_that_no_later_call_could_find_again_is_refused() -> None:
    world = World(fresh=False)
    box = ctypes.py_object(batch_of(device(), 0, 5, 6))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        x = box.value
        return model(x).square().mean()  # <- here

    before = world.look()
    with pytest.raises(ws.errors.CapturedTensorError, match=r"\[WS-CAPTURED-TENSOR\]") as caught:
        ws.compile(step)(world.model, world.optimizer)
    assert f"{Path(inspect.getfile(Net)).name}:" in str(caught.value), "the line in the forward that reads it"
    assert "argument" in caught.value.fix
    assert_unchanged_and_trainable(world, before, fresh=False)


def test_an_array_behind_a_tensor_is_never_baked_in() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        array = np.ones(4, dtype=np.float32)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) * torch.from_numpy(array)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def after(i: int, result: Any) -> None:
            array[:] = i

        return plain_run(where, model, adamw(model), step, after=after)

    assert_parity_or_refusal(Case("array", make, steps=4, graphs=None), device())


def writes_through_windows(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    y = model(x).detach()
    y.unfold(1, 2, 1).mul_(2)  # <- here
    return y


def writes_through_overlapping_strides(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> torch.Tensor:
    y = model(x).detach()
    y.as_strided((3, 3), (1, 2)).add_(1)  # <- here
    return y


@pytest.mark.parametrize("step", [writes_through_windows, writes_through_overlapping_strides])
def test_a_write_through_overlapping_views_is_refused(step: Callable[..., Any]) -> None:
    assert_points_at(assert_refused(step, ws.errors.OverlapError), step)


def test_a_write_through_an_expanded_view_fails_as_in_eager_or_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.expand(5, 6).add_(1)
        return x

    x = batch_of(device(), 0, 1, 6)
    before = x.clone()
    with pytest.raises((RuntimeError, ws.errors.OverlapError)):
        ws.compile(step)(x)
    assert torch.equal(x, before)


def test_inputs_that_share_memory_are_equal_to_eager_or_refused() -> None:
    def make(where: torch.device) -> Run:
        def step(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            part.add_(1)
            return x.sum() + part.sum()

        def arguments(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            x = batch_of(where, i, 5, 6)
            return x, x[1:3]

        return Run(step, arguments, {})

    assert_parity_or_refusal(Case("aliases", make, steps=3, graphs=None), device())


def test_inputs_that_begin_to_share_memory_are_equal_to_eager_or_refused() -> None:
    def make(where: torch.device) -> Run:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return x.sum() + y.sum()

        def arguments(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            x = batch_of(where, i, 5, 6)
            return (x, batch_of(where, 50 + i, 5, 6)) if i < 2 else (x, x)

        return Run(step, arguments, {})

    assert_parity_or_refusal(Case("aliases", make, steps=4, graphs=None), device())


def replaces_data(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.data = (p.data - 0.1 * p.grad).double()  # <- here
    return loss


def replaces_a_parameter(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    model.last.weight = nn.Parameter(model.last.weight * 2)  # <- here
    return model(x).sum()


def casts_the_model(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    model.double()  # <- here
    return model(x.double()).sum()


@pytest.mark.parametrize("step", [replaces_data, replaces_a_parameter, casts_the_model])
def test_a_step_that_replaces_the_storage_of_a_parameter_is_refused(step: Callable[..., Any]) -> None:
    assert_points_at(assert_refused(step, ws.errors.ParameterDataError), step)
