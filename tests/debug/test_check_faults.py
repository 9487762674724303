"""Faults on purpose: `ws.check` finds each, names the part and the user's line, and leaves nothing changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import wholestep as ws
from debug.seeded import call_of, changes_a_constant, seeded, swaps, targets, train_step
from harness import differences, frame, marked_line
from wholestep.guards.all_guards import Guards
from wholestep.ir.meta import node_meta
from wholestep.runtime.executor import Executor

Fault = Callable[[Any, list[Any], Any], Any]
aten = torch.ops.aten


class Trainer:
    """A step with state of every kind, each written on a line of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.calls = 0
        self.mode = "quiet"
        self.ema = torch.zeros(2, 4)

    def step(self, x: Tensor) -> Tensor:
        out = self.model(x) * (3.0 if self.mode == "loud" else 2.0)
        loss = out.square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.ema.lerp_(self.model[3].weight.detach(), 0.1)
        self.calls += 1
        x.mul_(0.5)
        return loss

    def watched(self) -> dict[str, Any]:
        return {**vars(self), "lr": self.optimizer.param_groups[0]["lr"]}


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(Trainer.step)
    return first + next(i for i, line in enumerate(lines) if text in line)


def checked(trainer: Trainer, x: Tensor, **options: Any) -> ws.debug.CheckReport:
    """The report of a check that has to find a difference and to change nothing."""
    before = frame("before", None, trainer.watched(), (x,))
    report = ws.check(trainer.step, x, **options)
    assert differences(before, frame("after", None, trainer.watched(), (x,))) == []
    assert not report.ok, str(report)
    assert not report
    assert "DIFFERENT" in str(report)
    with pytest.raises(ws.errors.CheckError, match="WS-CHECK") as raised:
        report.raise_if_different()
    assert raised.value.report is report
    return report


def different(report: ws.debug.CheckReport) -> set[str]:
    return {str(row.part) for row in report.rows if row.status is ws.debug.Status.DIFFERENT}


def inject(monkeypatch: pytest.MonkeyPatch, fault: Fault, from_run: int = 1) -> None:
    """Let a fault happen after a graph has run, from the given run on."""
    original = Executor.run
    runs = 0

    def run(self: Executor, inputs: list[Any], leaves: list[Any]) -> Any:
        nonlocal runs
        runs += 1
        result = original(self, inputs, leaves)
        return fault(self, leaves, result) if runs >= from_run else result

    monkeypatch.setattr(Executor, "run", run)


def write(where: Callable[[Trainer], Tensor]) -> Callable[[Trainer], Fault]:
    """A tensor that gets another value than the graph gave it."""

    def make(trainer: Trainer) -> Fault:
        def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
            with torch.no_grad():
                where(trainer).view(-1)[0] += 1
            return result

        return fault

    return make


def stale(where: Callable[[Trainer], Tensor]) -> Callable[[Trainer], Fault]:
    """A tensor whose write back is lost: it keeps what it had when the trainer was made."""

    def make(trainer: Trainer) -> Fault:
        old = where(trainer).detach().clone()

        def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
            where(trainer).data.copy_(old)
            return result

        return fault

    return make


def other_result(trainer: Trainer) -> Fault:
    return lambda entry, leaves, result: result + 1


def other_random_numbers(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        torch.rand(1)
        return result

    return fault


def lost_attribute(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.calls -= 1
        return result

    return fault


def lost_schedule(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.scheduler.last_epoch -= 1
        return result

    return fault


def lost_gradient(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.model[0].weight.grad = None
        return result

    return fault


def other_learning_rate(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.optimizer.param_groups[0]["lr"] *= 1.5
        return result

    return fault


def another_momentum(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.optimizer.state[trainer.model[3].bias]["momentum_buffer"].add_(1)
        return result

    return fault


def fake_left_behind(trainer: Trainer) -> Fault:
    from torch._subclasses import FakeTensorMode

    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.ema = FakeTensorMode().from_tensor(trainer.ema)
        return result

    return fault


def frozen_parameter(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.model[0].bias.requires_grad_(False)
        return result

    return fault


def signed_zero(trainer: Trainer) -> Fault:
    def fault(entry: Any, leaves: list[Any], result: Any) -> Any:
        trainer.ema.copy_(torch.where(trainer.ema == 0, -0.0, trainer.ema))
        return result

    return fault


FAULTS: list[tuple[str, Callable[[Trainer], Fault], str, str]] = [
    ("a parameter", write(lambda t: t.model[0].weight), "parameters", "self.optimizer.step"),
    ("a buffer", write(lambda t: t.model[1].running_mean), "buffers", "self.model(x)"),
    ("a lost write of a parameter", stale(lambda t: t.model[3].bias), "parameters", "self.optimizer.step"),
    ("a stale buffer", stale(lambda t: t.model[1].running_var), "buffers", "self.model(x)"),
    ("a stale count of batches", stale(lambda t: t.model[1].num_batches_tracked), "buffers", "self.model(x)"),
    ("a lost write to a captured tensor", stale(lambda t: t.ema), "Python attributes", "self.ema.lerp_"),
    ("another result", other_result, "result", "square().mean()"),
    ("random numbers", other_random_numbers, "RNG", ""),
    ("a lost attribute", lost_attribute, "Python attributes", ""),
    ("a lost step of a scheduler", lost_schedule, "schedulers, scalers", ""),
    ("a lost gradient", lost_gradient, "gradients", "self.model(x)"),
    ("another learning rate", other_learning_rate, "optimizer state", ""),
    ("another momentum", another_momentum, "optimizer state", "self.optimizer.step"),
    ("a fake tensor", fake_left_behind, "Python attributes", "self.ema.lerp_"),
    ("a frozen parameter", frozen_parameter, "parameters", ""),
]


@pytest.mark.parametrize(("make", "part", "line"), [pytest.param(*rest, id=name) for name, *rest in FAULTS])
def test_a_fault_after_the_graph_is_reported_in_its_row(
    make: Callable[[Trainer], Fault], part: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, x = Trainer(), torch.ones(6, 4)
    monkeypatch.setattr("wholestep.debug.check.report.bisect", lambda *given, **options: ws.debug.Found("nothing"))
    inject(monkeypatch, make(trainer))
    report = checked(trainer, x)
    assert different(report) == {part}, str(report)
    assert report.steps == 1
    assert report.first_difference is not None
    if line:
        assert report.first_difference.location is not None, str(report)
        assert report.first_difference.location.line == line_of(line), str(report)


def test_a_lost_write_to_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, x = Trainer(), torch.ones(6, 4)
    monkeypatch.setattr("wholestep.debug.check.report.bisect", lambda *given, **options: ws.debug.Found("nothing"))
    inject(monkeypatch, lambda entry, leaves, result: (leaves[0].mul_(2), result)[1])
    report = checked(trainer, x)
    assert different(report) == {"batch"}
    assert report.first_difference is not None
    assert report.first_difference.location is not None
    assert report.first_difference.location.line == line_of("x.mul_")


def test_a_fault_in_a_later_call_is_found_in_that_call(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, x = Trainer(), torch.ones(6, 4)
    inject(monkeypatch, write(lambda t: t.model[0].weight)(trainer), from_run=3)
    report = checked(trainer, x, steps=5)
    assert report.steps == 3
    assert report["parameters"].call == 3
    assert "3 calls of 5, until the first difference" in str(report)


def test_a_guard_that_misses_a_changed_scalar_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, x = Trainer(), torch.ones(6, 4)
    original = Guards.hold

    def lenient(self: Guards, *given: Any) -> Any:
        mode, trainer.mode = trainer.mode, "quiet"
        try:
            return original(self, *given)
        finally:
            trainer.mode = mode

    monkeypatch.setattr(Guards, "hold", lenient)

    def between() -> None:
        trainer.mode = "loud" if trainer.calls == 2 else "quiet"

    report = checked(trainer, x, steps=4, between=between)
    assert "result" in different(report)
    assert report.steps == 3
    found = report.first_difference
    assert found is not None
    assert found.stage == "guard"
    assert found.location is not None
    assert found.location.line == line_of('== "loud"')
    assert trainer.mode == "quiet"


def bugs(bug: Any, every: int) -> list[Any]:
    graph = ws.capture(train_step, *call_of()).gm.graph
    return [pytest.param(bug, name, id=f"{bug.__name__}-{name}") for name in targets(graph, bug)[::every]]


@pytest.mark.parametrize(("bug", "name"), [*bugs(swaps, 3), *bugs(changes_a_constant, 2)])
def test_a_wrong_pass_is_named_with_its_node_and_line(bug: Any, name: str) -> None:
    call = call_of()
    graph = ws.capture(train_step, *call)
    right = next(node for node in graph.gm.graph.nodes if node.name == name)
    report = ws.check(train_step, *call, passes=[seeded(bug, name)])
    assert not report.ok
    assert report.steps == 1
    found = report.first_difference
    assert found is not None, str(report)
    assert (found.stage, found.pass_name, found.node) == ("pass", "wrong_pass", name)
    where = node_meta(right).location
    assert where is not None
    assert found.location is not None
    assert (found.location.file, found.location.line) == (where.file, where.line)
    assert str(where) in str(report)


def test_the_error_names_the_part_the_node_and_the_line() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()  # <- here
        loss.backward()
        return loss

    @ws.passes.graph_optimization_pass(numerics="exact")
    def sum_instead(gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.mean.default):
            node.target = aten.sum.default

    report = ws.check(step, nn.Linear(3, 3), torch.ones(2, 3), passes=[sum_instead])
    with pytest.raises(ws.errors.CheckError) as raised:
        report.raise_if_different()
    message = str(raised.value)
    assert "differs from eager in result" in message
    assert raised.value.location is not None
    assert raised.value.location.line == marked_line(step)
    assert "aten.sum.default" in raised.value.node


def test_a_compiled_step_that_raises_is_an_error_and_the_state_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, x = Trainer(), torch.ones(6, 4)

    def fails(entry: Any, leaves: list[Any], result: Any) -> Any:
        raise ZeroDivisionError("inside")

    inject(monkeypatch, fails)
    before = frame("before", None, trainer.watched(), (x,))
    with pytest.raises(ws.errors.CheckError, match="raises ZeroDivisionError: inside"):
        ws.check(trainer.step, x)
    assert differences(before, frame("after", None, trainer.watched(), (x,))) == []


def test_ctrl_c_during_a_check_restores_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, x = Trainer(), torch.ones(6, 4)

    def interrupted(entry: Any, leaves: list[Any], result: Any) -> Any:
        raise KeyboardInterrupt

    inject(monkeypatch, interrupted, from_run=2)
    before = frame("before", None, trainer.watched(), (x,))
    with pytest.raises(KeyboardInterrupt):
        ws.check(trainer.step, x)
    assert differences(before, frame("after", None, trainer.watched(), (x,))) == []


def test_the_sign_of_zero_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()

    def step(x: Tensor) -> Tensor:
        trainer.ema.mul_(1.0)
        return x.sum()

    inject(monkeypatch, signed_zero(trainer))
    report = ws.check(step, torch.ones(3))
    assert different(report) == {"Python attributes"}
    assert "zeros of another sign" in str(report)
