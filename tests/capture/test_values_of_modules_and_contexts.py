"""Values that Python reads from modules, context variables and threads are used as they are at each call."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import wholestep as ws
from capture.followed import assert_follows

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
