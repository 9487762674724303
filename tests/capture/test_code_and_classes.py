"""What the user's code is made of may change between calls: classes of objects, code, defaults, builtins, imports."""

from __future__ import annotations

import abc
import builtins
import collections
import importlib
import sys
import types
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from capture.odd_places import Program, assert_refused, assert_same, nothing


class One:
    def value(self) -> float:
        return 1.0


class Two(One):
    def value(self) -> float:
        return 2.0


def class_of_an_object() -> Any:
    held = One()

    def change(i: int) -> None:
        held.__class__ = Two if i % 2 else One

    return lambda x: x * held.value(), change


def class_of_a_module() -> Any:
    class Plain(nn.Linear):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    class Doubled(Plain):
        scale = 2.0

    held = Plain(3, 1)

    def change(i: int) -> None:
        if i == 1:
            held.__class__ = Doubled

    return lambda x: held(x), change


def code_of_a_function() -> Any:
    def scale() -> float:
        return 1.0

    def other() -> float:
        return 2.0

    def change(i: int) -> None:
        if i == 1:
            scale.__code__ = other.__code__

    return lambda x: x * scale(), change


def code_of_a_method() -> Any:
    class Config:
        def scale(self) -> float:
            return 1.0

    def other(self: Any) -> float:
        return 2.0

    held = Config()

    def change(i: int) -> None:
        if i == 1:
            Config.scale.__code__ = other.__code__

    return lambda x: x * held.scale(), change


def code_of_the_step() -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def change(i: int) -> None:
        if i == 1:
            step.__code__ = other.__code__

    return step, change


def keyword_default() -> Any:
    def scale(*, k: float = 1.0) -> float:
        return k

    def change(i: int) -> None:
        assert scale.__kwdefaults__ is not None
        scale.__kwdefaults__["k"] += 1

    return lambda x: x * scale(), change


def other_keyword_defaults() -> Any:
    def scale(*, k: float = 1.0) -> float:
        return k

    def change(i: int) -> None:
        scale.__kwdefaults__ = {"k": i + 3.0}

    return lambda x: x * scale(), change


def registered_with_an_own_abc() -> Any:
    class Interface(abc.ABC):  # noqa: B024
        pass

    class Held:
        pass

    held = Held()

    def change(i: int) -> None:
        if i == 1:
            Interface.register(Held)

    return lambda x: x * (2.0 if isinstance(held, Interface) else 1.0), change


def registered_with_one_of_python() -> Any:
    class Held:
        pass

    held = Held()

    def change(i: int) -> None:
        if i == 1:
            collections.abc.Sequence.register(Held)

    return lambda x: x * (2.0 if isinstance(held, collections.abc.Sequence) else 1.0), change


def in_a_namespace(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "of_the_user"}
    exec(source, namespace)
    return namespace


def shadowed_builtin() -> Any:
    namespace = in_a_namespace("def step(x):\n    return x * abs(-2.0)")

    def change(i: int) -> None:
        if i == 1:
            namespace["abs"] = lambda value: 7.0
        if i == 3:
            del namespace["abs"]

    return namespace["step"], change


def name_that_was_nowhere() -> Any:
    source = "def step(x):\n    try:\n        return x * extra\n    except NameError:\n        return x"
    namespace = in_a_namespace(source)

    def change(i: int) -> None:
        if i == 1:
            namespace["extra"] = 3.0

    return namespace["step"], change


def other_builtin() -> Any:
    vars(builtins)["scale_of_all"] = lambda: 1.0
    namespace = in_a_namespace("def step(x):\n    return x * scale_of_all()")

    def change(i: int) -> None:
        if i == 1:
            vars(builtins)["scale_of_all"] = lambda: 2.0

    return namespace["step"], change


def config() -> Any:
    module: Any = types.ModuleType("late_config")
    module.scale = 1.0
    sys.modules["late_config"] = module
    return module


def imported_in_the_step() -> Any:
    module = config()

    def step(x: torch.Tensor) -> torch.Tensor:
        import late_config

        return x * late_config.scale

    def change(i: int) -> None:
        module.scale += 1

    return step, change


def imported_from_in_the_step() -> Any:
    module = config()

    def step(x: torch.Tensor) -> torch.Tensor:
        from late_config import scale

        return x * scale

    def change(i: int) -> None:
        module.scale += 1

    return step, change


def imported_by_name() -> Any:
    module = config()

    def change(i: int) -> None:
        module.scale += 1

    return lambda x: x * importlib.import_module("late_config").scale, change


def looked_up_by_name() -> Any:
    module = config()

    def change(i: int) -> None:
        module.scale += 1

    return lambda x: x * sys.modules["late_config"].scale, change


def tensor_of_an_imported_module() -> Any:
    module = config()
    module.weight = nn.Parameter(torch.ones(3))

    def step(x: torch.Tensor) -> torch.Tensor:
        import late_config

        loss = (x * late_config.weight).sum()
        loss.backward()
        with torch.no_grad():
            late_config.weight -= 0.1 * late_config.weight.grad
        late_config.weight.grad = None
        return loss

    return step, nothing, lambda: [module.weight]


CHANGED: list[Program] = [
    class_of_an_object,
    class_of_a_module,
    code_of_a_function,
    code_of_a_method,
    code_of_the_step,
    keyword_default,
    other_keyword_defaults,
    registered_with_an_own_abc,
    registered_with_one_of_python,
    shadowed_builtin,
    name_that_was_nowhere,
    other_builtin,
    imported_in_the_step,
    imported_from_in_the_step,
    imported_by_name,
    looked_up_by_name,
    tensor_of_an_imported_module,
]


@pytest.mark.parametrize("program", CHANGED, ids=lambda program: program.__name__)
def test_a_change_of_code_between_calls_is_seen(program: Program) -> None:
    assert_same(program)


def test_a_class_that_is_registered_elsewhere_is_no_reason_for_a_graph() -> None:
    class Other:
        pass

    class Interface(abc.ABC):  # noqa: B024
        pass

    def program() -> Any:
        def change(i: int) -> None:
            collections.abc.Mapping.register(type(f"Other{i}", (), {}))

        return lambda x: x * (2.0 if isinstance(x, Interface) else 1.0), change

    assert_same(program, graphs=1)


def test_setting_a_class_or_code_in_the_step_is_refused_and_put_back() -> None:
    def sets_the_class() -> Any:
        held = One()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * held.value()
            held.__class__ = Two
            return y

        return step, nothing, lambda: [type(held).__name__]

    def sets_the_code() -> Any:
        def scale() -> float:
            return 1.0

        def other() -> float:
            return 2.0

        def step(x: torch.Tensor) -> torch.Tensor:
            scale.__code__ = other.__code__
            return x * scale()

        return step, nothing, lambda: [scale()]

    error = assert_refused(sets_the_class, "WS-SIDE-EFFECT")
    assert error.location is not None
    assert "held.__class__ = Two" in error.location.text
    assert_refused(sets_the_code, "WS-SIDE-EFFECT")


Pair = namedtuple("Pair", "weight other")


def weights_in_a_namedtuple(weights: list[Any]) -> Any:
    return Pair(weights[0], weights[1])


def weights_in_a_nest(weights: list[Any]) -> Any:
    return ((1, (weights[0],)), frozenset([weights[1]]))


@pytest.mark.parametrize("kind", [tuple, frozenset, list, set, weights_in_a_namedtuple, weights_in_a_nest])
def test_parameters_in_tuples_are_those_of_the_model(kind: Any) -> None:
    def program() -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = [model[0].weight, model[1].weight]
        held, pairs = kind(weights), tuple((w, 0.5) for w in weights)

        def members(value: Any) -> Any:
            for item in value:
                if isinstance(item, tuple | frozenset):
                    yield from members(item)
                else:
                    yield item

        def step(x: torch.Tensor, first: Any = weights[0], *, second: Any = weights[1]) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                if any(p is w for w in members(held)):
                    p.grad.mul_(0.5)
                for w, factor in pairs:
                    if p is w:
                        p.grad.mul_(factor)
                if p is first or p is second:
                    p.grad.mul_(0.25)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, nothing, lambda: list(model.parameters())

    assert_same(program, graphs=1)


def test_a_tuple_of_parameters_in_an_attribute_needs_no_second_graph() -> None:
    def program() -> Any:
        held: Any = types.SimpleNamespace()
        held.model = nn.Linear(3, 1)
        held.weights = (held.model.weight, held.model.bias)
        held.model.kept = held.weights

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = held.model(x).square().mean() + sum(w.square().sum() for w in held.weights)
            grads = torch.autograd.grad(loss, held.model.kept)
            with torch.no_grad():
                for weight, grad in zip(held.weights, grads, strict=True):
                    weight -= 0.1 * grad
            return loss

        return step, nothing, lambda: [held.weights]

    assert_same(program, graphs=1)
