"""Values of classes are used as they are at each call, and what the step sets there is set by replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.followed import assert_follows


def through_self() -> Any:
    class Trainer:
        scale = 1.0

        def read(self) -> float:
            return self.scale

    trainer = Trainer()
    return trainer.read, lambda i: setattr(Trainer, "scale", Trainer.scale + 0.5)


def by_name() -> Any:
    class Config:
        scale = 1.0

    return lambda: Config.scale, lambda i: setattr(Config, "scale", Config.scale * 0.5)


def of_a_base() -> Any:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    return lambda: Config.scale, lambda i: setattr(Base, "scale", i + 2.0)


def hidden_by_a_derived_class_later() -> Any:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    return lambda: Config.scale, lambda i: setattr(Config, "scale", i + 2.0)


def of_a_metaclass() -> Any:
    class Meta(type):
        scale = 1.0

    class Config(metaclass=Meta):
        pass

    return lambda: Config.scale, lambda i: setattr(Meta, "scale", i + 2.0)


def property_of_a_metaclass() -> Any:
    class Meta(type):
        values: dict[str, float] = {"scale": 1.0}  # noqa: RUF012

        @property
        def scale(cls) -> float:
            return cls.values["scale"]

    class Config(metaclass=Meta):
        pass

    return lambda: Config.scale, lambda i: Meta.values.update(scale=i + 2.0)


def of_a_module_class() -> Any:
    class Scale(nn.Module):
        factor = 1.0

        def forward(self) -> Any:
            return self.factor

    scale = Scale()
    return lambda: scale(), lambda i: setattr(Scale, "factor", i + 2.0)


def of_an_autograd_function() -> Any:
    class Scale(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * Scale.factor

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * Scale.factor

    return lambda: Scale.apply(torch.ones(())), lambda i: setattr(Scale, "factor", i + 2.0)


def class_method() -> Any:
    class Config:
        _scale = 1.0

        @classmethod
        def scale(cls) -> float:
            return cls._scale

    return lambda: Config.scale(), lambda i: setattr(Config, "_scale", i + 2.0)


def nested_class() -> Any:
    class Config:
        class optim:  # noqa: N801
            scale = 1.0

    return lambda: Config.optim.scale, lambda i: setattr(Config.optim, "scale", i + 2.0)


def list_in_a_class() -> Any:
    class Config:
        scales = [1.0, 2.0]  # noqa: RUF012

    return lambda: Config.scales[0], lambda i: Config.scales.__setitem__(0, i + 2.0)


def method_replaced_on_the_class() -> Any:
    class Config:
        def scale(self) -> float:
            return 1.0

    config = Config()
    return lambda: config.scale(), lambda i: setattr(Config, "scale", lambda self: i + 2.0)


def attribute_that_the_class_gets_later() -> Any:
    class Config:
        pass

    def change(i: int) -> None:
        if i == 2:
            Config.scale = 3.0  # type: ignore[attr-defined]

    return lambda: getattr(Config, "scale", 1.0), change


CLASSES = [
    through_self,
    by_name,
    of_a_base,
    hidden_by_a_derived_class_later,
    of_a_metaclass,
    property_of_a_metaclass,
    of_a_module_class,
    of_an_autograd_function,
    class_method,
    nested_class,
    list_in_a_class,
    method_replaced_on_the_class,
    attribute_that_the_class_gets_later,
]


@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
def test_a_value_of_a_class_is_used_as_it_is_at_each_call(make: Callable[[], Any]) -> None:
    assert_follows(make)


def test_a_class_attribute_that_changes_at_each_call_becomes_an_input() -> None:
    step = assert_follows(by_name, steps=12)
    assert len(step.graphs) <= 4, [str(r) for r in step.recompiles]


def counter_of_an_autograd_function() -> Any:
    class Scale(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            Scale.calls += 1
            return x * Scale.calls

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    return lambda: Scale.apply(torch.ones(())), lambda i: None, lambda: Scale.calls


def counter_on_the_type_of_self() -> Any:
    class Trainer:
        calls = 0

        def read(self) -> int:
            type(self).calls += 1
            return self.calls

    trainer = Trainer()
    return trainer.read, lambda i: None, lambda: Trainer.calls


def counter_of_a_derived_class() -> Any:
    class Base:
        calls = 0

    class Trainer(Base):
        def read(self) -> int:
            type(self).calls += 1
            return 2

    trainer = Trainer()
    return trainer.read, lambda i: None, lambda: (Base.calls, Trainer.calls, "calls" in vars(Trainer))


def counter_on_a_module_class() -> Any:
    class Scale(nn.Module):
        calls = 0

        def forward(self) -> Any:
            Scale.calls += 1
            return self.calls

    scale = Scale()
    return lambda: scale(), lambda i: None, lambda: Scale.calls


def counter_set_outside_too() -> Any:
    class Config:
        calls = 0

    def read() -> int:
        Config.calls += 1
        return Config.calls

    def change(i: int) -> None:
        if i == 3:
            Config.calls = 10

    return read, change, lambda: Config.calls


def tensor_in_a_class() -> Any:
    class Config:
        average = torch.zeros(())

    def read() -> torch.Tensor:
        Config.average = Config.average * 0.5 + 1.0
        return Config.average

    return read, lambda i: None, lambda: Config.average


def text_in_a_class() -> Any:
    class Config:
        mode = "a"

    def read() -> float:
        Config.mode = "b" if Config.mode == "a" else "a"
        return 1.0 if Config.mode == "a" else 2.0

    return read, lambda i: None, lambda: Config.mode


WRITTEN = [
    counter_of_an_autograd_function,
    counter_on_the_type_of_self,
    counter_of_a_derived_class,
    counter_on_a_module_class,
    counter_set_outside_too,
    tensor_in_a_class,
    text_in_a_class,
]


@pytest.mark.parametrize("make", WRITTEN, ids=lambda make: make.__name__)
def test_a_class_attribute_that_the_step_sets_is_set_by_replays_too(make: Callable[[], Any]) -> None:
    assert_follows(make)


def test_a_counter_of_a_class_needs_no_graph_per_call() -> None:
    step = assert_follows(counter_of_an_autograd_function, steps=12)
    assert len(step.graphs) <= 4, [str(r) for r in step.recompiles]


def test_a_class_is_as_before_after_a_capture_that_failed() -> None:
    class Config:
        calls = 0
        scale = 2.0

        def read(self) -> float:
            Config.calls += 1
            return self.scale

    config = Config()
    before = dict(vars(Config))

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * config.read()
        raise RuntimeError(f"stop {y.shape}")

    with pytest.raises(RuntimeError, match="stop"):
        ws.compile(step)(torch.ones(2))
    assert dict(vars(Config)) == before
    assert all(vars(Config)[name] is before[name] for name in before)
