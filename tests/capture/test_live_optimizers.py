"""What is done to an optimizer and to gradients between steps counts, as it does in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.live import FORMS, Net, net_run, parts
from cases.parts import adamw, mlp, plain_run
from harness import Run, Story, assert_same_story, batch_of, device, reasons


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_parameter_group_added_between_steps_is_trained(form: dict[str, Any]) -> None:
    def make(where: torch.device) -> Run:
        model = Net().to(where)
        return plain_run(where, model, torch.optim.AdamW(model.last.parameters(), lr=0.01, **form))

    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.5})
        told.call(3)

    assert_same_story(make, story)


@pytest.mark.parametrize(
    ("key", "value"), [("weight_decay", 0.0), ("amsgrad", False), ("maximize", True), ("foreach", False), ("eps", 1e-3)]
)
def test_an_option_of_the_optimizer_changed_between_steps_is_obeyed(key: str, value: Any) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, adamw(model, foreach=True, amsgrad=True))

    def story(told: Story) -> None:
        _, optimizer = parts(told)
        told.call(3)
        optimizer.param_groups[0][key] = value
        told.call(3)

    assert_same_story(make, story)


def test_a_momentum_that_is_switched_on_creates_its_state_then() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def story(told: Story) -> None:
        _, optimizer = parts(told)
        told.call(3)
        optimizer.param_groups[0]["momentum"] = 0.9
        told.call(3)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        told.call(3)

    assert_same_story(make, story)


def test_optimizer_state_cleared_between_steps_is_created_again() -> None:
    def story(told: Story) -> None:
        _, optimizer = parts(told)
        told.call(3)
        optimizer.state.clear()
        told.call(3)

    step = assert_same_story(net_run, story)
    assert len(step.graphs) <= 2, reasons(step)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_going_back_to_eager_and_returning_loses_nothing(form: dict[str, Any]) -> None:
    def story(told: Story) -> None:
        told.call_eager(2)
        told.call(3)
        told.call_eager(2)
        told.call(3)

    step = assert_same_story(lambda where: net_run(where, **form), story)
    assert len(step.graphs) <= 2, reasons(step)


def test_gradients_left_by_eager_are_added_to() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, adamw(model))

    def story(told: Story) -> None:
        model, _ = parts(told)
        model(batch_of(device(), 99, 5, 6)).sum().backward()
        told.look()
        told.call(2)
        model(batch_of(device(), 98, 5, 6)).sum().backward()
        told.call(2)

    assert_same_story(make, story)


@pytest.mark.parametrize(
    "first", [lambda group: group.get("seen", 0), lambda group: group["seen"] if "seen" in set(group) else 0]
)
@pytest.mark.parametrize("start", [1, 1.5])
def test_an_option_that_the_step_adds_to_a_group_is_counted_on(first: Callable[[Any], Any], start: float) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["seen"] = first(group) + start
        return loss

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = ws.compile(step, lower="eager")
    seen = []
    for _ in range(5):
        compiled(model, optimizer, torch.ones(4, 3))
        seen.append(optimizer.param_groups[0]["seen"])
    assert seen == [start * (i + 1) for i in range(5)]
    assert len(compiled.graphs) <= 3


def test_an_option_that_is_removed_between_steps_is_seen() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * (2 if "double" in optimizer.param_groups[0] else 1)
        loss.backward()
        return loss.detach()

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "double": None}], lr=0.1)
    compiled = ws.compile(step, lower="eager")
    doubled = compiled(model, optimizer, torch.ones(4, 3))
    del optimizer.param_groups[0]["double"]
    assert torch.equal(compiled(model, optimizer, torch.ones(4, 3)) * 2, doubled)
    assert "param_groups[0].double was None and is absent" in str(compiled.recompiles[0])
