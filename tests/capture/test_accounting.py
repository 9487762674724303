"""What tracing saw is compared with what the graph does: faults that are put in on purpose are found."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from capture.operators import doubled, effect
from cases.parts import adamw, mlp, train_step
from harness import Case, Run, assert_frames_equal, assert_parity, batch_of, device, frame, marked_line
from wholestep.capture.graph import functional_forms, recorder
from wholestep.capture.graph import tensor_values as values
from wholestep.capture.objects import objects_found_by_calls
from wholestep.capture.patching import intercept
from wholestep.capture.results import collect


def plain_run(step: Callable[..., Any] = train_step, optimizer: Callable[..., Any] = adamw) -> Run:
    model = mlp(device())
    made = optimizer(model)
    return Run(step, lambda i: (model, made, batch_of(device(), i, 6, 6)), {"model": model, "optimizer": made})


def assert_lost(run: Run, says: str, function: Callable[..., Any] | None = None) -> None:
    """The step is refused, at the marked line of a function, and nothing was changed."""
    before = frame("before", None, run.watch)
    with pytest.raises(ws.errors.LostError, match=says) as caught:
        ws.compile(run.step)(*run.arguments(0))
    assert_frames_equal([before], [frame("before", None, run.watch)])
    if function is not None:
        assert f"{Path(__file__).name}:{marked_line(function)}" in str(caught.value), str(caught.value)


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()  # <- here
    optimizer.zero_grad()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_whose_writes_are_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values.Values, "write", lambda self, fake, new: None)
    assert_lost(plain_run(step, sgd), r"step\(\) was called", step)


def test_a_step_that_loses_one_of_its_parameters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = values.Values.write

    def write(self: Any, fake: Tensor, new: Any) -> None:
        if tuple(fake.shape) != (4,):  # the last bias
            original(self, fake, new)

    monkeypatch.setattr(values.Values, "write", write)
    assert_lost(plain_run(step, sgd), "writes to 3 of its 4 parameters", step)


def test_a_write_back_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = collect.add_write_backs

    def without_the_first(capture: Any, results: Any) -> Any:
        copies = original(capture, results)
        first = next(n for n in capture.graph.nodes if n.target is torch.ops.aten.copy_.default)
        capture.graph.erase_node(first)
        return copies[1:]

    monkeypatch.setattr(collect, "add_write_backs", without_the_first)
    assert_lost(plain_run(step), "writes to model.0.weight, and the graph does not")


def test_a_write_that_the_recorder_does_not_see_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recorder.Recorder.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zero_.default:
            return func(*args, **(kwargs or {}))
        return original(self, func, types, args, kwargs)

    def step_with_buffer(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        model.count.zero_()
        return train_step(model, optimizer, x)

    run = plain_run(step_with_buffer)
    run.watch["model"].register_buffer("count", torch.ones(3))
    monkeypatch.setattr(recorder.Recorder, "__torch_dispatch__", dispatch)
    assert_lost(run, "writes to model.count, and the graph does not")


def test_an_optimizer_whose_call_was_not_detected_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hiding:
        __slots__ = ("inner",)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def step(self) -> None:
            self.inner.step()  # <- here

        def zero_grad(self) -> None:
            self.inner.zero_grad()

    monkeypatch.setattr(objects_found_by_calls, "_notice", lambda host, target: None)
    run = plain_run(step)
    model, optimizer, x = run.arguments(0)
    run.arguments = lambda i: (model, Hiding(optimizer), x)
    assert_lost(run, "that the capture does not know", Hiding.step)


def test_a_call_of_a_custom_operator_without_a_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        effect(x)  # <- here
        return train_step(model, optimizer, x)

    monkeypatch.setattr(functional_forms.CustomOperators, "record", lambda self, *args: args[-1])
    assert_lost(plain_run(body), "effect", body)


def test_a_custom_operator_that_is_eliminated_as_dead_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        model(doubled(x))
        doubled(x)  # <- here
        return train_step(model, optimizer, doubled(x))

    monkeypatch.setattr(collect, "is_needed", lambda node: node.is_impure())
    run = plain_run(body)
    with pytest.raises(ws.errors.LostError, match="doubled"):
        ws.compile(run.step)(*run.arguments(0))


class Referring:
    """Refers to parameters in a way that discovery does not follow."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._references = [weakref.ref(parameter) for parameter in parameters]

    def parameters(self) -> list[Any]:
        return [reference() for reference in self._references]


def test_gradients_that_arrive_at_real_parameters_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_with_penalty(model: nn.Module, optimizer: Any, hiding: Referring, x: Tensor) -> Tensor:
        torch.cat(hiding.parameters()).square().sum().backward()
        return train_step(model, optimizer, x)

    run = plain_run()
    model, optimizer, x = run.arguments(0)
    hiding = Referring([model[0].bias, model[3].bias])
    run = Run(step_with_penalty, lambda i: (model, optimizer, hiding, x), run.watch)
    monkeypatch.setattr(intercept.FunctionMode, "_traced", lambda self, value: value)
    assert_lost(run, "did not arrive|was written for real")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_hidden_parameters_arrive() -> None:
    def step_with_penalty(model: nn.Module, optimizer: Any, hiding: Referring, x: Tensor) -> Tensor:
        torch.cat(hiding.parameters()).square().sum().backward()
        return train_step(model, optimizer, x)

    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = adamw(model)
        hiding = Referring([model[0].bias, model[3].bias])
        return Run(step_with_penalty, lambda i: (model, optimizer, hiding, batch_of(where, i, 6, 6)), {"model": model})

    assert_parity(Case("penalty", make), device())


def test_an_optimizer_that_does_nothing_at_all_is_refused() -> None:
    class Idle(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            return None

    assert_lost(plain_run(step, lambda model: Idle(model.parameters())), r"writes to 0 of its 4 parameters", step)


class EverySecond(torch.optim.SGD):
    """Steps at each second call; the first only counts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self._calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self._calls += 1
        return super().step() if self._calls % 2 == 0 else None


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)  # type: ignore[index]
    return adamw(model)


def no_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize(
    "optimizer",
    [lambda model: EverySecond(model.parameters()), frozen, no_rate, lambda model: adamw(model, maximize=True)],
    ids=["counts", "frozen", "no_rate", "maximize"],
)
def test_an_optimizer_that_leaves_parameters_alone_for_a_reason_is_captured(optimizer: Callable[..., Any]) -> None:
    def make(where: torch.device) -> Run:
        return plain_run(step, optimizer)

    assert_parity(Case("reason", make, graphs=None), device())


def test_a_step_without_gradients_is_captured() -> None:
    def without_backward(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.step()
        return model(x).square().mean().detach()

    assert_parity(Case("no gradients", lambda where: plain_run(without_backward)), device())


def test_a_backward_that_leads_to_no_parameter_is_captured() -> None:
    def inner_gradient(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        leaf = x.detach().clone().requires_grad_()
        leaf.square().sum().backward()
        assert leaf.grad is not None
        return train_step(model, optimizer, x + 0.01 * leaf.grad)

    def chosen_inputs(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        leaf = x.detach().clone().requires_grad_()
        model(leaf).sum().backward(inputs=[leaf])
        assert leaf.grad is not None
        return train_step(model, optimizer, x + 0.01 * leaf.grad)

    assert_parity(Case("inner", lambda where: plain_run(inner_gradient)), device())
    assert_parity(Case("inputs", lambda where: plain_run(chosen_inputs)), device())


def test_an_optimizer_that_steps_inside_of_backward_is_captured() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def updates(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
            def update(parameter: Tensor) -> None:
                optimizer.step()
                optimizer.zero_grad()

            return update

        hooks = [updates(torch.optim.SGD([parameter], lr=0.1)) for parameter in model.parameters()]
        for parameter, hook in zip(model.parameters(), hooks, strict=True):
            parameter.register_post_accumulate_grad_hook(hook)

        def step(model: nn.Module, x: Tensor, hooks: Any) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return Run(step, lambda i: (model, batch_of(where, i, 6, 6), hooks), {"model": model})

    assert_parity(Case("in backward", make, options={"hooks": "trace"}), device())
