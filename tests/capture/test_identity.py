"""Parameters that a step tells apart by identity: keys of dicts, members of sets, `id(p)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from cases.parts import adamw, mlp, train_step
from harness import Case, Run, Story, assert_parity, assert_same_story, batch_of, device


class Averages:
    """A moving average for each parameter, kept by the parameter itself."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = {parameter: parameter.detach().clone() for parameter in model.parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self.kept[parameter].lerp_(parameter, 0.5)
            parameter.copy_(self.kept[parameter])


class Rates:
    """A number for each parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.rates = {parameter: 0.9 + 0.01 * i for i, parameter in enumerate(model.parameters())}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.mul_(self.rates.get(parameter, 0.0))


class Members:
    """A set of parameters that decay."""

    def __init__(self, model: nn.Module) -> None:
        self.decays = {parameter for parameter in model.parameters() if parameter.dim() > 1}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter in self.decays:
                parameter.mul_(0.9)


class ById:
    """A set of identities."""

    def __init__(self, model: nn.Module) -> None:
        self.decays = {id(parameter) for parameter in model.parameters() if parameter.dim() > 1}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if id(parameter) in self.decays:
                parameter.mul_(0.9)


class ByIdInDict:
    """A dict from identities to names."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if self.names.get(id(parameter), "").endswith("bias"):
                parameter.mul_(0.9)


class Nested:
    """A dict by parameter in a dict by name."""

    def __init__(self, model: nn.Module) -> None:
        self.all: dict[str, dict[Any, float]] = {"decay": dict.fromkeys(model.parameters(), 0.9)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.mul_(self.all["decay"][parameter])


class OptimizerPerParameter:
    """`{p: optimizer}`, as in torch's tutorial on optimizers in the backward."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self.optimizers[parameter].step()


KINDS: list[Callable[[nn.Module], Any]] = [Averages, Rates, Members, ById, ByIdInDict, Nested, OptimizerPerParameter]


def step(model: nn.Module, optimizer: Any, kept: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    kept.update(model)
    optimizer.zero_grad()
    return loss


def run_of(where: torch.device, kind: Callable[[nn.Module], Any]) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    kept = kind(model)
    return Run(step, lambda i: (model, optimizer, kept, batch_of(where, i, 5, 6)), {"model": model, "opt": optimizer})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_kept_by_the_identity_of_a_parameter_is_found(kind: Callable[[nn.Module], Any]) -> None:
    assert_parity(Case("identity", lambda where: run_of(where, kind), steps=5), device())


def test_a_member_that_is_removed_between_calls_is_noticed() -> None:
    def story(told: Story) -> None:
        told.call(2)
        model, _, kept, _ = told.run.arguments(0)
        kept.decays.discard(model[0].weight)
        told.call(2)

    assert_same_story(lambda where: run_of(where, Members), story)


def test_dicts_sets_and_names_are_as_before_after_a_capture() -> None:
    run = run_of(device(), Averages)
    model, _, kept, _ = run.arguments(0)
    keys = list(kept.kept)
    ws.compile(run.step)(*run.arguments(0))
    assert [a is b for a, b in zip(kept.kept, keys, strict=True)] == [True] * len(keys)
    assert "id" not in globals()
    assert id(model) == id(run.watch["model"])


def test_a_step_that_adds_to_a_dict_of_parameters_adds_the_real_ones() -> None:
    seen: dict[Tensor, int] = {}

    def remembers(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        for parameter in model.parameters():
            seen[parameter] = 1
        return train_step(model, optimizer, x)

    model = mlp(device())
    step, optimizer = ws.compile(remembers), adamw(model)
    for i in range(3):
        step(model, optimizer, batch_of(device(), i, 5, 6))
    assert list(map(id, seen)) == list(map(id, model.parameters()))
