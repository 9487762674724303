"""An exception of the user's code surfaces as it is, and nothing of the user's is changed."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.refused import World, assert_unchanged_and_trainable
from cases.parts import adamw, mlp, plain_run, train_step
from harness import (
    Case,
    Run,
    assert_frames_equal,
    assert_parity,
    device,
)


class StepError(Exception):
    """An exception of the user's own."""


def raises_in_the_middle(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    raise StepError("out of luck", 7)


def raises_at_the_end(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    train_step(model, optimizer, x)
    raise StepError("out of luck", 7)


def has_a_wrong_shape(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + torch.zeros(3, 7) @ x


def is_interrupted(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    train_step(model, optimizer, x)
    raise KeyboardInterrupt


@pytest.mark.parametrize("fresh", [False, True], ids=["mid_training", "fresh"])
@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (raises_in_the_middle, StepError),
        (raises_at_the_end, StepError),
        (has_a_wrong_shape, RuntimeError),
        (is_interrupted, KeyboardInterrupt),
    ],
)
def test_an_exception_of_user_code_surfaces_with_its_traceback_and_changes_nothing(
    step: Callable[..., Any], kind: type[BaseException], fresh: bool
) -> None:
    world = World(fresh=fresh)
    before = world.look()
    with pytest.raises(kind) as caught:
        ws.compile(step)(world.model, world.optimizer, world.batch())
    assert type(caught.value) is kind
    assert step.__name__ in {each.name for each in traceback.extract_tb(caught.value.__traceback__)}
    if kind is StepError:
        assert caught.value.args == ("out of luck", 7)
    assert_unchanged_and_trainable(world, before, fresh=fresh)


def test_an_exception_on_a_later_path_leaves_the_graphs_usable() -> None:
    world = World(fresh=False)

    def fails_when_told(x: torch.Tensor, fail: bool) -> torch.Tensor:
        loss = train_step(world.model, world.optimizer, x)
        if fail:
            raise StepError("told so")
        return loss

    step = ws.compile(fails_when_told)
    step(world.batch(), False)
    step(world.batch(), False)
    before, graphs = world.look(), len(step.graphs)
    with pytest.raises(StepError):
        step(world.batch(), True)
    assert_frames_equal([before], [world.look()])
    step(world.batch(), False)
    assert len(step.graphs) == graphs


def test_an_exception_that_the_user_catches_inside_the_step_is_the_users_business() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(StepError):
                raise StepError
            return train_step(model, optimizer, x)

        return plain_run(where, model, adamw(model), step)

    assert_parity(Case("caught", make, steps=3), device())


def test_a_refused_step_can_be_called_again_after_the_cause_is_gone() -> None:
    world = World(fresh=False)
    careful = {"on": True}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = train_step(world.model, world.optimizer, x)
        if careful["on"] and loss > 100:
            raise StepError
        return loss

    compiled = ws.compile(step)
    with pytest.raises(ws.errors.ControlFlowError):
        compiled(world.batch())
    careful["on"] = False
    compiled(world.batch())
    assert len(compiled.graphs) == 1


def test_an_operator_that_eager_refuses_raises_what_eager_raises() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.stack([p for p in (x,) if p.shape[0] > 5])
        except RuntimeError:
            return x * 2

    assert torch.equal(ws.compile(step, lower="eager")(torch.ones(2)), step(torch.ones(2)))
    with pytest.raises(RuntimeError, match="non-empty TensorList"):
        ws.compile(lambda x: torch.stack([]) + x, lower="eager")(torch.ones(2))
