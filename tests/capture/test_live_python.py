"""Modes, attributes, globals and closures changed between steps are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.live import Net, net_run
from cases.parts import adamw, mlp, plain_run
from cases.structure import Trainer
from harness import Run, Story, assert_frames_equal, assert_same_story, batch_of, device, play


def test_autocast_around_the_call_is_a_reason_for_another_graph() -> None:
    def story(told: Story) -> None:
        told.call(2)
        for _ in range(2):  # a context of its own each time: eager keeps casts of old weights while one is open
            with torch.autocast("cpu", dtype=torch.bfloat16):
                told.call()
        told.call(2)

    assert_same_story(net_run, story)


def test_no_grad_around_an_evaluation_gives_what_eager_gives() -> None:
    def make(where: torch.device) -> Run:
        model = Net().to(where).eval()
        return Run(lambda model, x: model(x), lambda i: (model, batch_of(where, i, 5, 6)), {"model": model})

    def story(told: Story) -> None:
        told.call(2)
        with torch.no_grad():
            told.call(2)

    assert_same_story(make, story)


def test_default_dtype_changed_between_steps_is_used() -> None:
    def make(where: torch.device) -> Run:
        return Run(lambda x: torch.zeros(2) + x.sum(), lambda i: (batch_of(where, i, 5, 6),), {})

    def story(told: Story) -> None:
        told.call(2)
        torch.set_default_dtype(torch.float64)
        try:
            told.call(2)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same_story(make, story)


def test_attributes_of_self_changed_between_steps_are_used() -> None:
    def play_trainer(compiled: bool) -> list[Any]:
        torch.manual_seed(3)
        trainer = Trainer(device())
        run = trainer.run()
        step = ws.compile(trainer.step) if compiled else trainer.step
        frames = play(run, step, 3)
        trainer.limits["norm"] = 0.01
        frames += play(run, step, 3)
        trainer.weight = torch.arange(4.0)
        frames += play(run, step, 3)
        trainer.model = mlp(device())
        trainer.optimizer = adamw(trainer.model)
        return frames + play(trainer.run(), step, 3)

    assert_frames_equal(play_trainer(compiled=False), play_trainer(compiled=True))


def test_a_decorated_method_serves_every_instance() -> None:
    def play_trainers(decorate: Any) -> list[Any]:
        class Decorated(Trainer):
            step = decorate(Trainer.step)

        torch.manual_seed(3)
        first, second = Decorated(device()), Decorated(device())
        frames = play(first.run(), first.step, 3)
        frames += play(second.run(), second.step, 3)
        return frames + play(first.run(), first.step, 3)

    assert_frames_equal(play_trainers(lambda step: step), play_trainers(ws.compile))


def test_a_global_number_changed_between_steps_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        monkeypatch.setitem(globals(), "WEIGHT", 1.0)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean() * WEIGHT
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return plain_run(where, model, torch.optim.SGD(model.parameters(), lr=0.1), step)

    def story(told: Story) -> None:
        told.call(2)
        monkeypatch.setitem(globals(), "WEIGHT", 3.0)
        told.call(2)

    assert_same_story(make, story)


WEIGHT = 1.0


def test_a_number_in_a_closure_changed_between_steps_is_used() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = 1.0
        limits = {"norm": 1.0}

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean() * weight
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), limits["norm"])
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def after(i: int, result: Any) -> None:
            nonlocal weight
            weight = 1.0 if i < 2 else 2.0
            limits["norm"] = 1.0 if i < 5 else 0.1

        return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer}, after=after)

    assert_same_story(make, lambda told: told.call(8))


class Counting:
    """Counts calls, and decides by the count."""

    def __init__(self) -> None:
        self.step = 0
        self.last = True

    def begin(self) -> None:
        self.step += 1
        self.last = self.step % 2 == 0

    @property
    def is_last(self) -> bool:
        return self.last

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def counting_run(where: torch.device) -> Run:
    counting, model = Counting(), mlp(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        counting.begin()
        loss = model(x).square().mean()
        loss.backward()
        if counting.is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "counting": counting})


def test_a_count_called_step_that_the_step_reads_and_sets_is_a_guard_or_an_input() -> None:
    step = assert_same_story(counting_run, lambda told: told.call(8))
    assert len(step.graphs) <= 3, step.recompiles  # the first call, then one graph for each side of the branch


def test_an_attribute_that_the_step_sets_before_it_reads_it_is_no_reason_for_another_graph() -> None:
    def story(told: Story) -> None:
        told.call(4)
        for last in (True, False):
            told.run.watch["counting"].last = last  # overwritten by the step
            told.call(2)

    step = assert_same_story(counting_run, story)
    assert len(step.graphs) <= 3, step.recompiles


class Shared:
    """All objects of the class have the same attributes."""

    _state: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.__dict__ = self._state
        if not self._state:
            self.scale, self.names = 1.0, ["a"]

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)


def test_attributes_that_all_objects_of_a_class_share_are_read_and_set_as_in_eager() -> None:
    def make(where: torch.device) -> Run:
        Shared._state.clear()
        one, other, model = Shared(), Shared(), mlp(where)

        def step(x: torch.Tensor) -> torch.Tensor:
            one.scale = 3.0 if len(other.names) > 1 else 2.0
            return model(x).sum() * other.scale

        return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "shared": one})

    def story(told: Story) -> None:
        shared = told.run.watch["shared"]
        told.call(2)
        shared.scale = 7.0  # overwritten by the step
        told.call(2)
        shared.names = list(shared.names)  # an equal list
        told.call(2)
        shared.names.append("b")
        told.call(2)
        shared.names = ["c"]
        told.call(2)

    step = assert_same_story(make, story)
    assert len(step.graphs) == 3, step.recompiles
