"""Numbers that the step takes out of tensors and only returns, keeps or computes with: filled in after the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from capture.refused import assert_points_at, assert_refused
from docs.rows.page import network, run_of, same, train
from harness import Case, Run, assert_parity, batch_of, device

TOTAL = 0.0


def returns_everything(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    loss = train(model, optimizer, x).detach()
    hits = (x > 0).sum()
    return {
        "item": loss.item(),
        "float": float(loss),
        "int": int(hits),
        "truncated": int(loss * 100),
        "bool": (loss > 1).item(),
        "list": x[0].tolist(),
        "nested": x[:2].tolist(),
        "none": x[:0].tolist(),
        "zero_dim": loss.tolist(),
        "tensor": loss,
    }


def computes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    loss = train(model, optimizer, x).detach()
    hits, count = (x > 0).sum().item(), x.numel()
    rates = [part.item() for part in x.abs().mean(0)]
    return (
        hits / count,
        100.0 * hits // count,
        round(loss.item(), 3),
        round(hits / count),
        -(loss.item() ** 2),
        math.exp(loss.item()),
        math.exp(loss),
        math.sqrt(loss.item() + 1),
        sum(rates) / len(rates),
        abs(loss.item() - 3),
        divmod(hits, 7),
        not_a_branch(loss.item()),
        loss.item() < 0.5,
        loss.item() * optimizer.param_groups[0]["lr"],
        type(loss.item()) is float and isinstance(hits, int),
    )


def not_a_branch(value: float) -> tuple[float, ...]:
    return (value, value + 1, 2 - value, value * 2, 1 / value)


def takes_values_at_their_time(model: Any, optimizer: Optimizer, x: Tensor) -> Any:
    weight = model[0].weight
    before = weight[0, 0].item(), weight.sum().item(), weight.detach()[1].tolist()
    model.seen[0] += 1
    early = model.seen[0].item(), model.seen.tolist()
    loss = train(model, optimizer, x)
    model.seen[0] += 1
    y = torch.zeros(3)
    first = y[0].item()
    y += loss.detach()
    return before, weight[0, 0].item(), weight.sum().item(), early, model.seen[0].item(), first, y[0].item()


def scales_tensors(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    count = (x > 0).sum().item()
    norm = x.norm().item()
    optimizer.zero_grad()
    loss = model(x / norm).square().sum() / max_of(count)
    loss.backward()
    optimizer.step()
    weights = torch.tensor([norm, 2.0, float(count)])
    return loss, x[:, 0] * float(norm) + weights.sum() + torch.tensor(norm), x.add(x, alpha=count)


def max_of(count: int) -> int:
    return count + 1


def network_with_counts() -> nn.Module:
    model = network()
    model.register_buffer("seen", torch.zeros(2))
    return model


@pytest.mark.parametrize("body", [returns_everything, computes, scales_tensors], ids=lambda body: body.__name__)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")
def test_values_of_tensors_are_those_of_eager(body: Any) -> None:
    same(body)


def test_a_value_is_that_of_the_time_when_it_was_taken() -> None:
    same(takes_values_at_their_time, model=network_with_counts)


def returns_the_loss(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    return train(model, optimizer, x).item()


def test_a_single_number_is_a_result() -> None:
    step = same(returns_the_loss)
    [output] = [spec for spec in step.last.signature.outputs if spec.kind is ws.ir.OutputKind.LOGGED]
    assert output.tensor.shape == ()
    again = ws.ir.StepGraph.from_json(step.last.to_json())
    assert again.fingerprint() == step.last.fingerprint()
    assert "read after the run from out0" in step.last.print_readable(print_output=False)


class Meter:
    """The meter of PyTorch's ImageNet example."""

    def __init__(self) -> None:
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def test_meters_count_on() -> None:
    def make(where: torch.device) -> Run:
        run = run_of(lambda model, optimizer, x: None)
        model, optimizer = run.watch["model"], run.watch["optimizer"]
        losses, top = Meter(), Meter()

        def step(x: Tensor) -> float:
            loss = train(model, optimizer, x)
            losses.update(loss.item(), x.size(0))
            top.update((x > 0).float().mean().item() * 100)
            return losses.avg

        seen = {"losses": vars(losses), "top": vars(top)}
        return Run(step, run.arguments, {**run.watch, **seen})

    assert_parity(Case("meters", make, steps=6, graphs=3), device())


def test_attributes_variables_and_globals_add_values_up() -> None:
    def make(where: torch.device) -> Run:
        global TOTAL
        TOTAL = 0.0
        run = run_of(lambda model, optimizer, x: None)
        model, optimizer = run.watch["model"], run.watch["optimizer"]
        model.running, nearby = 0.0, 0
        rates = 0.0

        def step(x: Tensor) -> Any:
            global TOTAL
            nonlocal nearby, rates
            loss = train(model, optimizer, x)
            model.running = 0.9 * model.running + 0.1 * loss.item()
            nearby += int((x > 0).sum())
            TOTAL += loss.item()
            rates += optimizer.param_groups[0]["lr"]
            return loss, nearby

        def after(i: int, result: Any) -> None:
            seen.append((model.running, nearby, TOTAL, rates))
            optimizer.param_groups[0]["lr"] *= 0.5

        seen: list[Any] = []
        return Run(step, run.arguments, {**run.watch, "seen": seen}, after=after)

    assert_parity(Case("running", make, steps=6, graphs=3), device())


def test_an_attribute_that_takes_a_new_learning_rate_counts_on() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = network()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.sum_of_rates = 0.0

        def step(self, x: Tensor) -> Tensor:
            self.sum_of_rates = self.sum_of_rates + self.optimizer.param_groups[0]["lr"]
            return train(self.model, self.optimizer, x)

    def make(where: torch.device) -> Run:
        trainer = Trainer()
        return Run(trainer.step, lambda i: (batch_of(where, i, 5, 6),), {"trainer": vars(trainer)})

    assert_parity(Case("rates", make, steps=5), device())


def test_a_bool_that_the_step_sets_and_reads_is_a_guard() -> None:
    class Watch:
        def __init__(self) -> None:
            self.model, self.high = network(), False

        def step(self, x: Tensor) -> Any:
            y = self.model(x).sum() * (2 if self.high else 1)
            self.high = (x.sum() > 0).item()
            return y.item()

    def make(where: torch.device) -> Run:
        watch = Watch()
        return Run(watch.step, lambda i: (batch_of(where, i, 5, 6),), {"watch": vars(watch)})

    assert_parity(Case("bool", make, steps=8, graphs=2), device())


def test_the_loss_scale_after_update_is_a_result() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item(), scaler.get_scale()

    results = []
    for compiled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        run = run_of(body)
        step = ws.compile(run.step) if compiled else run.step
        results.append([step(*run.arguments(i)) for i in range(5)])
    assert results[0] == results[1]


def test_what_a_scheduler_makes_of_the_rates_is_computed_with_afterwards() -> None:
    def make(where: torch.device) -> Run:
        run = run_of(lambda model, optimizer, x: None)
        model, optimizer = run.watch["model"], run.watch["optimizer"]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x: Tensor) -> Any:
            loss = train(model, optimizer, x)
            before = optimizer.param_groups[0]["lr"]
            scheduler.step()
            between = scheduler.get_last_lr()[0]
            scheduler.step()
            return loss.item(), before, between * 10, optimizer.param_groups[0]["lr"] / 2, scheduler.get_last_lr()

        return Run(step, run.arguments, run.watch)

    assert_parity(Case("rates", make, steps=5), device())


def test_an_executable_fills_values_in() -> None:
    run = run_of(returns_the_loss)
    (x,) = run.arguments(0)
    executable = ws.build(ws.capture(run.step, x), lower="eager")
    assert executable(x) == run_of(returns_the_loss).step(x)


def test_checks_compare_the_values() -> None:
    run = run_of(returns_the_loss)
    report = ws.check(run.step, batches=[run.arguments(i)[0] for i in range(3)], lower="eager")
    assert report.ok
    checked = run_of(returns_the_loss)
    step = ws.compile(checked.step, check_first=2)
    plain = run_of(returns_the_loss)
    assert [step(*checked.arguments(i)) for i in range(4)] == [plain.step(*plain.arguments(i)) for i in range(4)]


# Refused.


def branches(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    loss = train(model, optimizer, x)
    return loss * 2 if loss.item() > 1 else loss  # <- here


def takes_the_larger(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    loss = train(model, optimizer, x)
    return max(loss.item(), 0.5)  # <- here


def indexes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    train(model, optimizer, x)
    return [1, 2, 3][(x > 100).sum().item()]  # <- here


def looks_up(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    train(model, optimizer, x)
    return {0: "none"}.get((x > 100).sum().item())  # <- here


FORMAT = "%.3f"


def formats_by_percent(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    return FORMAT % train(model, optimizer, x).item()  # <- here


def makes_an_array(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    return np.mean([train(model, optimizer, x).item()])  # <- here


def stacks(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    (loss,) = (train(model, optimizer, x),)
    return x.new_zeros(3).fill_(0).index_fill(0, torch.tensor([0]), loss.item()), loss.item() and 3  # <- here


@pytest.mark.parametrize(
    "step", [branches, takes_the_larger, indexes, looks_up, formats_by_percent, makes_an_array, stacks]
)
def test_code_that_needs_the_value_at_once_is_refused(step: Callable[..., Any]) -> None:
    assert_points_at(assert_refused(step, ws.errors.ItemError, ws.errors.ControlFlowError), step)


def writes_json(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    return json.dumps(train(model, optimizer, x).item())


def looks_at_the_class(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    kinds = {float: 2.0}
    return train(model, optimizer, x) * kinds.get(classes_of([x.mean().item()])[0], 1.0)


def classes_of(values: list[Any]) -> list[type]:
    return list(map(classify, values))


classify = __builtins__["type"] if isinstance(__builtins__, dict) else __builtins__.type  # type: ignore[index]


def test_code_that_can_tell_a_late_value_from_a_number_is_refused() -> None:
    said = assert_refused(looks_at_the_class, ws.errors.ItemError)
    assert "plain number" in said
    run = run_of(writes_json)
    with pytest.raises((TypeError, ws.errors.ItemError)):
        ws.compile(run.step)(*run.arguments(0))


def test_the_step_count_of_an_optimizer_is_in_no_guard() -> None:
    compiled = ws.compile(train)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        compiled(model, optimizer, torch.ones(2, 6))
    assert compiled.last is not None
    assert any("betas" in guard for guard in compiled.last.signature.guards)
    assert not [guard for guard in compiled.last.signature.guards if ".item()" in guard]
