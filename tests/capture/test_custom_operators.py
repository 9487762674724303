"""Operators of `torch.library` of every kind of alias: their kernels run as often as in eager, or they are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from capture.followed import assert_refused
from capture.operators import (
    composed,
    declared_input,
    doubled,
    effect,
    hidden_view,
    implicit,
    make,
    mixed,
    order,
    pieces,
    ran,
    returns_input,
    returns_view,
    rows,
    scaled,
    scaled_ran,
    sketched,
    tick,
    twin_,
    writes_and_adds,
    writes_and_returns,
    writes_list,
    writes_one,
)
from cases.parts import adamw, mlp
from harness import Case, Run, assert_frames_equal, assert_parity, batch_of, device, frame, marked_line
from selection import each_now


def training(body: Callable[[nn.Module, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A step whose loss is `body(model, x)`."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = body(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def uses_input(model: nn.Module, x: Tensor) -> Tensor:
    return model(returns_input(x)).square().mean()


def uses_declared_input(model: nn.Module, x: Tensor) -> Tensor:
    y = declared_input(x * 2)
    y.add_(1)  # a write to the input, as the schema says
    return model(declared_input(y)).square().mean()


def uses_sketched(model: nn.Module, x: Tensor) -> Tensor:
    return model(sketched(x) + x).square().mean()


def uses_view(model: nn.Module, x: Tensor) -> Tensor:
    return model(returns_view(x)).square().mean()


def uses_hidden_view(model: nn.Module, x: Tensor) -> Tensor:
    return model(hidden_view(x).t() * 2).square().mean()


def writes_temporary(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    writes_one(y)
    return model(y).square().mean()


def writes_what_nobody_reads(model: nn.Module, x: Tensor) -> Tensor:
    writes_one(x * 2)
    return model(x).square().mean()


def writes_returned(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    z = writes_and_returns(y)
    return model(y + z).square().mean()


def writes_a_list(model: nn.Module, x: Tensor) -> Tensor:
    y, z = x * 2, x * 3
    writes_list([y, z])
    return model(y + z).square().mean()


def writes_and_makes(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    z = writes_and_adds(y, x)
    return model(y * z).square().mean()


def has_effect(model: nn.Module, x: Tensor) -> Tensor:
    effect(x)
    loss = model(x).square().mean()
    effect(loss.detach())
    tick()
    return loss


def takes_no_tensor(model: nn.Module, x: Tensor) -> Tensor:
    return model(x + make(6)).square().mean()


def result_is_unused(model: nn.Module, x: Tensor) -> Tensor:
    doubled(x)
    return model(x).square().mean()


def called_twice_alike(model: nn.Module, x: Tensor) -> Tensor:
    return model(doubled(x) + doubled(x)).square().mean()


def takes_pieces(model: nn.Module, x: Tensor) -> Tensor:
    first, second = pieces(x)
    return model(first - second).square().mean()


def mixes_input_and_new(model: nn.Module, x: Tensor) -> Tensor:
    first, second = mixed(x)
    return model(first * second).square().mean()


def takes_rows(model: nn.Module, x: Tensor) -> Tensor:
    return model(torch.stack(rows(x)) * 2).square().mean()


def name_of_another(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    twin_(y)
    return model(y).square().mean()


def decomposes(model: nn.Module, x: Tensor) -> Tensor:
    return implicit(model(x)).square().mean()


KEPT = [
    uses_input,
    uses_declared_input,
    uses_sketched,
    uses_view,
    uses_hidden_view,
    writes_temporary,
    writes_what_nobody_reads,
    writes_returned,
    writes_a_list,
    writes_and_makes,
    has_effect,
    takes_no_tensor,
    result_is_unused,
    called_twice_alike,
    takes_pieces,
    mixes_input_and_new,
    takes_rows,
    name_of_another,
    decomposes,
]


def run_of(where: torch.device, step: Callable[..., Any]) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    return Run(step, lambda i: (model, optimizer, batch_of(where, i, 6, 6)), {"model": model, "optimizer": optimizer})


def calls_of(run: Run, step: Callable[..., Any], times: int) -> tuple[Counter[str], list[str]]:
    ran.clear()
    order.clear()
    for i in range(times):
        step(*run.arguments(i))
    return Counter(ran), list(order)


def assert_runs_as_often(body: Callable[..., Any], **options: Any) -> None:
    step = training(body)
    run = run_of(device(), step)
    eager = calls_of(run, run.step, 5)
    run = run_of(device(), step)
    assert calls_of(run, ws.compile(run.step, **options), 5) == eager


KEPT_NOW = """
    uses_input uses_sketched uses_hidden_view writes_temporary writes_what_nobody_reads writes_a_list writes_and_makes
    has_effect takes_no_tensor result_is_unused called_twice_alike mixes_input_and_new decomposes
""".split()


@pytest.mark.parametrize("body", each_now(KEPT, *KEPT_NOW), ids=lambda body: body.__name__)
def test_a_custom_operator_is_equal_to_eager_and_runs_as_often(body: Callable[..., Any]) -> None:
    assert_parity(Case(body.__name__, lambda where: run_of(where, training(body)), steps=5), device())
    assert_runs_as_often(body, lower="eager")


COMPILED = (
    *(uses_input, uses_sketched, writes_what_nobody_reads, has_effect, result_is_unused),
    *(called_twice_alike, takes_rows),
)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "body",
    each_now(COMPILED, "has_effect"),
    ids=lambda body: body.__name__,
)
def test_compiled_a_custom_operator_runs_as_often_and_in_order(body: Callable[..., Any]) -> None:
    assert_runs_as_often(body, lower="inductor")


def test_an_operator_with_a_backward_runs_in_both_directions() -> None:
    step = training(lambda model, x: scaled(model(scaled(x, 3.0)), 2.0).square().mean())
    assert_parity(Case("scaled", lambda where: run_of(where, step), steps=4), device())
    counts = []
    for compiled in (False, True):
        run = run_of(device(), step)
        scaled_ran.clear()
        function = ws.compile(step) if compiled else step
        for i in range(4):
            function(*run.arguments(i))
        counts.append(Counter(scaled_ran))
    assert counts[0] == counts[1] == Counter(forward=8, backward=4)


def test_an_operator_in_the_optimizer_runs_as_often() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    with torch.no_grad():
                        effect(parameter)
                        writes_one(parameter)
            return super().step()

    def make_run(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = Counting(model.parameters(), lr=0.1)
        step = training(lambda model, x: model(x).square().mean())
        return Run(step, lambda i: (model, optimizer, batch_of(where, i, 6, 6)), {"model": model})

    assert_parity(Case("optimizer", make_run, steps=4), device())
    run = make_run(device())
    eager = calls_of(run, run.step, 4)
    run = make_run(device())
    assert calls_of(run, ws.compile(run.step), 4) == eager


def test_a_memory_budget_recomputes_no_custom_operator() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        return (model(doubled(x).sin().cos()).sin() ** 2).mean()

    assert_runs_as_often(body, memory_budget=0.3, lower="eager")


def test_a_count_that_a_custom_operator_makes_is_not_computed_in_a_guard() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(device())
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = doubled(self.count + 1.0)
            return self.inner(x)  # type: ignore[no-any-return]

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, function = Counted(), ws.compile(step) if compiled else step
        ran.clear()
        for i in range(4):
            function(model, batch_of(device(), i, 6, 6))
        results.append((Counter(ran), float(model.count)))
    assert results[0] == results[1]


def write_through_view(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    returns_view(y).add_(1)  # <- here
    return model(y).square().mean()


def write_to_returned_input(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    returns_input(y).add_(1)  # <- here
    return model(y).square().mean()


def write_through_view_of_view(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    hidden_view(y)[0].zero_()  # <- here
    return model(y).square().mean()


def read_after_the_base_was_written(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    view = returns_view(y)
    y.add_(1)
    return model(view).square().mean()  # <- here


def write_to_a_row(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    rows(y)[0].mul_(3)  # <- here
    return model(y).square().mean()


def return_what_requires_grad(model: nn.Module, x: Tensor) -> Tensor:
    return returns_input(model(x)).square().mean()  # <- here


def write_twice_to_one(model: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    writes_list([y, y])  # <- here
    return model(y).square().mean()


REFUSED = [
    write_through_view,
    write_to_returned_input,
    write_through_view_of_view,
    read_after_the_base_was_written,
    write_to_a_row,
    return_what_requires_grad,
    write_twice_to_one,
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_what_cannot_be_kept_is_refused_with_the_line(body: Callable[..., Any]) -> None:
    run = run_of(device(), training(body))
    before = frame("before", None, run.watch)
    with pytest.raises(ws.errors.CaptureError) as caught:
        ws.compile(run.step)(*run.arguments(0))
    assert f"{Path(__file__).name}:{marked_line(body)}" in str(caught.value), str(caught.value)
    assert_frames_equal([before], [frame("before", None, run.watch)])


def test_an_operator_without_a_fake_kernel_is_refused_with_the_line() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        return model(composed(x)).square().mean()  # <- here

    run = run_of(device(), training(body))
    with pytest.raises(ws.errors.UnsupportedError) as caught:
        ws.compile(run.step)(*run.arguments(0))
    assert f"{Path(__file__).name}:{marked_line(body)}" in str(caught.value)


@torch.library.custom_op("wholestep_tests::counted", mutates_args=())
def counted(x: Tensor) -> int:
    return int(x.sum())


@counted.register_fake
def _(x: Tensor) -> int:
    return 3


def test_an_operator_that_returns_a_number_is_refused_with_the_line() -> None:
    def step(x: Tensor) -> Tensor:
        return x * counted(x)  # <- here

    assert_refused(step, ws.errors.UnsupportedError, "counted.default returns a number", step)


@torch.library.custom_op("wholestep_tests::adds_if_given", mutates_args=("total",))
def adds_if_given(x: Tensor, total: Tensor | None = None) -> Tensor:
    if total is not None:
        total.add_(1)
    return x * 2


@adds_if_given.register_fake
def _(x: Tensor, total: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


def test_an_argument_that_an_operator_would_write_may_be_left_out() -> None:
    total = torch.zeros(3)

    @ws.compile(lower="eager")
    def step(x: Tensor) -> Tensor:
        return adds_if_given(x) + adds_if_given(x, total)

    for calls in (1, 2, 3):
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))
        assert total.tolist() == [calls] * 3
