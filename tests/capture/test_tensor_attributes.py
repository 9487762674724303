"""Python attributes that user code puts on parameters and other tensors mean in a graph what they mean in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from cases.parts import mlp
from harness import Run, assert_parity, batch_of, case, device


def _decayed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    for p in model.parameters():
        if not getattr(p, "no_decay", False):
            loss = loss + 0.1 * p.square().sum()
    return loss


def _run(
    where: torch.device,
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    prepare: Callable[[nn.Module], None] = lambda model: None,
    between: Callable[[nn.Module, int], None] = lambda model, i: None,
) -> Run:
    model = mlp(where)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    seen = {"model": model, "attributes": _Attributes(model)}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), seen, after=lambda i, result: between(model, i))


class _Attributes:
    """Shows the attributes of parameters to the harness."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: dict(vars(p)) for name, p in self._model.named_parameters()}


def _mark(model: nn.Module) -> None:
    model[0].weight.no_decay = True  # type: ignore[index]


def _scaled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = model[0].weight  # type: ignore[index]
    return (model(x) * weight.scale).square().mean() + (1.0 if hasattr(weight, "extra") else 0.0)


def _counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = model[0].weight  # type: ignore[index]
    weight.calls = getattr(weight, "calls", 0) + 1
    return model(x).square().mean() * weight.calls


def _kept_tensor(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for p in model.parameters():
        p.main_grad.mul_(0.9).add_(p.detach(), alpha=0.1)
    return model(x).square().mean() + sum((p.main_grad * p).sum() for p in model.parameters())


def _rebound_tensor(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = model[0].weight  # type: ignore[index]
    before = getattr(weight, "hess", None)
    weight.hess = weight.detach() * 0.5 if before is None else before * 0.5 + weight.detach()
    return model(x).square().mean() + (weight.hess * weight).sum()


def _give_main_grad(model: nn.Module) -> None:
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]


def _set_scale(model: nn.Module, i: int = 0) -> None:
    model[0].weight.scale = (1.0, 2.0, 3.0, 2.0)[i % 4]  # type: ignore[index]


def _more(model: nn.Module, i: int) -> None:
    weight = model[0].weight  # type: ignore[index]
    if i == 2:
        weight.extra = "yes"
    if i == 4:
        del weight.extra


def _switch_decay(model: nn.Module, i: int) -> None:
    model[0].weight.no_decay = i % 2 == 0  # type: ignore[index]


CASES: dict[str, Callable[[torch.device], Run]] = {
    "flag": lambda where: _run(where, _decayed, _mark),
    "flag-set-later": lambda where: _run(where, _decayed, between=lambda m, i: _mark(m) if i == 1 else None),
    "flag-switched": lambda where: _run(where, _decayed, _mark, _switch_decay),
    "number-that-changes": lambda where: _run(where, _scaled, _set_scale, _set_scale),
    "attribute-added-and-removed": lambda where: _run(where, _scaled, _set_scale, _more),
    "counter": lambda where: _run(where, _counted),
    "tensor-written-in-place": lambda where: _run(where, _kept_tensor, _give_main_grad),
    "tensor-bound-anew": lambda where: _run(where, _rebound_tensor),
}


@pytest.mark.parametrize("name", CASES)
def test_an_attribute_of_a_parameter_is_that_of_eager(name: str) -> None:
    assert_parity(case(CASES[name], name=name, steps=7, graphs=4), device())


def test_an_optimizer_of_ones_own_reads_flags_of_parameters() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    decay = 0.0 if hasattr(p, "no_decay") else 0.01
                    p.add_(p.grad + decay * p, alpha=-group["lr"])

    def make(where: torch.device) -> Run:
        model = mlp(where)
        _mark(model)
        optimizer = Own(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model})

    assert_parity(case(make, steps=5, graphs=1), device())


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [("mask", self._tensor)]


def test_attributes_of_buffers_batches_and_tensors_in_closures_are_seen() -> None:
    def make(where: torch.device) -> Run:
        model = nn.BatchNorm1d(6).to(where)
        mask = torch.ones(6, device=where)
        mask.k = 2.0  # type: ignore[attr-defined]
        model.running_mean.k = 3.0  # type: ignore[union-attr]

        def step(x: Any) -> torch.Tensor:
            mask.seen = getattr(mask, "seen", 0) + 1  # type: ignore[attr-defined]
            return model(x) * mask * mask.k * mask.seen * model.running_mean.k * getattr(x, "weight", 1.0)  # type: ignore[attr-defined, union-attr]

        def arguments(i: int) -> tuple[Any, ...]:
            x = batch_of(where, i, 5, 6)
            if i % 3 == 1:
                x.weight = 0.5 + i  # type: ignore[attr-defined]
            return (x,)

        def after(i: int, result: Any) -> None:
            mask.k = 2.0 + i  # type: ignore[attr-defined]

        return Run(step, arguments, {"model": model, "seen": _Attributes(_Holder(mask))}, after=after)

    assert_parity(case(make, steps=8, graphs=None), device())


def test_an_attribute_set_to_an_object_is_refused_with_its_path() -> None:
    model = mlp(device())

    @ws.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        model[0].weight.seen = [1]
        return model(x)

    with pytest.raises(ws.errors.SideEffectError, match=r"weight\.seen"):
        step(batch_of(device(), 0, 5, 6))
    assert not hasattr(model[0].weight, "seen")
