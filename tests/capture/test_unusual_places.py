"""Values in places that few steps read from, found by a hostile review: as in eager, or refused with the line."""

from __future__ import annotations

import collections
import configparser
import decimal
import enum
import functools
import gc
import importlib
import inspect
import os
import socket
import sqlite3
import string
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from capture.odd_places import Program, assert_refused, assert_same, batch, nothing

GLOBAL = 1.0


def reads(make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any, int], Any]) -> Program:
    """A step that multiplies by what is read from a place, which changes between calls."""

    def program() -> Any:
        place = make()
        return lambda x: x * read(place), lambda i: change(place, i)

    return program


def other_global(place: Any, i: int) -> None:
    global GLOBAL
    GLOBAL = i + 2.0


def first_global(value: Any = None) -> Any:
    global GLOBAL
    GLOBAL = 1.0
    return value


class Whole(int):
    """A number with an attribute."""

    scale: float


class Text(str):
    scale: float


class Several(tuple[Any, ...]):
    scale: float


def with_scale(value: Any) -> Any:
    value.scale = 1.0
    return value


def set_scale(place: Any, i: int) -> None:
    place.scale = i + 2.0


def config() -> Any:
    parser = configparser.ConfigParser()
    parser["train"] = {"lr": "1.0"}
    return parser


class Color(enum.Enum):
    RED = 1.0

    def shade(self) -> float:
        return GLOBAL * self.value


class Table(enum.Enum):
    ALL = [1.0]  # noqa: RUF012


class Pair(NamedTuple):
    a: float

    def scaled(self) -> float:
        return GLOBAL * self.a


class Static:
    @staticmethod
    def of() -> float:
        return GLOBAL

    @functools.cached_property
    def cached(self) -> float:
        return GLOBAL


def partial_method() -> Any:
    class Held:
        def value(self, k: list[float]) -> float:
            return k[0]

        first = functools.partialmethod(value, [1.0])

    return Held()


def change_partial_method(place: Any, i: int) -> None:
    vars(type(place))["first"].args[0][0] = i + 2.0


def other_bases() -> Any:
    class One:
        k = 1.0

    class Two:
        k = 2.0

    class Held(One):
        pass

    return types.SimpleNamespace(kind=Held, bases=[(One,), (Two,)])


def change_bases(place: Any, i: int) -> None:
    place.kind.__bases__ = place.bases[i % 2]


def dispatched() -> Any:
    @functools.singledispatch
    def scale(value: Any) -> float:
        return 1.0

    return scale


def register(place: Any, i: int) -> None:
    if i == 1:
        place.register(float, lambda value: 2.0)


def cached_value() -> Any:
    held = types.SimpleNamespace(k=1.0)
    held.read = functools.lru_cache(lambda: held.k)
    held.read()
    return held


def change_or_clear(place: Any, i: int) -> None:
    place.k += 1
    if i % 2:
        place.read.cache_clear()


def late_module() -> Any:
    module = types.ModuleType("module_of_unusual_places")
    module.k = 1.0  # type: ignore[attr-defined]
    sys.modules["module_of_unusual_places"] = module
    return types.SimpleNamespace(module=module, name=["module", "of", "unusual", "places"])


def change_module(place: Any, i: int) -> None:
    place.module.k = i + 2.0


def set_item(key: Any) -> Callable[[Any, int], None]:
    def change(place: Any, i: int) -> None:
        place[key] = i + 2.0

    return change


def view_of_dict() -> Any:
    held = {"a": 1.0}
    return types.SimpleNamespace(held=held, view=held.values())


READ: dict[str, Program] = {
    "configparser": reads(
        config, lambda c: c["train"].getfloat("lr"), lambda c, i: c["train"].update({"lr": str(i + 2.0)})
    ),
    "Template": reads(
        lambda: string.Template("1.0"), lambda t: float(t.substitute()), lambda t, i: setattr(t, "template", str(i + 2))
    ),
    "UserString": reads(
        lambda: collections.UserString("1.0"), lambda s: float(str(s)), lambda s, i: setattr(s, "data", str(i + 2.0))
    ),
    "an attribute of an int": reads(lambda: Whole(3), lambda k: getattr(k, "scale", 1.0), set_scale),
    "an attribute of a str": reads(lambda: with_scale(Text("a")), lambda s: s.scale, set_scale),
    "an attribute of a tuple": reads(lambda: with_scale(Several((1, 2))), lambda t: t.scale * t[0], set_scale),
    "a view of a dict": reads(view_of_dict, lambda h: sum(h.view), lambda h, i: set_item("a")(h.held, i)),
    "an lru_cache": reads(cached_value, lambda h: h.read(), change_or_clear),
    "a partialmethod": reads(partial_method, lambda h: h.first(), change_partial_method),
    "singledispatch": reads(dispatched, lambda f: f(0.5), register),
    "a method of an Enum": reads(first_global, lambda _: Color.RED.shade(), other_global),
    "a list in an Enum": reads(
        lambda: set_item(0)(Table.ALL.value, 0) or Table.ALL.value, lambda _: Table.ALL.value[0], set_item(0)
    ),
    "a method of a NamedTuple": reads(lambda: first_global(Pair(2.0)), lambda p: p.scaled(), other_global),
    "a static method": reads(first_global, lambda _: Static.of(), other_global),
    "a cached property": reads(lambda: first_global(Static()), lambda s: s.cached, other_global),
    "bases of a class": reads(other_bases, lambda h: h.kind().k, change_bases),
    "hasattr": reads(types.SimpleNamespace, lambda h: 2.0 if hasattr(h, "k") else 1.0, lambda h, i: setattr(h, "k", i)),
    "dir": reads(types.SimpleNamespace, lambda h: len(dir(h)), lambda h, i: setattr(h, f"k{i}", i)),
    "a module by a computed name": reads(
        late_module, lambda h: importlib.import_module("_".join(h.name)).k, change_module
    ),
    "sys.modules by a computed name": reads(late_module, lambda h: sys.modules["_".join(h.name)].k, change_module),
    "globals of a frame": reads(first_global, lambda _: sys._getframe().f_globals["GLOBAL"], other_global),
    "globals of inspect": reads(
        first_global,
        lambda _: inspect.currentframe().f_globals["GLOBAL"],  # type: ignore[union-attr]
        other_global,
    ),
    "Event": reads(
        lambda: types.SimpleNamespace(inner=[threading.Event()]),
        lambda h: 2.0 if h.inner[0].is_set() else 1.0,
        lambda h, i: h.inner[0].set() if i % 2 == 0 else h.inner[0].clear(),
    ),
    "the name of the thread": reads(
        lambda: setattr(threading.current_thread(), "name", "t"),
        lambda _: len(threading.current_thread().name),
        lambda _, i: setattr(threading.current_thread(), "name", "t" * (i + 2)),
    ),
    "precision of decimal": reads(
        lambda: decimal.getcontext().__setattr__("prec", 28),
        lambda _: float(decimal.Decimal(1) / 3),
        lambda _, i: decimal.getcontext().__setattr__("prec", 5 + i),
    ),
    "print options of NumPy": reads(
        lambda: np.set_printoptions(precision=8) or np.array([1 / 3]),
        lambda a: len(str(a)),
        lambda a, i: np.set_printoptions(precision=2 + i),
    ),
}


@pytest.fixture
def process_as_it_was() -> Any:
    precision, options, name = decimal.getcontext().prec, np.get_printoptions(), threading.current_thread().name
    yield
    decimal.getcontext().prec = precision
    np.set_printoptions(**options)
    threading.current_thread().name = name


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("kind", READ)
def test_a_value_in_an_unusual_place_is_used_as_it_is_at_each_call(kind: str) -> None:
    assert_same(READ[kind])


# Functions and methods of torch that are replaced.


def other_relu(i: int) -> None:
    F.relu = (lambda x, *args, **kwargs: x * 5) if i == 1 else RELU


def other_linear(i: int) -> None:
    nn.Linear.forward = (lambda self, x: x * 5) if i == 1 else LINEAR  # type: ignore[method-assign]


def other_twice(i: int) -> None:
    torch.Tensor.twice = lambda self: self * (5 if i == 1 else 2)  # type: ignore[attr-defined]


RELU, LINEAR = F.relu, nn.Linear.forward


@pytest.fixture
def torch_as_it_was() -> Any:
    other_twice(0)
    yield
    F.relu, nn.Linear.forward = RELU, LINEAR  # type: ignore[method-assign]
    del torch.Tensor.twice  # type: ignore[attr-defined]


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("name", ["relu", "linear", "twice"])
def test_a_function_or_method_of_torch_that_is_replaced_is_seen(name: str) -> None:
    def program() -> Any:
        if name == "twice":
            return lambda x: x.twice(), other_twice
        module = nn.ReLU() if name == "relu" else nn.Linear(3, 3)
        return lambda x: module(x).detach(), other_relu if name == "relu" else other_linear

    assert_same(program)


# What a replay would not do.


def use(make: Callable[[], Any], do: Callable[[Any], Any], seen: Callable[[Any], Any] = lambda place: None) -> Program:
    def program() -> Any:
        place = make()

        def step(x: torch.Tensor) -> torch.Tensor:
            do(place)
            return x * 2

        return step, nothing, lambda: seen(place)

    return program


def folder() -> Any:
    place = Path(tempfile.mkdtemp())
    (place / "there").write_text("a")
    return place


def names(place: Path) -> list[str]:
    return sorted(os.listdir(place))


OPEN: list[Any] = []


def database() -> Any:
    made = sqlite3.connect(":memory:")
    made.execute("create table t(v real)")
    OPEN.append(made)
    return made


def sockets() -> Any:
    made = socket.socketpair()
    OPEN.extend(made)
    return made


@pytest.fixture
def closed() -> Any:
    yield
    while OPEN:
        OPEN.pop().close()


DONE: dict[str, tuple[str, Program]] = {
    "unlink": ("WS-SIDE-EFFECT", use(folder, lambda f: (f / "there").unlink(missing_ok=True), names)),
    "touch": ("WS-SIDE-EFFECT", use(folder, lambda f: (f / "new").touch(), names)),
    "makedirs": ("WS-SIDE-EFFECT", use(folder, lambda f: os.makedirs(f / "a", exist_ok=True), names)),
    "rename": ("WS-SIDE-EFFECT", use(folder, lambda f: (f / "there").rename(f / "b"), names)),
    "a pipe": ("WS-SIDE-EFFECT", use(os.pipe, lambda ends: os.write(ends[1], b"a"))),
    "a socket": ("WS-SIDE-EFFECT", use(sockets, lambda ends: ends[0].send(b"a"))),
    "a database": ("WS-SIDE-EFFECT", use(database, lambda db: db.execute("insert into t values(1)"))),
    "Event.set": ("WS-SIDE-EFFECT", use(threading.Event, lambda event: event.set(), lambda event: event.is_set())),
    "a lock that is kept": ("WS-SIDE-EFFECT", use(threading.Lock, lambda lock: lock.acquire(), lambda k: k.locked())),
}


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("kind", DONE)
def test_what_a_replay_would_not_do_is_refused_before_it_is_done(kind: str) -> None:
    code, program = DONE[kind]
    assert_refused(program, code)


ALLOWED: dict[str, Program] = {
    "makedirs": use(folder, lambda f: os.makedirs(f, exist_ok=True), names),
    "unlink": use(folder, lambda f: (f / "none").unlink(missing_ok=True), names),
    "with lock": use(threading.Lock, lambda lock: lock.__enter__() and lock.__exit__()),
    "Event.clear": use(threading.Event, lambda event: event.clear(), lambda event: event.is_set()),
}


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_changes_nothing_is_allowed(kind: str) -> None:
    assert_same(ALLOWED[kind], graphs=1)


@pytest.mark.parametrize("read", [lambda: gc.get_count()[0], lambda: sys.getrefcount(GLOBAL)], ids=["gc", "refcount"])
def test_a_measure_of_memory_is_a_clock(read: Callable[[], int]) -> None:
    assert_refused(lambda: (lambda x: x * read(), nothing), "WS-CLOCK")


def test_a_lock_and_an_event_that_the_step_does_not_ask_need_no_new_graph() -> None:
    def program() -> Any:
        model = nn.Linear(3, 1)
        model.lock, model.stop = threading.Lock(), threading.Event()  # type: ignore[assignment]

        def change(i: int) -> None:
            (model.lock.release if i % 2 else model.lock.acquire)()  # type: ignore[operator,union-attr]
            (model.stop.clear if i % 2 else model.stop.set)()  # type: ignore[operator,union-attr]

        return lambda x: model(x).detach(), change

    assert_same(program, graphs=1)


def test_a_thread_of_the_user_still_uses_its_queue_while_a_step_is_captured() -> None:
    import queue

    model = nn.Linear(3, 1)
    held: Any = types.SimpleNamespace(queue=queue.Queue())
    failed: list[BaseException] = []

    def consume() -> None:
        try:
            while held.queue.get(timeout=10) is not None:
                pass
        except BaseException as error:
            failed.append(error)

    def step(x: torch.Tensor) -> torch.Tensor:
        assert held is not None
        there = threading.Thread(target=consume) if not model.training else None
        assert there is None
        return model(x).detach()

    thread = threading.Thread(target=consume)
    thread.start()
    ws.compile(step, lower="eager")(torch.ones(2, 3))
    held.queue.put(1)
    held.queue.put(None)
    thread.join()
    assert not failed


# Arguments and results.


def test_a_number_on_an_argument_is_the_one_of_each_call() -> None:
    def argument(i: int) -> torch.Tensor:
        made = batch(i)
        made.tag = float(i)  # type: ignore[attr-defined]
        return made

    assert_same(lambda: (lambda x: x * x.tag, nothing, lambda: None, argument))


def test_a_tensor_on_an_argument_is_refused() -> None:
    x = torch.ones(3)
    x.mask = torch.ones(3)  # type: ignore[attr-defined]
    with pytest.raises(ws.errors.CapturedTensorError):
        ws.compile(lambda x: x * x.mask, lower="eager")(x)


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a function": lambda x: lambda: x,
    "a default": lambda x: lambda y=x * 2: y,
    "a partial": lambda x: functools.partial(torch.add, x * 2),
    "a bound method": lambda x: (x * 2).sum,
    "a map": lambda x: map(abs, [x * 2]),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_that_binds_a_tensor_is_refused(kind: str) -> None:
    assert_refused(lambda: (RESULTS[kind], nothing), "WS-UNSUPPORTED", "with tensors inside")
