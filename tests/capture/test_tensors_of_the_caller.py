"""Tensors of subclasses, and what a step sets on tensors that it is given: as in eager, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from capture.followed import assert_refused
from harness import Run, assert_parity, batch_of, case, device


class Halved(nn.Parameter):
    def half(self) -> Tensor:
        return self * 0.5


class Tagged(Tensor):
    """Results of functions on it are Tagged too."""


def test_a_subclass_of_parameter_is_an_object_of_its_class_in_the_step() -> None:
    def make(where: torch.device) -> Run:
        model = nn.Linear(6, 4).to(where)
        model.weight = Halved(model.weight.data)
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            for p in model.parameters():
                if isinstance(p, Halved) and type(p) is Halved:
                    loss = loss + p.half().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer})

    assert_parity(case(make, name="subclass", steps=4, graphs=2), device())


def test_an_argument_of_a_subclass_with_functions_of_its_own_is_refused() -> None:
    with pytest.raises(ws.errors.UnsupportedError, match="x is a Tagged"):
        ws.compile(lambda x: x * 2)(torch.ones(3).as_subclass(Tagged))


def make_of_a_subclass(x: Tensor) -> Tensor:
    return x.as_subclass(Tagged) * 2  # <- here


def construct_a_subclass(x: Tensor) -> Tensor:
    return Tagged(x) * 2  # <- here


@pytest.mark.parametrize("step", [make_of_a_subclass, construct_a_subclass])
def test_a_subclass_made_in_the_step_is_refused_with_the_line(step: Callable[[Tensor], Tensor]) -> None:
    assert_refused(step, ws.errors.UnsupportedError, "subclass", step)


def test_an_argument_that_the_step_leaves_requiring_grad_does_so_after_a_replay() -> None:
    model = nn.Linear(3, 3)

    @ws.compile(lower="eager")
    def step(x: Tensor) -> Tensor:
        x.requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    for _ in range(3):
        x = torch.ones(2, 3)
        found = step(x)
        assert x.requires_grad
        assert torch.equal(found, torch.autograd.grad(model(x).square().sum(), x)[0])
    assert len(step.graphs) == 1


class Holder:
    delta = torch.zeros(3)


def freeze(x: Tensor) -> Tensor:
    Holder.delta.requires_grad_()  # <- here
    return x + Holder.delta


def set_a_gradient(x: Tensor) -> Tensor:
    Holder.delta.grad = x  # <- here
    return x + Holder.delta


def set_data(x: Tensor) -> Tensor:
    Holder.delta.data = x  # <- here
    return x + Holder.delta


@pytest.mark.parametrize("step", [freeze, set_a_gradient, set_data])
def test_what_is_set_on_a_tensor_that_has_no_fake_is_refused_before_it_is_set(step: Callable[[Tensor], Tensor]) -> None:
    memory = Holder.delta.data_ptr()
    assert_refused(step, ws.errors.CapturedTensorError, "lies where capture cannot replace it", step)
    assert not Holder.delta.requires_grad
    assert Holder.delta.grad is None
    assert Holder.delta.data_ptr() == memory


class Keeper:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)
        self.model(torch.ones(2, 3)).sum().backward()
        self.kept = torch.ones(3)


def attribute_as_argument(keeper: Keeper, x: Tensor) -> Tensor:
    keeper.kept.add_(1)
    return x + keeper.kept * 3


def gradient_as_argument(keeper: Keeper, x: Tensor) -> Tensor:
    keeper.model(torch.ones(2, 3)).sum().backward()
    return x.sum()


def gradient_in_an_attribute(keeper: Keeper, x: Tensor) -> Tensor:
    keeper.kept.mul_(0.5)
    keeper.model(torch.ones(2, 3)).sum().backward()
    return keeper.kept + x.sum()


@pytest.mark.parametrize("body", [attribute_as_argument, gradient_as_argument, gradient_in_an_attribute])
def test_two_places_that_held_one_tensor_and_hold_two_are_noticed(body: Callable[[Keeper, Tensor], Tensor]) -> None:
    def results(compiled: bool) -> list[list[float]]:
        torch.manual_seed(3)
        keeper, found = Keeper(), []
        grad = keeper.model.weight.grad
        assert grad is not None
        if body is gradient_in_an_attribute:
            keeper.kept = grad
        step = ws.compile(lambda x: body(keeper, x), lower="eager") if compiled else lambda x: body(keeper, x)
        for i in range(4):
            given = keeper.kept if body is attribute_as_argument else grad
            if i == 2:
                given = given.clone()
                keeper.kept = keeper.kept.clone()
            found.append([*step(given).flatten().tolist(), *keeper.kept.flatten().tolist(), *grad.flatten().tolist()])
        return found

    assert results(compiled=True) == results(compiled=False)
