"""`ws.check` says that correct steps are correct, and leaves nothing changed."""

from __future__ import annotations

import contextvars
import os
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from cases import buffers_and_randomness, gradients, networks, optimizers, precision, schedules, structure
from cases.parts import adamw, mlp, train_step
from harness import SEED, Case, batch_of, cases_on, device, differences, frame
from wholestep.debug.check.check_calls import CheckedCall, check_calls

EVERY = 12
CASES = [buffers_and_randomness, gradients, networks, optimizers, precision, schedules, structure]


def some(*groups: list[Case]) -> list[Any]:
    """Every twelfth case of each group: all of them take minutes, and ran when this was written."""
    return [param for group in groups for param in cases_on("cpu", group)[::EVERY]]


@pytest.mark.parametrize("each", some(*(group.CASES for group in CASES)))
def test_a_correct_step_is_equal_to_the_bit_and_no_state_changes(each: Case) -> None:
    torch.manual_seed(SEED)
    run = each.make(device())
    step = ws.compile(run.step, **each.options)
    calls = [CheckedCall(step.__wholestep_function__, run.arguments(i), run.keywords(i)) for i in range(3)]
    before = frame("before", None, run.watch, [(call.args, call.kwargs) for call in calls])
    report = check_calls(step, calls)
    after = frame("after", None, run.watch, [(call.args, call.kwargs) for call in calls])
    assert report.exact, str(report)
    assert differences(before, after) == []
    assert report.graphs <= 3, report.recompiles


def test_the_report_prints_a_row_for_each_part_and_the_cost() -> None:
    model = nn.Sequential(mlp(device(), dropout=0.5), nn.BatchNorm1d(4))
    report = ws.check(train_step, model, adamw(model), batch_of(device(), 0, 5, 6))
    text = str(report)
    for part in ("result", "parameters", "buffers", "optimizer state", "RNG", "Python attributes"):
        assert report[part].status == ws.debug.Status.EQUAL
        assert part in text
    assert report.graphs == 2
    assert len(report.recompiles) == 1
    assert report.recompiles[0] in text
    assert report.eager is not None
    assert report.compiled is not None
    assert report.eager.peak_bytes
    assert report.compiled.peak_bytes
    assert text.splitlines()[-1] == "ok: equal to the bit"
    assert max(map(len, text.splitlines())) < 160
    report.raise_if_different()


def test_gradients_that_remain_are_a_row() -> None:
    def accumulate(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    model = mlp(device())
    report = ws.check(accumulate, model, batch_of(device(), 0, 5, 6), steps=4)
    assert report["gradients"].compared >= 4
    assert report.exact
    assert all(p.grad is None for p in model.parameters())


def test_batches_come_as_one_argument_or_as_several() -> None:
    model = mlp(device())
    optimizer = adamw(model)

    def two(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def named(model: nn.Module, optimizer: torch.optim.Optimizer, *, x: Tensor, y: Tensor) -> Tensor:
        return two(model, optimizer, x, y)

    xs = [batch_of(device(), i, 5, 6) for i in range(3)]
    pairs = [(x, batch_of(device(), i, 5, 4)) for i, x in enumerate(xs)]
    assert ws.check(train_step, model, optimizer, batches=xs).exact
    assert ws.check(two, model, optimizer, batches=pairs).exact
    assert ws.check(two, model, optimizer, batches=(pair for pair in pairs), steps=2).steps == 2
    assert ws.check(named, model, optimizer, batches=[{"x": x, "y": y} for x, y in pairs]).exact
    assert ws.check(named, model, optimizer, x=pairs[0][0], kwargs={"y": pairs[0][1]}).exact


def test_a_scheduler_between_calls_runs_and_is_restored() -> None:
    model = mlp(device())
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    before = scheduler.state_dict()
    report = ws.check(train_step, model, optimizer, batch_of(device(), 0, 5, 6), between=scheduler.step)
    assert report.exact
    assert report.graphs == 2
    assert scheduler.state_dict() == before
    assert optimizer.param_groups[0]["lr"] == 1e-2


class Everything:
    """A trainer with state of every kind that Python has."""

    calls = 0
    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.other = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.generator = torch.Generator().manual_seed(3)
        self.step_number = 0
        self.history: list[Any] = []
        self.queue: deque[int] = deque([1, 2])
        self.array = np.arange(4.0)
        self.slot = 1

    def train_step(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        [scale] = self.other.param_groups[0]["params"]
        loss = (self.model(x + noise) * scale).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.other.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.other.zero_grad()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.ema[name].lerp_(p, 0.1)
        self.step_number += 1
        x.mul_(0.5)
        return loss


def state_of(trainer: Everything, x: Tensor) -> Any:
    return frame("state", None, {**vars(trainer), "slot": trainer.slot, "calls": Everything.calls}, (x,)).seen


def test_a_trainer_method_with_all_kinds_of_state_is_checked_and_restored() -> None:
    trainer, x = Everything(), batch_of(device(), 0, 5, 6)
    identities = {id(t) for t in [*trainer.model.parameters(), *trainer.ema.values(), trainer.optimizer]}
    versions = [p._version for p in trainer.model.parameters()]
    before = state_of(trainer, x)
    report = ws.check(trainer.train_step, x, steps=4)
    assert report.exact, str(report)
    assert state_of(trainer, x) == before
    assert {id(t) for t in [*trainer.model.parameters(), *trainer.ema.values(), trainer.optimizer]} == identities
    assert [p._version for p in trainer.model.parameters()] == versions


COUNT = 0
WORD: contextvars.ContextVar[str] = contextvars.ContextVar("WORD", default="before")


class Meddler:
    """Changes everything that it can reach, and then raises."""

    total = 1
    __slots__ = ("items", "late", "model", "numbers")

    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)
        self.items = {"a": [1, {2, 3}], "q": deque([1])}
        self.numbers = np.zeros(3)

    def step(self, x: Tensor, fails: bool = True) -> Tensor:
        global COUNT
        COUNT += 1
        Meddler.total += 1
        Meddler.new = 5  # type: ignore[attr-defined]
        self.late = 1
        self.items["a"][1].add(9)  # type: ignore[index,union-attr]
        self.items["q"].clear()  # type: ignore[union-attr]
        self.items["b"] = 3  # type: ignore[assignment]
        self.numbers[1] = 7
        os.environ["MEDDLED"] = "1"
        random.random()
        np.random.rand()
        torch.rand(1)
        WORD.set("after")
        with torch.no_grad():
            self.model.weight.add_(1)
            self.model.bias.data = torch.ones(3)
            x.mul_(2)
        self.model.weight.grad = torch.ones(3, 3)
        self.model.weight.mark = "x"  # type: ignore[attr-defined]
        self.model.extra = nn.Linear(2, 2)
        self.model.requires_grad_(False)
        if fails:
            raise KeyError("on purpose")
        return x


def meddled(it: Meddler, x: Tensor) -> dict[str, Any]:
    watch = {"model": it.model, "items": repr(it.items), "numbers": it.numbers, "has": hasattr(it, "late")}
    seen: dict[str, Any] = frame("state", None, watch, (x,)).seen
    return seen | {
        "count": COUNT,
        "class": (Meddler.total, hasattr(Meddler, "new")),
        "environ": "MEDDLED" in os.environ,
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),
        "word": WORD.get(),
        "mark": hasattr(it.model.weight, "mark"),
        "bias": it.model.bias.data_ptr(),
    }


def test_the_state_is_restored_when_eager_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.compiled_step import CompiledStep

    monkeypatch.setattr(CompiledStep, "_prepare", lambda *given: None)  # capture would refuse before anything runs
    it, x = Meddler(), torch.ones(3)
    before = meddled(it, x)
    with pytest.raises(KeyError, match="on purpose"):
        ws.check(it.step, x)
    assert meddled(it, x) == before


def test_a_step_that_capture_refuses_does_not_run_at_all() -> None:
    it, x = Meddler(), torch.ones(3)
    before = meddled(it, x)
    with pytest.raises(ws.errors.CaptureError):
        ws.check(it.step, x, fails=False)
    assert meddled(it, x) == before


def test_a_plan_is_refused_with_what_to_do_instead() -> None:
    mesh: Any = object.__new__(ws.Replicate)
    with pytest.raises(ws.errors.OptionError, match="cannot serve as the reference"):
        ws.check(train_step, parallel=mesh)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3"])
def test_an_invalid_number_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(ws.errors.OptionError, match="steps="):
        ws.check(train_step, steps=steps)


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(ws.errors.OptionError, match="1 batches for steps=3"):
        ws.check(train_step, mlp(device()), None, batches=[torch.ones(5, 6)])


def test_a_compiled_step_is_checked_with_its_options_and_keeps_its_graphs() -> None:
    model = mlp(device())
    optimizer = adamw(model)
    x = batch_of(device(), 0, 5, 6)
    step = ws.compile(train_step, lower="debug", check_first=2)
    report = ws.check(step, model, optimizer, x)
    assert report.lower == "debug"
    assert report.exact
    assert step.graphs == []
    with pytest.raises(ws.errors.OptionError, match="compiled already"):
        ws.check(step, model, optimizer, x, lower="eager")


def test_a_keyword_that_is_an_option_and_a_parameter_is_refused_and_kwargs_is_clear() -> None:
    def step(x: Tensor, name: str = "") -> Tensor:
        return x * (2 if name == "two" else 1)

    with pytest.raises(ws.errors.OptionError, match="name: an option"):
        ws.check(step, torch.ones(2), name="two")
    assert ws.check(step, torch.ones(2), kwargs={"name": "two"}).ok


def test_nondeterminism_of_eager_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wholestep.debug.check import check_calls

    original, runs = check_calls.run_eager, 0

    def unstable(call: CheckedCall) -> Any:
        nonlocal runs
        runs += 1
        result = original(call)
        with torch.no_grad():
            call.args[0][0].weight.mul_(1 + 1e-6 * runs)
        return result

    monkeypatch.setattr(check_calls, "run_eager", unstable)
    model = mlp(device())
    report = ws.check(train_step, model, adamw(model), batch_of(device(), 0, 5, 6))
    assert report.ok, str(report)
    assert report["parameters"].status is ws.debug.Status.ROUNDING
    assert report["parameters"].worst is not None
    assert "eager differs from itself" in report["parameters"].worst.text
    assert report["optimizer state"].status is ws.debug.Status.EQUAL
