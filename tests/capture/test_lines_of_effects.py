"""An effect that is only seen after the trace is refused with the user's line of the effect itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from harness import marked_line

Step = Callable[..., Any]


def through_a_library(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        random.shuffle(h.order)  # <- here
        return x + 1

    return step


def binds_an_object(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        h.last = SimpleNamespace(x=x)  # <- here
        return x + 1

    return step


def draws(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        y = y * random.random()  # <- here
        return y + 1

    return step


def draws_with_numpy(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        return y * np.random.rand()  # <- here

    return step


def draws_from_an_object(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = h.generator.random()  # <- here
        return x * scale

    return step


def seeds_after_forking(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            y = x + torch.rand(3)
        torch.seed()  # <- here
        return y

    return step


def seeds_as_before(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        h.noise.manual_seed(7)  # <- here
        return x + torch.rand(3, generator=h.noise)

    return step


def sets_the_state_back(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        before = h.noise.get_state()
        y = x + torch.rand(3, generator=h.noise)
        h.noise.set_state(before)  # <- here
        return y

    return step


def seeds_the_default_generator(h: Any) -> Step:
    seed = torch.default_generator.initial_seed()

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(seed)  # <- here
        return x + torch.rand(3)

    return step


def freezes(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        h.model.weight.requires_grad_(False)  # <- here
        return h.model(x).sum()

    return step


def adds_a_group(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = h.model(x).sum()
        h.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # <- here
        return y

    return step


def writes_an_array(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        h.array[0] += 1  # <- here
        return x + 1

    return step


def leaves_a_setting(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.set_default_dtype(torch.float64)  # <- here
        return y

    return step


def sets_a_tensor_attribute(h: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        h.model.weight.seen = [1]  # <- here
        return h.model(x).sum()

    return step


EFFECTS = [
    through_a_library,
    binds_an_object,
    draws,
    draws_with_numpy,
    draws_from_an_object,
    seeds_after_forking,
    seeds_as_before,
    sets_the_state_back,
    seeds_the_default_generator,
    freezes,
    adds_a_group,
    writes_an_array,
    leaves_a_setting,
    sets_a_tensor_attribute,
]


def holder() -> SimpleNamespace:
    model = nn.Linear(3, 3)
    return SimpleNamespace(
        losses=[],
        table={},
        order=[1, 2, 3, 4, 5],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        array=np.zeros(2),
        generator=np.random.default_rng(3),
        noise=torch.Generator().manual_seed(7),
    )


def refusal(step: Step, *args: Any) -> ws.errors.WholestepError:
    with pytest.raises(ws.errors.CaptureError) as caught:
        ws.compile(step, lower="eager")(torch.ones(3), *args)
    return caught.value


@pytest.mark.parametrize("make", EFFECTS, ids=lambda make: make.__name__)
def test_the_line_of_the_effect_is_named(make: Callable[[Any], Step]) -> None:
    made, tracer = holder(), sys.gettrace()
    random.seed(3)
    step = make(made)
    error = refusal(step)
    assert error.location is not None
    assert (error.location.file, error.location.line) == (__file__, marked_line(step)), error
    assert "<- here" in error.location.text
    assert sys.gettrace() is tracer
    assert (made.order, made.array.sum()) == ([1, 2, 3, 4, 5], 0)
    assert made.model.weight.requires_grad


def test_the_line_is_that_of_the_function_which_has_the_effect() -> None:
    def note(k: int) -> float:
        return k * random.random()  # <- here

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        note(len(y))
        return y

    error = refusal(step)
    assert error.location is not None
    assert error.location.line == marked_line(note)


def test_a_change_of_an_argument_has_the_line() -> None:
    def step(x: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        y = x * 2
        batch["y"] = y  # <- here
        return y.sum()

    error = refusal(step, {})
    assert error.location is not None
    assert error.location.line == marked_line(step)
