"""Python around the tensors: what the step reads is checked at each call, what it changes is repeated or refused."""

from __future__ import annotations

import copy
import gc
import math
import random
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws

SCALE = 1.0
TOTAL = torch.zeros(())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.previous: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x) * SCALE
        if self.previous is not None:
            out = out + self.previous
        self.previous = out.detach().mean()
        return out


def test_a_global_read_in_a_forward_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    x = torch.randn(2, 3)
    step = ws.compile(lambda x: model.linear(x) * model(x).detach())
    twin = copy.deepcopy(model)
    for scale in (1.0, 2.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        assert torch.equal(step(x), twin.linear(x) * twin(x).detach())


def test_an_attribute_that_starts_as_none_and_becomes_a_tensor_is_used_from_then_on() -> None:
    class Meter:
        def __init__(self) -> None:
            self.average: torch.Tensor | None = None

        def step(self, loss: torch.Tensor) -> torch.Tensor:
            self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
            return self.average

    eager, ours = Meter(), Meter()
    step = ws.compile(ours.step)
    for i in range(5):
        loss = torch.tensor(float(i + 1))
        assert torch.equal(step(loss), eager.step(loss))
        assert torch.equal(ours.average, eager.average)
    assert len(step.graphs) <= 2


def test_a_running_total_on_a_trainer_needs_no_new_graph() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.running = torch.zeros(())

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.running = self.running + x.mean()
            return x.sum()

    trainer = Trainer()
    step = ws.compile(trainer.step)
    for _ in range(6):
        step(torch.ones(3))
    assert trainer.running.item() == 6.0
    assert len(step.graphs) == 1


class CountingSGD(torch.optim.Optimizer):
    """Counts its steps in a plain attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.k += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(float(self.k) * group["lr"])


def test_plain_attributes_of_an_optimizer_are_checked_and_advanced() -> None:
    mine, theirs = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    ours, eager = CountingSGD([mine]), CountingSGD([theirs])
    step = ws.compile(lambda: ours.step())
    for _ in range(4):
        step()
        eager.step()
        assert ours.k == eager.k
        assert torch.equal(mine, theirs)


def test_the_model_that_a_closure_names_is_the_one_it_names_now() -> None:
    model = nn.Linear(2, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach()

    compiled = ws.compile(step)
    x = torch.randn(3, 2)
    compiled(x)
    model = nn.Linear(2, 1)
    assert torch.equal(compiled(x), step(x))


def test_a_global_tensor_that_the_step_rebinds_is_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TOTAL", torch.zeros(()))

    def step(x: torch.Tensor) -> torch.Tensor:
        global TOTAL
        TOTAL = TOTAL + x.sum()
        return x.mean()

    compiled = ws.compile(step)
    for _ in range(3):
        compiled(torch.ones(2))
    assert TOTAL.item() == 6.0
    assert len(compiled.graphs) == 1


def _appends_to(log: Any, how: Callable[[Any, torch.Tensor], None]) -> tuple[Any, Any]:
    model = nn.Linear(2, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        how(log, loss)
        loss.backward()
        return loss

    return step, model


@pytest.mark.parametrize(
    ("log", "how"),
    [
        ([], lambda log, loss: log.append(loss)),
        ({}, lambda log, loss: log.update(loss=loss)),
        ({"nested": []}, lambda log, loss: log["nested"].append(loss)),
        (deque(), lambda log, loss: log.append(loss)),
        (set(), lambda log, loss: log.add(loss)),
    ],
    ids=["list", "dict", "nested", "deque", "set"],
)
def test_a_container_that_the_step_writes_is_restored_by_a_capture_and_written_by_a_call(log: Any, how: Any) -> None:
    before = copy.deepcopy(log)
    step, model = _appends_to(log, how)
    compiled = ws.compile(step)
    compiled.capture(torch.ones(3, 2))
    assert log == before
    assert model.weight.grad is None
    compiled(torch.ones(3, 2))
    assert log != before


def test_a_container_is_left_as_it_was_when_the_users_code_raises() -> None:
    log: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        log.append(x.sum())
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        ws.compile(step)(torch.ones(2))
    assert log == []


def test_an_argument_list_that_the_step_changes_is_refused() -> None:
    def step(x: torch.Tensor, history: list[torch.Tensor]) -> torch.Tensor:
        history.append(x.sum())
        return x.mean()

    with pytest.raises(ws.errors.SideEffectError, match="arguments"):
        ws.compile(step)(torch.ones(2), [])


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0)], ids=["python", "numpy"])
def test_a_generator_object_of_python_or_numpy_is_refused_and_not_moved(generator: Any) -> None:
    twin = copy.deepcopy(generator)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * generator.random()

    with pytest.raises(ws.errors.RandomStateError):
        ws.compile(step)(torch.ones(2))
    assert generator.random() == twin.random()


def test_an_array_argument_is_compared_by_its_contents() -> None:
    def step(x: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
        return x * torch.tensor(weights)

    weights = np.ones(3, dtype=np.float32)
    compiled = ws.compile(step)
    compiled(torch.ones(3), weights)
    weights *= 0.5
    assert torch.equal(compiled(torch.ones(3), weights), torch.full((3,), 0.5))


def test_the_same_tensor_twice_in_a_list_is_written_twice() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_mul_([x, x], 0.5)
        torch._foreach_add_([x, x[:1]], 1.0)
        return x.sum()

    mine, theirs = torch.ones(2), torch.ones(2)
    assert torch.equal(ws.compile(step)(mine), step(theirs))
    assert torch.equal(mine, theirs)


def test_reading_and_writing_shifted_parts_of_a_tensor_is_refused_as_in_eager() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x[1:].add_(x[:-1])
        return x

    with pytest.raises(RuntimeError, match="unsupported operation"):
        step(torch.ones(3))
    with pytest.raises(ws.errors.OverlapError):
        ws.compile(step)(torch.ones(3))


def test_a_result_that_requires_grad_refuses_a_backward_instead_of_losing_gradients() -> None:
    encoder, head = nn.Linear(2, 2), nn.Linear(2, 1)
    encode = ws.compile(lambda x: encoder(x))
    features = encode(torch.ones(1, 2))
    assert features.requires_grad
    assert torch.equal(features.detach(), encoder(torch.ones(1, 2)).detach())
    with pytest.raises(RuntimeError, match="WS-NO-GRAPH"):
        head(features).sum().backward()
    with torch.no_grad():
        assert not encode(torch.ones(1, 2)).requires_grad


def test_a_compiled_step_inside_of_another_becomes_a_part_of_it() -> None:
    model = nn.Linear(2, 1)
    inner = ws.compile(lambda x: model(x).mean())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = inner(x)
        loss.backward()
        return loss

    compiled = ws.compile(step)
    compiled(torch.ones(3, 2))
    assert model.weight.grad is not None
    assert inner.graphs == []


def test_a_number_made_from_the_learning_rate_follows_it() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.25)

    def step() -> torch.Tensor:
        lr = optimizer.param_groups[0]["lr"]
        return torch.tensor(lr) * math.sqrt(lr) * math.pow(lr, 2.0) * round(lr, 2)

    compiled = ws.compile(step)
    for lr in (0.25, 0.5, 0.125):
        optimizer.param_groups[0]["lr"] = lr
        assert torch.equal(compiled(), step())
    assert len(compiled.graphs) == 1


def test_text_made_from_the_learning_rate_is_right_for_each_learning_rate() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.25)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x * 2, f"{optimizer.param_groups[0]['lr']:.3f}"

    compiled = ws.compile(step)
    for lr in (0.25, 0.25, 0.5):
        optimizer.param_groups[0]["lr"] = lr
        assert compiled(torch.ones(2))[1] == f"{lr:.3f}"
    assert "text" in compiled.recompiles[0].reason


def test_distributions_work_with_their_default_checks() -> None:
    model = nn.Linear(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        policy = torch.distributions.Categorical(logits=model(x))
        loss = -policy.log_prob(policy.sample()).mean() - 0.1 * policy.entropy().mean()
        loss.backward()
        return loss.detach()

    x = torch.randn(5, 3)
    torch.manual_seed(1)
    expected, gradient = step(x), model.weight.grad.clone()
    model.zero_grad()
    torch.manual_seed(1)
    assert torch.equal(ws.compile(step)(x), expected)
    assert torch.equal(model.weight.grad, gradient)


def test_copies_of_a_compiled_step_capture_for_themselves() -> None:
    step = ws.compile(lambda x: x * 2)
    step(torch.ones(2))
    assert copy.deepcopy(step).graphs == []
    step.reset()
    assert step.graphs == []
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))


def test_a_value_read_from_the_class_of_an_object_is_checked() -> None:
    class Config:
        scale = 1.0

    config = Config()
    step = ws.compile(lambda x: x * config.scale)
    assert torch.equal(step(torch.ones(2)), torch.ones(2))
    Config.scale = 3.0
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 3.0))


def test_a_result_that_hides_tensors_in_an_object_is_refused() -> None:
    step = ws.compile(lambda x: SimpleNamespace(loss=x * 2))
    with pytest.raises(ws.errors.UnsupportedError, match="SimpleNamespace"):
        step(torch.ones(2))


def test_an_enum_member_is_a_plain_value() -> None:
    class Mode(Enum):
        DOUBLE = 2
        TRIPLE = 3

    step = ws.compile(lambda x, mode: x * mode.value)
    assert torch.equal(step(torch.ones(2), Mode.DOUBLE), torch.full((2,), 2.0))
    assert torch.equal(step(torch.ones(2), Mode.TRIPLE), torch.full((2,), 3.0))


@pytest.mark.parametrize("rates", [[1, 0.5, 2], [np.float64(0.1), np.float64(0.2), 0.3]], ids=["int", "numpy"])
def test_a_learning_rate_of_any_number_type_needs_no_new_graph(rates: list[Any]) -> None:
    mine, theirs = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    ours, eager = torch.optim.SGD([mine], lr=rates[0]), torch.optim.SGD([theirs], lr=rates[0])

    def step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        parameter.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = ws.compile(step)
    for rate in rates:
        ours.param_groups[0]["lr"] = eager.param_groups[0]["lr"] = rate
        compiled(mine, ours)
        step(theirs, eager)
        assert torch.equal(mine, theirs)
    assert len(compiled.graphs) == 1


def test_a_global_with_the_name_of_an_attribute_is_not_a_variable_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ws.compile(lambda x: x.mean())
    for value in (1, 2, 3):
        monkeypatch.setitem(globals(), "mean", value)
        step(torch.ones(2))
    assert len(step.graphs) == 1


def test_a_graph_does_not_keep_the_batch_it_was_captured_with() -> None:
    step = ws.compile(lambda batch: batch["x"] * 2)
    batch = {"x": torch.ones(2)}
    alive = weakref.ref(batch["x"])
    step(batch)
    del batch
    gc.collect()
    assert alive() is None
    assert torch.equal(step({"x": torch.ones(2)}), torch.full((2,), 2.0))
