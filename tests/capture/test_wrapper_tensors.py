"""Optimizer state in tensors that are made of other tensors, as torchao's low-bit optimizers keep it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from capture.halves import Halves, assert_same, batch, everything, world
from ranks import run_ranks
from wholestep.ir.user_objects.plain_contents import structure_of
from wholestep.ir.user_objects.wrapper_tensors import form_of, is_wrapper


@pytest.mark.parametrize("listed", [False, True])
def test_state_is_created_updated_cleared_and_replaced_as_in_eager(listed: bool) -> None:
    eager, compiled = world(listed), world(listed)
    step = ws.compile(compiled[2], lower="eager")
    for i in range(3):
        assert torch.equal(eager[2](batch(i)), step(batch(i)))
        assert_same(eager, compiled)
    assert len(step.graphs) == 2
    for model, optimizer, _ in (eager, compiled):
        for p in model.parameters():
            held = optimizer.state[p]["average"]
            (held[0] if listed else held).low = torch.ones_like(p, dtype=torch.bfloat16)
    assert torch.equal(eager[2](batch(3)), step(batch(3)))
    assert_same(eager, compiled)
    assert len(step.graphs) == 2
    for _, optimizer, _ in (eager, compiled):
        optimizer.state.clear()
    assert torch.equal(eager[2](batch(4)), step(batch(4)))
    assert_same(eager, compiled)


def test_what_a_wrapper_is_made_with_beside_tensors_is_a_guard() -> None:
    eager, compiled = world(), world()
    step = ws.compile(compiled[2], lower="eager")
    for i in range(6):
        if i == 3:
            for model, optimizer, _ in (eager, compiled):
                optimizer.state[next(model.parameters())]["average"].signed = False
        assert torch.equal(eager[2](batch(i)), step(batch(i)))
        assert_same(eager, compiled)
    assert len(step.graphs) == 3


def test_a_warm_up_prepares_both_graphs_and_leaves_no_state() -> None:
    eager, compiled = world(listed=True), world(listed=True)
    step = ws.compile(compiled[2], lower="eager")
    step.warmup(batch(0))
    assert len(step.graphs) == 2
    assert not compiled[1].state
    for i in range(3):
        assert torch.equal(eager[2](batch(i)), step(batch(i)))
    assert len(step.graphs) == 2


def test_a_check_copies_and_compares_the_tensors_inside() -> None:
    model, optimizer, train = world()
    train(batch(0))
    before = [each.clone() for each in everything(model, optimizer)]
    report = ws.check(train, batch(1), lower="eager")
    assert report.ok
    assert "Halves" not in str(report).split("shared")[-1] or "shared" not in str(report)
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), before, strict=True))


def test_a_saved_step_creates_and_updates_such_state(tmp_path: Path) -> None:
    first, second = world(), world()
    step = ws.compile(first[2], lower="eager")
    for i in range(3):
        step(batch(i))
    step.save(tmp_path / "step.ws")
    loaded = ws.load(tmp_path / "step.ws", second[2])
    for i in range(3):
        loaded(batch(i))
    assert_same(first, second)


class OnFrozen(nn.Module):
    """A layer beside a frozen weight that is kept in halves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Parameter(halves(3), requires_grad=False)
        self.register_buffer("zero", torch.zeros(3, 4))
        self.trained = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.frozen.lerp(self.zero, 0.0)  # type: ignore[arg-type]
        return self.trained(x) + x @ weight.T


def halves(seed: int) -> Any:
    low = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return Halves(low.bfloat16(), torch.tensor(0.5), True)


def test_a_frozen_weight_made_of_tensors_is_read_as_it_is_at_each_call() -> None:
    models = OnFrozen(), OnFrozen()
    optimizers = [torch.optim.SGD(model.trained.parameters(), lr=0.1) for model in models]

    def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = ws.compile(train, lower="eager")
    for i in range(5):
        if i in (2, 3):  # another tensor inside, another weight
            for model in models:
                if i == 2:
                    model.frozen.low = model.frozen.low.flip(0)  # type: ignore[attr-defined]
                else:
                    model.frozen = nn.Parameter(halves(4), requires_grad=False)
        assert torch.equal(train(models[0], optimizers[0], batch(i)), step(models[1], optimizers[1], batch(i)))
        assert torch.equal(models[0].trained.weight, models[1].trained.weight)
        assert len(step.graphs) == 1


def test_a_form_builds_a_wrapper_without_contents() -> None:
    held = Halves(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(()), False)
    built: Any = copy.deepcopy(form_of(held)).build()
    assert is_wrapper(built)
    assert type(built) is Halves
    assert (built.shape, built.low.shape, built.signed) == (held.shape, held.low.shape, False)
    assert not is_wrapper(torch.ones(2))
    assert not is_wrapper(nn.Parameter(torch.ones(2)))


@dataclass
class Form:
    signed: bool
    size: torch.Size


class Described(Halves):
    """One whose class makes a new description each time, like NF4 tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["low", "scale"], [Form(self.signed, self.low.shape)]


def test_descriptions_are_compared_by_what_they_say() -> None:
    low, scale = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(())
    assert structure_of(Described(low, scale, True)) == structure_of(Described(low * 2, scale, True))
    assert structure_of(Described(low, scale, True)) != structure_of(Described(low, scale, False))


def test_values_of_tensors_that_depend_on_no_input_are_plain_numbers() -> None:
    def rates(x: Tensor) -> tuple[Tensor, list[float]]:
        found = sorted((torch.linspace(0.0, 0.3, 4) * 2).tolist(), reverse=True)
        picked = torch.arange(6).reshape(2, 3)[1, 2].item()
        return x * found[0] + range(10)[picked], found  # type: ignore[call-overload]

    step = ws.compile(rates, lower="eager")
    for i in range(2):
        expected, numbers = rates(batch(i))
        result, found = step(batch(i))
        assert torch.equal(result, expected)
        assert found == numbers
        assert all(type(each) is float for each in found)
    assert len(step.graphs) == 1


def on_a_rank(rank: int) -> bool:
    model, optimizer, train = world()
    step = ws.compile(train, lower="eager", parallel=ws.Replicate(dist.init_device_mesh("cpu", (2,))))
    eager = world()
    for i in range(3):
        step(batch(2 * i + rank))
        eager[1].zero_grad()
        eager[0](batch(2 * i + rank)).square().mean().backward()
        for p in eager[0].parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= 2
        eager[1].step()
    assert_same((model, optimizer), eager)
    return True


@pytest.mark.long  # two ranks; one process, above, to the bit
def test_replicated_over_two_ranks_such_state_is_that_of_eager() -> None:
    assert run_ranks(on_a_rank, 2) == [True, True]
