"""What a step does to Python objects and to random numbers of Python is as in eager, or refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from cases.parts import adamw, mlp, train_step
from harness import (
    Case,
    Run,
    assert_parity_or_refusal,
    batch_of,
    device,
)


class Caching(nn.Module):
    """Keeps what it saw in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.cache: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x.detach() * 2
        self.calls += 1
        return self.inner(x)


def test_a_tensor_kept_in_an_attribute_is_equal_or_refused_and_never_a_tracing_tensor() -> None:
    model = Caching()
    with contextlib.suppress(ws.errors.CaptureError):
        ws.compile(lambda x: model(x).sum())(batch_of(device(), 0, 5, 6))
    assert model.cache is None or type(model.cache) is torch.Tensor
    assert isinstance(model.calls, int)


class Counter:
    """State of the user's own, in Python."""

    def __init__(self) -> None:
        self.calls = 0
        self.losses: list[Any] = []
        self.kept: dict[str, Any] = {}


CALLS = 0


def counts_in_an_attribute(counter: Counter, loss: torch.Tensor) -> None:
    counter.calls += 1


def appends_a_tensor(counter: Counter, loss: torch.Tensor) -> None:
    counter.losses.append(loss.detach())


def appends_a_number(counter: Counter, loss: torch.Tensor) -> None:
    counter.losses.append(len(counter.losses))


def keeps_a_tensor(counter: Counter, loss: torch.Tensor) -> None:
    counter.kept["loss"] = loss.detach()


def counts_in_a_global(counter: Counter, loss: torch.Tensor) -> None:
    global CALLS
    CALLS += 1
    counter.calls = CALLS


@pytest.mark.parametrize("reach", ["argument", "closure"])
@pytest.mark.parametrize(
    "effect", [counts_in_an_attribute, appends_a_tensor, appends_a_number, keeps_a_tensor, counts_in_a_global]
)
def test_python_state_changed_by_the_step_is_equal_or_refused(effect: Callable[..., None], reach: str) -> None:
    def make(where: torch.device) -> Run:
        global CALLS
        CALLS = 0
        model = mlp(where)
        optimizer = adamw(model)
        counter = Counter()

        def given(counter: Counter, x: torch.Tensor) -> torch.Tensor:
            loss = train_step(model, optimizer, x)
            effect(counter, loss)
            return loss

        def closed(x: torch.Tensor) -> torch.Tensor:
            loss = train_step(model, optimizer, x)
            effect(counter, loss)
            return loss

        def arguments(i: int) -> tuple[Any, ...]:
            x = batch_of(where, i, 5, 6)
            return (counter, x) if reach == "argument" else (x,)

        return Run(given if reach == "argument" else closed, arguments, {"model": model, "counter": vars(counter)})

    assert_parity_or_refusal(Case(effect.__name__, make, steps=4, graphs=None), device())


@pytest.fixture
def seeded_python() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.mark.usefixtures("seeded_python")
@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: random.choice([1.0, 2.0, 3.0])], ids=["random", "numpy", "choice"]
)
def test_random_numbers_of_python_and_numpy_are_equal_or_refused(draw: Callable[[], float]) -> None:
    def make(where: torch.device) -> Run:
        random.seed(3)
        np.random.seed(3)
        return Run(lambda x: x.sum() * float(draw()), lambda i: (batch_of(where, i, 5, 6),), {})

    assert_parity_or_refusal(Case("python randomness", make, steps=4, graphs=None), device())
