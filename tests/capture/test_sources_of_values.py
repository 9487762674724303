"""Values that Python reads outside of tensors are used as they are at each call: classes, Python modules, contexts."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.followed import assert_follows
from harness import Run, assert_parity, batch_of, case, device

# Classes.


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


# Python modules.


_FUNCTIONS = """
def read():
    return scale

def count():
    global scale
    scale += 1
    return scale
"""


@pytest.fixture
def package() -> Iterator[ModuleType]:
    """A package with a module in it, as if the user had written it."""
    names = ["users_package", "users_package.config"]
    modules = [ModuleType(name) for name in names]
    sys.modules.update(zip(names, modules, strict=True))
    modules[0].config = modules[1]  # type: ignore[attr-defined]
    modules[1].scale = 1.0  # type: ignore[attr-defined]
    modules[1].table = {"scale": 1.0}  # type: ignore[attr-defined]
    modules[1].options = SimpleNamespace(scale=1.0)  # type: ignore[attr-defined]
    exec(
        "def read():\n    return scale\n\ndef count():\n    global scale\n    scale += 1\n    return scale",
        vars(modules[1]),
    )
    yield modules[0]
    for name in names:
        del sys.modules[name]


MODULE_READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda package: package.config.scale,
    "dict": lambda package: package.config.table["scale"],
    "object": lambda package: package.config.options.scale,
    "function": lambda package: package.config.read(),
    "getattr": lambda package: getattr(package.config, "sc" + "ale"),
    "absent": lambda package: getattr(package.config, "other", 1.0),
    "imported in the step": lambda package: __import__("users_package.config").config.scale,
}


@pytest.mark.parametrize("how", MODULE_READS)
def test_an_attribute_of_a_python_module_is_used_as_it_is_at_each_call(package: Any, how: str) -> None:
    def make() -> Any:
        config = package.config
        config.scale = config.table["scale"] = config.options.scale = 1.0
        if hasattr(config, "other"):
            del config.other

        def change(i: int) -> None:
            config.scale = config.table["scale"] = config.options.scale = config.other = i + 2.0

        read = MODULE_READS[how]
        return lambda: read(package), change

    assert_follows(make)


MODULE_WRITES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda config: setattr(config, "scale", config.scale + 1) or config.scale,
    "global of its function": lambda config: config.count(),
    "new attribute": lambda config: setattr(config, "seen", getattr(config, "seen", 0) + 1) or config.seen,
}


@pytest.mark.parametrize("how", MODULE_WRITES)
def test_an_attribute_of_a_python_module_that_the_step_sets_is_set_by_replays(package: Any, how: str) -> None:
    def make() -> Any:
        config, write = package.config, MODULE_WRITES[how]
        config.scale = 1
        vars(config).pop("seen", None)
        return lambda: write(config), lambda i: None, lambda: (config.scale, getattr(config, "seen", None))

    step = assert_follows(make, steps=10)
    assert len(step.graphs) <= 5, [str(r) for r in step.recompiles]


# Contexts and threads.


def context_variable() -> Any:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
    return lambda: variable.get(), lambda i: variable.set(i + 2.0) and None


def context_variable_in_an_attribute() -> Any:
    holder = SimpleNamespace(variable=contextvars.ContextVar("scale"))
    return lambda: holder.variable.get(3.0), lambda i: holder.variable.set(i + 2.0) and None


def context_variable_that_holds_a_dict() -> Any:
    variable: contextvars.ContextVar[dict[str, float]] = contextvars.ContextVar("options")
    variable.set({"scale": 1.0})
    return lambda: variable.get()["scale"], lambda i: variable.get().update(scale=i + 2.0)


def context_variable_in_a_class() -> Any:
    class Config:
        variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

    return lambda: Config.variable.get(), lambda i: Config.variable.set(i + 2.0) and None


def context_variable_with_an_object() -> Any:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("options")
    variable.set(SimpleNamespace(scale=1.0))
    return lambda: variable.get().scale, lambda i: variable.set(SimpleNamespace(scale=i + 2.0)) and None


def set_and_reset_in_the_step() -> Any:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

    def read() -> float:
        token = variable.set(variable.get() * 2)
        value = variable.get()
        variable.reset(token)
        return value

    return read, lambda i: variable.set(i + 2.0) and None, variable.get


def counted_in_a_context_variable() -> Any:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("calls")

    def read() -> int:
        variable.set(variable.get(0) + 1)
        return variable.get()

    return read, lambda i: None, lambda: variable.get(None)


def thread_local() -> Any:
    local = threading.local()
    local.scale = 1.0
    return lambda: local.scale, lambda i: setattr(local, "scale", i + 2.0)


def thread_local_set_later() -> Any:
    local = threading.local()
    return lambda: getattr(local, "scale", 1.0), lambda i: setattr(local, "scale", i + 2.0)


def thread_local_of_a_class_of_its_own() -> Any:
    class Local(threading.local):
        factor = 2.0

        def __init__(self) -> None:
            self.scale = 1.0

        def read(self) -> float:
            return self.scale * self.factor

    local = Local()

    def change(i: int) -> None:
        local.scale += 1.0
        Local.factor += 1.0

    return lambda: local.read(), change


def thread_local_in_an_attribute() -> Any:
    holder = SimpleNamespace(local=threading.local())
    holder.local.scale = 1.0
    return lambda: holder.local.scale, lambda i: setattr(holder.local, "scale", i + 2.0)


def counted_in_a_thread_local() -> Any:
    local = threading.local()
    local.calls = 0

    def read() -> int:
        local.calls += 1
        return local.calls

    return read, lambda i: None, lambda: vars(local)


def created_in_a_thread_local() -> Any:
    local = threading.local()

    def read() -> int:
        local.calls = getattr(local, "calls", 0) + 1
        return local.calls

    return read, lambda i: None, lambda: vars(local)


CONTEXTS = [
    context_variable,
    context_variable_in_an_attribute,
    context_variable_that_holds_a_dict,
    context_variable_in_a_class,
    context_variable_with_an_object,
    set_and_reset_in_the_step,
    counted_in_a_context_variable,
    thread_local,
    thread_local_set_later,
    thread_local_of_a_class_of_its_own,
    thread_local_in_an_attribute,
    counted_in_a_thread_local,
    created_in_a_thread_local,
]


@pytest.mark.parametrize("make", CONTEXTS, ids=lambda make: make.__name__)
def test_context_variables_and_thread_locals_are_read_at_each_call(make: Callable[[], Any]) -> None:
    assert_follows(make)


def test_a_thread_local_is_that_of_the_calling_thread() -> None:
    local = threading.local()
    step = ws.compile(lambda x: x * local.scale)
    found = {}

    def call(scale: float) -> None:
        local.scale = scale
        found[scale] = step(torch.ones(2))

    for scale in (1.0, 2.0, 3.0):
        thread = threading.Thread(target=call, args=(scale,))
        thread.start()
        thread.join()
    assert all(torch.equal(found[scale], torch.full((2,), scale)) for scale in found)
    assert len(found) == 3


def test_a_context_variable_is_that_of_the_calling_context() -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
    step = ws.compile(lambda x: x * variable.get())
    for scale in (2.0, 3.0, 4.0):
        context = contextvars.copy_context()
        context.run(variable.set, scale)
        assert torch.equal(context.run(step, torch.ones(2)), torch.full((2,), scale))
        assert torch.equal(step(torch.ones(2)), torch.ones(2))


def test_a_capture_that_fails_leaves_context_variables_as_they_were() -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale")

    def step(x: torch.Tensor) -> torch.Tensor:
        variable.set(3.0)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        ws.compile(step)(torch.ones(2))
    assert variable.get(None) is None


# Objects.


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


OBJECTS = [
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
