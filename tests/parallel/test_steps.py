"""What users write into steps, on two ranks: evaluation, several updates, gradients by hand, odd parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_, get_total_norm, parametrizations
from torch.optim import Optimizer

import wholestep as ws
from parallel.pairs import (
    Case,
    Compiled,
    all_of,
    beside_ddp,
    beside_fully_shard,
    beside_one_process,
    numbers,
    sharded_beside_ddp,
    world_mesh,
)
from ranks import run_ranks
from selection import each_now, some_now
from wholestep import errors


def update(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def two_forwards(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return update(model, optimizer, (model(x) * model(x * 2)).mean())


def two_updates(model: nn.Module, optimizer: Optimizer, x: Tensor) -> list[Tensor]:
    return [update(model, optimizer, model(part).square().mean()) for part in x.split(3)]


def two_backwards(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    out = model(x)
    out.square().mean().backward(retain_graph=True)
    return update(model, optimizer, out.abs().mean())


def evaluation_around(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        before = model(x).mean()
    loss = update(model, optimizer, model(x).square().mean())
    with torch.no_grad():
        return before, loss, model(x).mean()


def gradients_returned(model: nn.Module, optimizer: Optimizer, x: Tensor) -> list[Any]:
    model(x).square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return found


def gradients_changed(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(0.5)
    clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def gradients_kept(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def gradients_looked_at(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    finite = torch.stack([p.grad.isfinite().all() for p in model.parameters()]).all()
    get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    return loss, finite


def without_optimizer(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
    return loss


def gradient_penalty(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return update(model, optimizer, out.square().mean() + slope.square().mean())


def by_parts(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    return update(model, optimizer, model[2](model[1](model[0](x))).square().mean())


STEPS = [two_forwards, two_updates, evaluation_around, gradients_changed, without_optimizer]


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ParameterList([torch.randn(6, 6) for _ in range(2)])
        self.named = nn.ParameterDict({"out": torch.randn(6, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.hidden:
            x = torch.tanh(x @ weight)
        return x @ self.named["out"]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 5, bidirectional=True)
        self.cell = nn.LSTMCell(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.rnn(x[None])[0][0])[0]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 3, 1, 2).repeat(1, 1, 4, 2)).mean((2, 3))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bag((x.abs() * 3).long().clamp(max=10)))


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)))


MODELS = [Lists, Gated, Convolved, Embedded, weight_normed]
CASES = [Case(step.__name__, step=step, steps=4) for step in STEPS]
CASES += [Case(model.__name__, model, steps=4) for model in MODELS]


KEPT = Case("gradients kept", step=gradients_kept, steps=4)


MORE = [Case("gradients returned", step=gradients_returned), Case("looked at", step=gradients_looked_at)]


@pytest.mark.parametrize(
    ("check", "cases"),
    [
        *(
            pytest.param(sharded_beside_ddp, *each.values, marks=each.marks)
            for each in some_now(
                CASES + MORE,
                *("two_forwards", "gradients_changed", "without_optimizer", "Lists", "Gated", "Convolved"),
                *("weight_normed", "looked at"),
            )
        ),
        *(
            pytest.param(beside_ddp, *each.values, marks=each.marks)
            for each in some_now(CASES + MORE, "two_updates", "evaluation_around", "Embedded", "gradients returned")
        ),
    ],
)
def test_steps_and_models_have_the_bits_of_ddp(check: Any, cases: list[Case]) -> None:
    all_of(check, cases)


@pytest.mark.parametrize("check", each_now([beside_ddp, beside_fully_shard], "beside_fully_shard"))
def test_gradients_that_are_kept_are_added_to_as_torchs_wrappers_do(check: Any) -> None:
    """DDP reduces the sum of old and new, fully_shard only what is new: the same up to rounding."""
    all_of(check, [KEPT])


@pytest.mark.parametrize("plan", each_now([ws.Replicate, ws.FullyShard], "FullyShard"))
def test_steps_that_wrappers_cannot_take_agree_with_one_process(plan: Any) -> None:
    """DDP reduces in the first of two backwards only, fully_shard wants rows in memory one after the other."""
    cases = [Case(step.__name__, step=step, steps=4) for step in (gradient_penalty, by_parts, two_backwards)]
    cases.append(Case("transposed", Transposed, steps=4))
    all_of(lambda case: beside_one_process(case, plan(world_mesh())), cases)


def test_a_parameter_used_outside_of_a_forward_is_not_silently_a_part_of_it() -> None:
    def by_function(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        return update(model, optimizer, F.linear(x, model[0].weight, model[0].bias).square().mean())

    def own_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = grad
        optimizer.step()
        return loss

    def code(rank: int) -> list[str]:
        found = []
        for step in (by_function, own_gradients):
            try:
                Compiled(Case("", step=step), ws.FullyShard(world_mesh())).run(0)
            except errors.WholestepError as error:
                found.append(error.code)
        return found

    assert run_ranks(code, 2) == [["WS-UNSUPPORTED"] * 2] * 2


def test_units_by_pattern_train_like_the_whole() -> None:
    """`modules` says what eager gathers together; the rest of the model stays whole and is all-reduced."""

    def check(case: Case) -> list[str]:
        units = {"all by pattern": ["*"], "one": ["2"], "inner and root": ["0", ""]}[case.name]
        return sharded_beside_ddp(case, modules=units)

    all_of(check, [Case(name, steps=4) for name in ("all by pattern", "one", "inner and root")])


def test_local_batches_may_differ_in_size() -> None:
    """Replicate allows it as DDP does; under FullyShard it works too, as communication is the same."""

    def batch(i: int, rank: int) -> tuple[Any, ...]:
        return (numbers(i, rank, 3 + 2 * rank, 6),)

    all_of(beside_ddp, [Case("sizes", batch=batch, steps=4)])
    all_of(sharded_beside_ddp, [Case("sizes", batch=batch, steps=4)])
