"""Values that Python reads by calls, by index or as a whole, and writes that a replay would not repeat."""

from __future__ import annotations

import copy
import csv
import ctypes
import io
import logging
import logging.handlers
import mmap
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from capture.odd_places import Program, assert_refused, assert_same, nothing

G = 1.0
PLACE = types.ModuleType("place_of_the_user")


class Held:
    """An object with a number."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


class Config:
    scale = 1.0
    other = 2.0


# What is read: memory, events, values of other processes, weak containers.


def reads(make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any, int], Any]) -> Program:
    """A step that multiplies by what is read from a place, which changes between calls."""

    def program() -> Any:
        place = make()
        return lambda x: x * read(place), lambda i: change(place, i)

    return program


def shared(kind: str) -> Any:
    return multiprocessing.get_context("fork").Value(kind, 1)


def attribute(name: str, by: float = 1) -> Callable[[Any, int], None]:
    return lambda place, i: setattr(place, name, getattr(place, name) + by)


def item(key: Any = 0) -> Callable[[Any, int], None]:
    def change(place: Any, i: int) -> None:
        place[key] += 1

    return change


def toggle(place: Any, i: int) -> None:
    (place.clear if i % 2 else place.set)()


def take_or_release(place: Any, i: int) -> None:
    (place.release if i % 2 else place.acquire)()


class Fields(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_float)]


def weak_values() -> Any:
    held = Held()
    PLACE.keep = held  # type: ignore[attr-defined]
    return weakref.WeakValueDictionary({"a": held})


def weak_keys() -> Any:
    PLACE.keep = Held()  # type: ignore[attr-defined]
    return weakref.WeakKeyDictionary({PLACE.keep: 1.0})  # type: ignore[attr-defined]


def add_member(place: Any, i: int) -> None:
    PLACE.kept.append(Held())  # type: ignore[attr-defined]
    place.add(PLACE.kept[-1])  # type: ignore[attr-defined]


def weak_set() -> Any:
    PLACE.kept = []  # type: ignore[attr-defined]
    return weakref.WeakSet()


def shared_memory() -> Any:
    block = mmap.mmap(-1, 8)
    block[0] = 1
    return block


MEMORY: dict[str, Program] = {
    "ctypes": reads(lambda: ctypes.c_double(1.0), lambda c: c.value, attribute("value")),
    "ctypes array": reads(lambda: (ctypes.c_double * 2)(1.0, 2.0), lambda c: c[0], item()),
    "ctypes structure": reads(lambda: Fields(1, 2.0), lambda c: c.a * c.b, attribute("b")),
    "multiprocessing.Value": reads(lambda: shared("d"), lambda v: v.value, attribute("value")),
    "multiprocessing.Array": reads(lambda: multiprocessing.Array("d", [1.0]), lambda v: v[0], item()),
    "multiprocessing.Event": reads(multiprocessing.Event, lambda e: 2.0 if e.is_set() else 1.0, toggle),
    "memoryview": reads(lambda: memoryview(bytearray(b"\x01")), lambda m: m[0], item()),
    "mmap": reads(shared_memory, lambda m: m[0], item()),
    "Event": reads(threading.Event, lambda e: 2.0 if e.is_set() else 1.0, toggle),
    "Lock": reads(threading.Lock, lambda e: 2.0 if e.locked() else 1.0, take_or_release),
    "Semaphore": reads(lambda: threading.Semaphore(9), lambda s: s._value, lambda s, i: s.acquire()),
    "weak values": reads(weak_values, lambda d: d["a"].scale, lambda d, i: attribute("scale")(d["a"], i)),
    "weak keys": reads(weak_keys, lambda d: next(iter(d.values())), lambda d, i: d.update({next(iter(d)): i + 2.0})),
    "weak set": reads(weak_set, len, add_member),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_events_and_weak_containers_are_followed(kind: str) -> None:
    assert_same(MEMORY[kind])


# What is read as a whole, or by a bound method.


def whole(read: Callable[[Any], Any]) -> Program:
    return reads(lambda: Held(1.0), read, attribute("scale"))


def new_names(read: Callable[[Any], Any]) -> Program:
    return reads(lambda: Held(1.0), read, lambda h, i: setattr(h, f"more{i}", 1.0))


def of_class(read: Callable[[Any], Any]) -> Program:
    def program() -> Any:
        Config.scale = 1.0
        return lambda x: x * read(Config), lambda i: setattr(Config, "scale", Config.scale + 1)

    return program


def of_module(read: Callable[[Any], Any]) -> Program:
    def program() -> Any:
        PLACE.scale = 1.0  # type: ignore[attr-defined]
        return lambda x: x * read(PLACE), lambda i: attribute("scale")(PLACE, i)

    return program


def bound(make: Callable[[], Any], name: str, use: Callable[[Any], Any], change: Callable[[Any, int], Any]) -> Program:
    def program() -> Any:
        place = make()
        method = getattr(place, name)
        return lambda x: x * use(method), lambda i: change(place, i)

    return program


def globals_read() -> Any:
    global G
    G = 1.0

    def change(i: int) -> None:
        global G
        G += 1

    return lambda x: x * globals()["G"], change


def globals_written() -> Any:
    global G
    G = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        globals()["G"] += 1
        return x * globals()["G"]

    return step, nothing, lambda: G


def evaluated() -> Any:
    global G
    G = 1.0

    def change(i: int) -> None:
        global G
        G += 1

    return lambda x: x * eval("G * 2"), change


WHOLE: dict[str, Program] = {
    "vars": whole(lambda h: sum(vars(h).values())),
    "vars, a new name": new_names(lambda h: sum(vars(h).values())),
    "__dict__": whole(lambda h: h.__dict__["scale"]),
    "copy": whole(lambda h: copy.copy(h).scale),
    "deepcopy": whole(lambda h: copy.deepcopy(h).scale),
    "pickle": whole(lambda h: len(pickle.dumps(h.scale)) + h.scale),
    "vars of a class": of_class(lambda c: vars(c)["scale"]),
    "__dict__ of a class": of_class(lambda c: c.__dict__["scale"]),
    "vars of a module": of_module(lambda m: vars(m)["scale"]),
    "dict.get": bound(lambda: {"a": 1.0}, "get", lambda get: get("a"), item("a")),
    "list.__getitem__": bound(lambda: [1.0], "__getitem__", lambda get: get(0), item()),
    "list.count": bound(lambda: [1], "count", lambda count: count(1), lambda d, i: d.append(1)),
    "globals()": globals_read,
    "globals() += 1": globals_written,
    "eval": evaluated,
}


@pytest.mark.parametrize("kind", WHOLE)
def test_values_that_are_read_as_a_whole_or_by_a_bound_method_are_followed(kind: str) -> None:
    assert_same(WHOLE[kind])


# What the process tells.


def state_of_the_process(read: Callable[[], Any], change: Callable[[int], Any], start: Callable[[], Any]) -> Program:
    def program() -> Any:
        start()
        return lambda x: x * read(), change

    return program


LOG = logging.getLogger("tests of odd places")


def told_to_be_verbose(i: int) -> None:
    LOG.setLevel(logging.DEBUG if i % 2 == 0 else logging.INFO)


def without_arguments() -> None:
    sys.argv[1:] = []


def other_gelu(i: int) -> None:
    if i == 1:
        PLACE.gelu = F.gelu  # type: ignore[attr-defined]
        F.gelu = F.relu  # type: ignore[assignment]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


PROCESS: dict[str, Program] = {
    "getcwd": state_of_the_process(
        lambda: len(os.getcwd()), lambda i: os.chdir("/tmp" if i % 2 == 0 else "/"), lambda: os.chdir("/")
    ),
    "environb": state_of_the_process(
        lambda: float(os.environb[b"ODD_PLACE"]),
        lambda i: os.environ.update(ODD_PLACE=str(i + 2)),
        lambda: os.environ.update(ODD_PLACE="1"),
    ),
    "isEnabledFor": state_of_the_process(
        lambda: 2.0 if LOG.isEnabledFor(logging.DEBUG) else 1.0, told_to_be_verbose, lambda: told_to_be_verbose(1)
    ),
    "level": state_of_the_process(lambda: LOG.level, told_to_be_verbose, lambda: told_to_be_verbose(1)),
    "getEffectiveLevel": state_of_the_process(
        lambda: logging.getLogger("tests of odd places").getEffectiveLevel(),
        told_to_be_verbose,
        lambda: told_to_be_verbose(1),
    ),
    "argv": state_of_the_process(lambda: len(sys.argv), lambda i: sys.argv.append("x"), without_arguments),
    "geterr": state_of_the_process(
        lambda: 2.0 if np.geterr()["divide"] == "raise" else 1.0,
        lambda i: np.seterr(divide="raise" if i % 2 == 0 else "warn"),
        lambda: np.seterr(divide="warn"),
    ),
    "seterr": state_of_the_process(
        lambda: float(np.float64(1.0) / np.float64(0.0) > 3),
        lambda i: np.seterr(divide="raise" if i == 1 else "ignore"),
        lambda: np.seterr(divide="ignore"),
    ),
    "initial_seed": state_of_the_process(
        torch.initial_seed, lambda i: torch.manual_seed(i + 2), lambda: torch.manual_seed(1)
    ),
    "gettempdir": state_of_the_process(
        lambda: len(tempfile.gettempdir()),
        lambda i: setattr(tempfile, "tempdir", "/tmp" + "/x" * i),
        lambda: setattr(tempfile, "tempdir", "/tmp"),
    ),
    "__future__": state_of_the_process(
        lambda: 2.0 if torch.__future__.get_swap_module_params_on_conversion() else 1.0,
        lambda i: torch.__future__.set_swap_module_params_on_conversion(i % 2 == 0),
        lambda: torch.__future__.set_swap_module_params_on_conversion(False),
    ),
    "Generator.initial_seed": reads(generator, lambda g: g.initial_seed(), lambda g, i: g.manual_seed(i + 2)),
    "_version": reads(lambda: torch.ones(3), lambda t: t._version, lambda t, i: t.add_(1)),
    "a function of a library": state_of_the_process(
        lambda: F.gelu(torch.ones(())), other_gelu, lambda: setattr(F, "gelu", PLACE.__dict__.get("gelu", F.gelu))
    ),
}


@pytest.fixture
def process_as_it_was() -> Any:
    directory, arguments, errors, gelu = os.getcwd(), list(sys.argv), np.geterr(), F.gelu
    yield
    os.chdir(directory)
    os.environ.pop("ODD_PLACE", None)
    sys.argv[:] = arguments
    np.seterr(**errors)
    F.gelu = gelu  # type: ignore[assignment]
    LOG.setLevel(logging.NOTSET)
    tempfile.tempdir = None
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("kind", PROCESS)
def test_what_the_process_tells_is_followed(kind: str) -> None:
    assert_same(PROCESS[kind])


def test_the_version_of_a_tensor_of_the_step_is_refused() -> None:
    def program() -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * x._version

        return step, nothing

    assert_refused(program, "WS-ITEM", "version")


# What is written.


class Keeps(logging.Handler):
    """A handler of the user's that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


def logs_to(handler: logging.Handler) -> None:
    log = logging.getLogger("tests of odd places that keep")
    log.handlers[:], log.propagate = [handler], False
    log.setLevel(logging.INFO)


LOG_THAT_KEEPS = logging.getLogger("tests of odd places that keep")


def writes(make: Callable[[], Any], write: Callable[[Any], Any], seen: Callable[[Any], Any]) -> Program:
    def program() -> Any:
        place = make()

        def step(x: torch.Tensor) -> torch.Tensor:
            write(place)
            return x * 2

        return step, nothing, lambda: seen(place)

    return program


def rows() -> Any:
    text = io.StringIO()
    PLACE.text = text  # type: ignore[attr-defined]
    return csv.writer(text)


def stream_of_a_logger() -> Any:
    text = io.StringIO()
    logs_to(logging.StreamHandler(text))
    return text


def keeping(handler_of: Callable[[], logging.Handler]) -> Callable[[], Any]:
    def make() -> Any:
        handler = handler_of()
        logs_to(handler)
        return handler

    return make


def of_memory() -> logging.Handler:
    return logging.handlers.MemoryHandler(9)


def log_something(place: Any) -> None:
    LOG_THAT_KEEPS.info("something")


def add_to_value(value: Any) -> None:
    value.value += 1


WRITES: dict[str, Program] = {
    "StringIO": writes(io.StringIO, lambda s: s.write("a"), lambda s: s.getvalue()),
    "BytesIO": writes(io.BytesIO, lambda s: s.write(b"a"), lambda s: s.getvalue()),
    "print to a StringIO": writes(io.StringIO, lambda s: print("a", file=s), lambda s: s.getvalue()),
    "getvalue": writes(lambda: io.StringIO("a"), lambda s: s.getvalue(), lambda s: s.getvalue()),
    "a bound write": writes(lambda: io.StringIO().write, lambda write: write("a"), lambda w: w.__self__.getvalue()),
    "csv": writes(rows, lambda w: w.writerow([1]), lambda w: PLACE.text.getvalue()),  # type: ignore[attr-defined]
    "a handler that keeps": writes(keeping(Keeps), log_something, lambda h: list(h.records)),
    "a MemoryHandler": writes(
        keeping(lambda: logging.handlers.MemoryHandler(9)), log_something, lambda h: len(h.buffer)
    ),
    "a stream of a logger": writes(stream_of_a_logger, log_something, lambda s: s.getvalue()),
    "a bound append": writes(lambda: [1.0].append, lambda append: append(2.0), lambda a: list(a.__self__)),
    "ctypes": writes(lambda: ctypes.c_int(1), add_to_value, lambda c: c.value),
    "Event.set": writes(threading.Event, lambda e: e.set(), lambda e: e.is_set()),
    "memoryview": writes(lambda: memoryview(bytearray(2)), lambda m: item()(m, 0), lambda m: bytes(m)),
}


REPEATED = ["print to a StringIO", "a handler that keeps", "a MemoryHandler", "a stream of a logger"]


@pytest.mark.parametrize("kind", REPEATED)
def test_what_is_printed_or_logged_is_repeated_after_each_run(kind: str) -> None:
    assert_same(WRITES[kind])


@pytest.mark.parametrize("kind", [kind for kind in WRITES if kind not in REPEATED])
def test_what_a_replay_would_not_write_is_refused_and_put_back(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(WRITES[kind], "WS-SIDE-EFFECT")


def test_an_open_file_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with path.open("w") as file:
        assert_refused(writes(lambda: file, lambda f: f.write("a"), lambda f: f.tell()), "WS-SIDE-EFFECT")
    assert path.read_text() == ""


def test_a_handler_that_counts_is_repeated() -> None:
    class Counts(logging.Handler):
        calls = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.calls += 1

    assert_same(lambda: writes(keeping(Counts), log_something, lambda h: h.calls)())
