"""Rows about odd places of values, and about what capture does not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from capture import test_swallowed_refusals as swallowed
from capture.odd_places import assert_refused
from docs.rows.page import network, row, same


class Typed(Optimizer):
    """An optimizer that can tell an int from a float."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"k": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            k = group["k"]
            sign = torch.tensor(1.0) if isinstance(k, int) else torch.tensor(k).atan2(torch.tensor(-1.0))
            for p in group["params"]:
                p.sub_(p.grad * sign)


@row("a number in a param group that goes from int to float")
def types_of_options() -> None:
    values = [0.0, -0.0, 0, 0.0, 1]

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["k"] = values[i]

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    same(body, optimizer=lambda model: Typed(model.parameters()), between=between, steps=5, graphs=None)


def stepper(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


@row("one `torch.autocast` block around several calls of a step that changes weights")
def one_autocast_block() -> None:
    step = ws.compile(stepper(network()), lower="eager")
    x = torch.ones(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        step(x)
        with pytest.raises(ws.errors.UnsupportedError, match="autocast block"):
            step(x)


@row("a refusal that the step catches")
def caught_by_the_step() -> None:
    for code_of, do in swallowed.SWALLOWED.values():
        assert_refused(swallowed.swallows(do), code_of)


@row("a batch made under `torch.inference_mode()`")
def inference() -> None:
    swallowed.test_a_batch_of_inference_mode_may_be_evaluated()
    swallowed.test_a_batch_of_inference_mode_is_refused_where_gradients_are_computed(True)


# What capture does not see.


@row("weights that something else changed in the same `torch.autocast` block")
def two_steps_in_one_block() -> None:
    def last(compiled: bool) -> Tensor:
        model = network()
        train, evaluate = stepper(model), lambda x: model(x)
        if compiled:
            train, evaluate = ws.compile(train, lower="eager"), ws.compile(evaluate, lower="eager")
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            train(torch.ones(5, 6))
            return evaluate(torch.ones(5, 6)).detach()

    assert not torch.equal(last(True), last(False))
