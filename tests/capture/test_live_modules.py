"""What is done to a module between steps counts, as it does in eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from capture.live import net_run, parts
from cases.parts import adamw, mlp, plain_run, train_step
from harness import Run, Story, assert_same_story, batch_of, device, reasons


def test_eval_and_train_switch_batch_norm_and_dropout_and_return_to_the_first_graph() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model.eval()
        told.call(2)
        model.train()
        told.call(2)
        model.drop.eval()
        told.call(2)

    step = assert_same_story(net_run, story)
    assert len(step.graphs) <= 4, reasons(step)


def test_requires_grad_toggled_between_steps_freezes_and_thaws() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(2)
        model.first.requires_grad_(False)
        told.call(2)
        model.first.requires_grad_(True)
        told.call(2)

    assert_same_story(net_run, story)


def test_a_changed_dropout_probability_is_used() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model.drop.p = 0.8
        told.call(2)
        model.drop.p = 0.0
        told.call(2)

    assert_same_story(net_run, story)


def test_a_changed_float_attribute_of_a_module_is_used() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model.temperature = 5.0
        told.call(2)
        model.norm.momentum = 0.5
        told.call(2)
        model.norm.eps = 1e-2
        told.call(2)

    assert_same_story(net_run, story)


def test_a_replaced_submodule_is_used() -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        model.last = nn.Linear(8, 3).to(device())
        optimizer.add_param_group({"params": list(model.last.parameters())})
        told.call(3)
        model.drop = nn.Identity()
        told.call(2)

    assert_same_story(net_run, story)


def test_a_replaced_activation_function_is_used() -> None:
    def make(where: torch.device) -> Run:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(where)
        return plain_run(where, model, adamw(model))

    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model[1] = nn.Tanh()
        told.call(3)

    assert_same_story(make, story)


def test_a_replaced_parameter_of_the_same_shape_is_read_and_trained() -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        replaced = model.last.weight
        model.last.weight = nn.Parameter(torch.ones(4, 8))
        told.call(2)
        del optimizer.state[replaced]
        optimizer.param_groups[0]["params"][:] = list(model.parameters())
        told.call(3)

    assert_same_story(net_run, story)


def test_weights_written_between_steps_are_read() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        model.last.bias.data = torch.ones(4)
        model.norm.running_mean.zero_()
        told.call(3)
        nn.init.ones_(model.last.weight)
        told.call(2)

    assert_same_story(net_run, story)


def test_a_module_moved_to_another_dtype_trains_in_that_dtype() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            return train_step(model, optimizer, x.to(next(model.parameters()).dtype))

        return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer})

    def story(told: Story) -> None:
        told.call(3)
        told.run.watch["model"].double()
        told.call(3)

    assert_same_story(make, story)


@pytest.mark.parametrize(("before", "after"), [(1, 1.0), (1.0, True), (0.0, -0.0), ((1, 2), (1.0, 2))], ids=repr)
@pytest.mark.parametrize("counts", [False, True], ids=["plain", "counting"])
def test_a_number_that_is_equal_and_yet_another_is_used(before: object, after: object, counts: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale: Any = before
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if counts:
                self.calls += 1
            scale = self.scale[0] if isinstance(self.scale, tuple) else self.scale
            return x * scale

    def outcomes(step: Any) -> list[tuple[torch.dtype, list[Any]]]:
        model, found = Scaled(), []
        for number in (before, before, after, after, before):
            model.scale = number
            found.append(step(model, torch.arange(3)))
        return [(value.dtype, [math.copysign(1, each) * (abs(each) + 1) for each in value.tolist()]) for value in found]

    def step(model: nn.Module, x: Tensor) -> Any:
        return model(x)

    assert outcomes(ws.compile(step)) == outcomes(step)
