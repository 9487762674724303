"""`ws.compile(check_first=N)`: the first N calls are eager's to the bit, and one that differs leaves no trace."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import wholestep as ws
from cases import buffers_and_randomness, gradients, optimizers, precision, schedules, structure
from cases.parts import adamw, mlp, train_step
from harness import Case, assert_parity, batch_of, cases_on, device, differences, frame
from wholestep.runtime.executor import Executor

GROUPS = [buffers_and_randomness, gradients, optimizers, precision, schedules, structure]
EVERY = 15


@pytest.mark.parametrize("each", [p for group in GROUPS for p in cases_on("cpu", group.CASES)[2::EVERY]])
def test_checked_and_later_calls_equal_eager(each: Case) -> None:
    step = assert_parity(dataclasses.replace(each, options={**each.options, "check_first": 3}, steps=5), device())
    assert "_run" not in vars(step)


@ws.passes.graph_optimization_pass(numerics="exact")
def doubles_the_mean(gm: fx.GraphModule) -> None:
    """A pass with a fault."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mean.default):
        node.target = torch.ops.aten.sum.default


def test_a_call_that_differs_raises_and_restores_the_state() -> None:
    model = nn.Sequential(mlp(device(), dropout=0.5), nn.BatchNorm1d(4))
    optimizer = adamw(model)
    x = batch_of(device(), 0, 5, 6)
    watch = {"model": model, "optimizer": optimizer}
    step = ws.compile(train_step, passes=[doubles_the_mean], check_first=2)
    before = frame("before", None, watch, (x,))
    for _ in range(3):
        with pytest.raises(ws.errors.CheckError, match="WS-CHECK") as raised:
            step(model, optimizer, x)
        assert differences(before, frame("after", None, watch, (x,))) == []
        assert not optimizer.state
    report = raised.value.report
    assert isinstance(report, ws.debug.CheckReport)
    assert report.first_difference is not None
    assert report.first_difference.pass_name == "doubles_the_mean"
    assert raised.value.location is not None
    assert "mean()" in raised.value.location.text


def test_a_fault_after_the_checked_calls_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(device())
    optimizer = adamw(model)
    step = ws.compile(train_step, check_first=2)
    for i in range(2):
        step(model, optimizer, batch_of(device(), i, 5, 6))
    assert "_run" not in vars(step)
    original = Executor.run
    monkeypatch.setattr(Executor, "run", lambda *given: original(*given) + 1)
    step(model, optimizer, batch_of(device(), 3, 5, 6))


def test_the_second_call_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(device())
    optimizer = adamw(model)
    step = ws.compile(train_step, check_first=3)
    step(model, optimizer, batch_of(device(), 0, 5, 6))
    after_one = frame("one", None, {"model": model, "optimizer": optimizer})
    original = Executor.run
    monkeypatch.setattr(Executor, "run", lambda *given: original(*given) + 1)
    with pytest.raises(ws.errors.CheckError, match="result"):
        step(model, optimizer, batch_of(device(), 1, 5, 6))
    assert differences(after_one, frame("now", None, {"model": model, "optimizer": optimizer})) == []
    monkeypatch.undo()
    step(model, optimizer, batch_of(device(), 1, 5, 6))
    assert len(step.graphs) == 2


class Learner:
    """A compiled method."""

    def __init__(self) -> None:
        self.model = mlp(device())
        self.optimizer = adamw(self.model)
        self.calls = 0

    @ws.compile(lower="eager", check_first=2)
    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.calls += 1
        return loss


def test_a_method_is_checked_and_its_attributes_count_once() -> None:
    torch.manual_seed(0)
    learner = Learner()
    for i in range(4):
        learner.step(batch_of(device(), i, 5, 6))
    assert learner.calls == 4


def test_an_error_of_the_step_itself_reaches_the_caller() -> None:
    model = mlp(device())

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            model[0].weight.mul_(2)
        return model(x)

    compiled = ws.compile(step, check_first=1)
    before = frame("before", None, {"model": model})
    with pytest.raises(RuntimeError, match="same reduction dim"):
        compiled(model, torch.ones(5, 7))
    assert differences(before, frame("after", None, {"model": model})) == []
    assert compiled(model, torch.ones(5, 6)).shape == (5, 4)


def test_a_compiled_step_inside_of_another_is_inlined() -> None:
    inner = ws.compile(train_step, check_first=1)

    def outer(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
        return inner(model, optimizer, x), inner(model, optimizer, x * 2)

    model = mlp(device())
    step = ws.compile(outer, check_first=2)
    for i in range(3):
        step(model, adamw(model), batch_of(device(), i, 5, 6))
    assert not inner.graphs


def test_a_result_requires_grad_in_checked_and_later_calls() -> None:
    model = mlp(device())
    step = ws.compile(lambda model, x: model(x).mean(), check_first=1)
    for _ in range(2):
        result = step(model, batch_of(device(), 0, 5, 6))
        assert result.requires_grad
        with pytest.raises(RuntimeError, match="WS-NO-GRAPH"):
            result.backward()


def test_a_checked_step_is_freed_with_its_model() -> None:
    model = mlp(device())
    step = ws.compile(train_step, check_first=2)
    for i in range(2):
        step(model, adamw(model), batch_of(device(), i, 5, 6))
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", [-1, 1.0, "2", None, True])
def test_an_invalid_number_of_checked_calls_is_refused(value: Any) -> None:
    with pytest.raises(ws.errors.OptionError, match="check_first="):
        ws.compile(train_step, check_first=value)


def test_a_plan_is_refused() -> None:
    with pytest.raises(ws.errors.OptionError, match="no reference"):
        ws.compile(train_step, check_first=1, parallel=object.__new__(ws.Replicate))


def test_the_last_step_of_training_is_checked_and_flushed() -> None:
    model = mlp(device())
    step = ws.compile(train_step, check_first=2)
    step(model, adamw(model), batch_of(device(), 0, 5, 6), last_train_step=True)
    assert not step.has_pending


def test_checked_regions_use_the_rng_of_eager_by_default() -> None:
    config = ws.compile(train_step, check_first=1).options.lower_options.config
    assert config == {"fallback_random": True}
    own = {"config": {"fallback_random": False}}
    assert ws.compile(train_step, check_first=1, lower_options=own).options.lower_options.config == own["config"]
    assert ws.compile(train_step).options.lower_options.config == {}
