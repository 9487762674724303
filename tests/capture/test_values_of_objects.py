"""Values that Python reads from objects of any kind are used as they are at each call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from capture.followed import assert_follows
from harness import Run, assert_parity, batch_of, case, device


def slots() -> Any:
    class Config:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = 1.0

    config = Config()
    return lambda: config.scale, lambda i: setattr(config, "scale", i + 2.0)


def slots_of_a_base_and_a_dict() -> Any:
    class Base:
        __slots__ = ("scale",)

    class Config(Base):
        pass

    config = Config()
    config.scale = 1.0
    config.other = 2.0  # type: ignore[attr-defined]

    def change(i: int) -> None:
        if i % 2:
            config.scale += 1.0
        else:
            config.other += 1.0  # type: ignore[attr-defined]

    return lambda: config.scale * config.other, change  # type: ignore[attr-defined]


def frozen_slots() -> Any:
    @dataclass(frozen=True, slots=True)
    class Config:
        scale: float

    trainer = SimpleNamespace(config=Config(1.0))
    return lambda: trainer.config.scale, lambda i: setattr(trainer, "config", Config(i + 2.0))


def frozen_slots_set_anyway() -> Any:
    @dataclass(frozen=True, slots=True)
    class Config:
        scale: float

    config = Config(1.0)
    return lambda: config.scale, lambda i: object.__setattr__(config, "scale", i + 2.0)


def named_tuple() -> Any:
    class Config(NamedTuple):
        scale: float

    trainer = SimpleNamespace(config=Config(1.0))
    return lambda: trainer.config.scale, lambda i: setattr(trainer, "config", trainer.config._replace(scale=i + 2.0))


def slots_with_a_list() -> Any:
    class Config:
        __slots__ = ("scales",)

    config = Config()
    config.scales = [1.0]
    return lambda: config.scales[-1], lambda i: config.scales.append(i + 2.0)


def private_slots() -> Any:
    class Config:
        __slots__ = ("__scale",)

        def __init__(self) -> None:
            self.__scale = 1.0

        @property
        def scale(self) -> float:
            return self.__scale

        def grow(self) -> None:
            self.__scale += 1.0

    config = Config()
    return lambda: config.scale, lambda i: config.grow()


def getattr_over_a_dict() -> Any:
    class Config:
        def __init__(self) -> None:
            self._values = {"scale": 1.0}

        def __getattr__(self, name: str) -> Any:
            try:
                return self.__dict__["_values"][name]
            except KeyError:
                raise AttributeError(name) from None

    config = Config()
    return lambda: config.scale, lambda i: config._values.update(scale=i + 2.0)


def getattr_over_slots() -> Any:
    class Config:
        __slots__ = ("_values",)

        def __init__(self) -> None:
            self._values = {"scale": 1.0}

        def __getattr__(self, name: str) -> Any:
            return self._values[name]

    config = Config()
    return lambda: config.scale, lambda i: config._values.update(scale=i + 2.0)


def getattr_over_another_object() -> Any:
    class Config:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    config = Config(Config(Config(SimpleNamespace(scale=1.0))))
    return lambda: config.scale, lambda i: setattr(config._inner._inner._inner, "scale", i + 2.0)


def dict_with_attributes() -> Any:
    class Config(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__  # type: ignore[assignment]

    config = Config(scale=1.0)
    return lambda: config.scale, lambda i: setattr(config, "scale", i + 2.0)


def dict_with_a_dict() -> Any:
    class Config(dict):  # type: ignore[type-arg]
        pass

    config = Config()
    config.scale = 1.0  # type: ignore[attr-defined]
    return lambda: config.scale, lambda i: setattr(config, "scale", i + 2.0)  # type: ignore[attr-defined]


def property_of_an_object() -> Any:
    values = {"scale": 1.0}

    class Config:
        @property
        def scale(self) -> float:
            return values["scale"] * 2

    config = Config()
    return lambda: config.scale, lambda i: values.update(scale=i + 2.0)


def property_of_a_module() -> Any:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.options = SimpleNamespace(factor=1.0)

        @property
        def factor(self) -> float:
            return self.options.factor * 2

        def forward(self) -> Any:
            return self.factor

    scale = Scale()
    return lambda: scale(), lambda i: setattr(scale.options, "factor", i + 2.0)


def property_that_counts() -> Any:
    class Config:
        calls = 0

        @property
        def scale(self) -> int:
            self.calls += 1
            return self.calls

    config = Config()
    return lambda: config.scale, lambda i: None, lambda: config.calls


def counted_in_slots() -> Any:
    class Config:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

        def read(self) -> int:
            self.calls += 1
            return self.calls

    config = Config()
    return lambda: config.read(), lambda i: None, lambda: config.calls


def deep_in_objects() -> Any:
    root = leaf = SimpleNamespace()
    for _ in range(20):
        leaf.inner = SimpleNamespace()
        leaf = leaf.inner
    leaf.scale = 1.0

    def read() -> float:
        found = root
        while hasattr(found, "inner"):
            found = found.inner
        return found.scale

    return read, lambda i: setattr(leaf, "scale", i + 2.0)


def deep_in_objects_of_a_class() -> Any:
    class Node:
        def __init__(self) -> None:
            self.inner: Any = None
            self.scale = 1.0

    root = leaf = Node()
    for _ in range(20):
        leaf.inner = Node()
        leaf = leaf.inner

    def read() -> float:
        found = root
        while found.inner is not None:
            found = found.inner
        return found.scale

    return read, lambda i: setattr(leaf, "scale", i + 2.0)


def absent_attribute() -> Any:
    class Config:
        pass

    config = Config()
    return lambda: getattr(config, "scale", 1.0), lambda i: setattr(config, "scale", i + 2.0)


def keywords_of_a_partial() -> Any:
    read = functools.partial(lambda scale: scale, scale=1.0)
    return read, lambda i: read.keywords.__setitem__("scale", i + 2.0)


def keywords_of_a_partial_method() -> Any:
    class Config:
        def scaled(self, by: float) -> float:
            return by

        read = functools.partialmethod(scaled, by=1.0)

    keywords = vars(Config)["read"].keywords
    return Config().read, lambda i: keywords.__setitem__("by", i + 2.0)


def attribute_of_an_enum_member() -> Any:
    class Phase(Enum):
        WARMUP = 1

    Phase.WARMUP.scale = 1.0  # type: ignore[attr-defined]
    return lambda: Phase.WARMUP.scale, lambda i: setattr(Phase.WARMUP, "scale", i + 2.0)  # type: ignore[attr-defined]


def module_with_getattr() -> Any:
    held = {"scale": 1.0}
    config = ModuleType("config_with_getattr")
    config.__getattr__ = lambda name: held[name]  # type: ignore[method-assign]
    return lambda: config.scale, lambda i: held.__setitem__("scale", i + 2.0)


OBJECTS = [
    keywords_of_a_partial,
    keywords_of_a_partial_method,
    attribute_of_an_enum_member,
    module_with_getattr,
    slots,
    slots_of_a_base_and_a_dict,
    frozen_slots,
    frozen_slots_set_anyway,
    named_tuple,
    slots_with_a_list,
    private_slots,
    getattr_over_a_dict,
    getattr_over_slots,
    getattr_over_another_object,
    dict_with_attributes,
    dict_with_a_dict,
    property_of_an_object,
    property_of_a_module,
    property_that_counts,
    counted_in_slots,
    deep_in_objects,
    deep_in_objects_of_a_class,
    absent_attribute,
]


@pytest.mark.parametrize("make", OBJECTS, ids=lambda make: make.__name__)
def test_a_value_of_an_object_is_used_as_it_is_at_each_call(make: Callable[[], Any]) -> None:
    assert_follows(make)


def test_a_method_put_on_an_optimizer_between_calls_is_used() -> None:
    def make(where: torch.device) -> Run:
        model = nn.Linear(3, 2).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def twice(i: int, result: Any) -> None:
            once = optimizer.step
            if i == 2:
                optimizer.step = lambda: (once(), once())[0]  # type: ignore[method-assign, assignment, func-returns-value]

        return Run(step, lambda i: (batch_of(where, i, 4, 3),), {"model": model}, after=twice)

    assert_parity(case(make, steps=6, graphs=None), device())


def test_an_instance_attribute_that_comes_to_shadow_one_of_the_class_is_used() -> None:
    class Config:
        scale = 5.0

    def make(where: torch.device) -> Run:
        config = Config()

        def after(i: int, result: Any) -> None:
            if i == 1:
                config.scale = 9.0
            elif i == 3:
                del config.scale

        return Run(lambda x: x * config.scale, lambda i: (batch_of(where, i, 4, 3),), {}, after=after)

    assert_parity(case(make, steps=6, graphs=None), device())
