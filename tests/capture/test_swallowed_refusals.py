"""Refusals that user code catches, and tensors of inference mode."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.odd_places import Program, assert_refused, assert_same, nothing


def swallows(do: Callable[[torch.Tensor], Any]) -> Program:
    def program() -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            try:
                scale = do(x)
            except Exception:
                scale = 3.0
            return x * scale

        return step, nothing

    return program


SWALLOWED: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "text": ("WS-ITEM", lambda x: len(str(x))),
    "random bytes": ("WS-RNG", lambda x: os.urandom(1)[0]),
    "a file": ("WS-SIDE-EFFECT", lambda x: torch.save(1, "never written") or 2.0),
}


@pytest.mark.parametrize("kind", SWALLOWED)
def test_a_refusal_that_user_code_swallows_is_raised_after_the_step(kind: str) -> None:
    code, do = SWALLOWED[kind]
    assert_refused(swallows(do), code)


def test_a_refusal_that_user_code_turns_into_an_error_of_its_own_is_raised() -> None:
    def program() -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            try:
                return x * os.urandom(1)[0]
            except Exception as error:
                raise RuntimeError("no random bytes") from error

        return step, nothing

    assert_refused(program, "WS-RNG")


def test_an_iterator_behind_except_is_refused_and_not_moved() -> None:
    numbers = itertools.count(5)
    assert_refused(swallows(lambda x: next(numbers)), "WS-SIDE-EFFECT")
    assert next(numbers) == 5


def test_errors_of_the_users_own_may_be_caught_in_a_step() -> None:
    def program() -> Any:
        table = {"a": 2.0}

        def step(x: torch.Tensor) -> torch.Tensor:
            try:
                return x * table["b"]
            except KeyError:
                return x * table["a"]

        return step, nothing

    assert_same(program, graphs=1)


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_of_inference_mode_is_refused_where_gradients_are_computed(first: bool) -> None:
    model = nn.Linear(3, 1)

    @ws.compile(lower="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def call() -> torch.Tensor:
        with torch.inference_mode():
            x = torch.ones(2, 3)
        return step(x)

    if not first:
        step(torch.ones(2, 3))
        model.weight.grad = model.bias.grad = None
    with pytest.raises(ws.errors.UnsupportedError, match="inference_mode"):
        call()
    assert model.weight.grad is None


def test_a_batch_of_inference_mode_may_be_evaluated() -> None:
    def program() -> Any:
        model = nn.Linear(3, 1)

        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(x)

        def arguments(i: int) -> torch.Tensor:
            with torch.inference_mode(i % 2 == 1):
                return torch.ones(2, 3) * i

        return step, nothing, lambda: None, arguments

    assert_same(program, graphs=2)
