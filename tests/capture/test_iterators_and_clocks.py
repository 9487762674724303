"""What cannot be read twice: iterators are refused before anything is taken, clocks and random bytes with the line."""

from __future__ import annotations

import cProfile
import datetime
import functools
import itertools
import logging
import math
import os
import queue
import random
import resource
import secrets
import sys
import time
import timeit
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterator
from datetime import datetime as renamed_datetime
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from capture.followed import assert_follows, assert_refused
from harness import marked_line

# Iterators.


def floats() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0)


ITERATORS: dict[str, tuple[Callable[[], Any], Any]] = {
    "count": (itertools.count, 0),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), 1.0),
    "generator": (floats, 1.0),
    "generator expression": (lambda: (i * 2.0 for i in range(1, 4)), 2.0),
    "list iterator": (lambda: iter([1.0, 2.0]), 1.0),
    "range iterator": (lambda: iter(range(1, 3)), 1),
    "dict iterator": (lambda: iter({"a": 1.0}.values()), 1.0),
    "map": (lambda: map(float, [1, 2]), 1.0),
    "zip": (lambda: zip([1.0], strict=True), (1.0,)),
    "enumerate": (lambda: enumerate([5.0]), (0, 5.0)),
    "chain": (lambda: itertools.chain([1.0], [2.0]), 1.0),
    "islice": (lambda: itertools.islice(itertools.count(3), 2), 3),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_is_refused_before_it_moves(kind: str) -> None:
    make, first = ITERATORS[kind]
    iterator = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        value = next(iterator)  # <- here
        return x * (value[0] if isinstance(value, tuple) else value)

    assert_refused(step, ws.errors.SideEffectError, "iterator", step)
    assert next(iterator) == first


def test_a_loop_over_an_iterator_is_refused_before_it_moves() -> None:
    iterator = floats()

    def step(x: torch.Tensor) -> torch.Tensor:
        for value in iterator:  # <- here
            x = x * value
        return x

    assert_refused(step, ws.errors.SideEffectError, "iterator", step)
    assert list(iterator) == [1.0, 2.0, 3.0]


class Holder:
    """An object with an iterator in it."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def read(self) -> Any:
        return next(self.iterator)


class Stream(nn.Module):
    """A module with an iterator in it."""

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.iterator = iterator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.iterator)


def in_an_attribute(iterator: Any) -> Any:
    holder = Holder(iterator)
    return lambda x: x * holder.read()


def in_a_module(iterator: Any) -> Any:
    return Stream(iterator)


def in_a_dict(iterator: Any) -> Any:
    table = {"scale": iterator}
    return lambda x: x * next(table["scale"])


def in_a_list(iterator: Any) -> Any:
    items = [[iterator]]
    return lambda x: x * next(items[0][0])


def in_a_class(iterator: Any) -> Any:
    class Config:
        scale = iterator

    return lambda x: x * next(Config.scale)


def through_a_method(iterator: Any) -> Any:
    return lambda x: x * iterator.__next__()


def through_zip(iterator: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        for scale, _ in zip(iterator, [1], strict=False):
            x = x * scale
        return x

    return step


def through_list(iterator: Any) -> Any:
    return lambda x: x * sum(list(iterator))


def in_slots(iterator: Any) -> Any:
    class Config:
        __slots__ = ("scale",)

    config = Config()
    config.scale = iterator
    return lambda x: x * next(config.scale)


def in_a_tuple(iterator: Any) -> Any:
    pair = (iterator, 1)
    return lambda x: x * next(pair[0])


def in_a_default(iterator: Any) -> Any:
    def step(x: torch.Tensor, scales: Any = iterator) -> torch.Tensor:
        return x * next(scales)

    return step


def in_a_keyword_default(iterator: Any) -> Any:
    def step(x: torch.Tensor, *, scales: Any = iterator) -> torch.Tensor:
        return x * next(scales)

    return step


def in_a_named_tuple(iterator: Any) -> Any:
    pair = namedtuple("Pair", "a b")(1, (iterator, 2))
    return lambda x: x * next(pair.b[0])


def in_a_frozenset(iterator: Any) -> Any:
    held = frozenset([iterator])
    return lambda x: x * next(next(iter(held)))


def in_a_tuple_of_an_attribute(iterator: Any) -> Any:
    holder = Holder((1.0, iterator))
    return lambda x: x * next(holder.iterator[1])


def in_a_partial(iterator: Any) -> Any:
    take = functools.partial(next, iterator)
    return lambda x: x * take()


def as_a_bound_method(iterator: Any) -> Any:
    take = iterator.__next__
    return lambda x: x * take()


def as_a_bound_method_in_a_tuple(iterator: Any) -> Any:
    functions = (float, iterator.__next__)
    return lambda x: x * functions[1]()


def in_a_set(iterator: Any) -> Any:
    held = {iterator}
    return lambda x: x * next(next(iter(held)))


WHERE = [
    in_an_attribute,
    in_a_module,
    in_a_dict,
    in_a_list,
    in_a_class,
    through_a_method,
    through_zip,
    through_list,
    in_slots,
    in_a_tuple,
    in_a_named_tuple,
    in_a_frozenset,
    in_a_tuple_of_an_attribute,
    in_a_default,
    in_a_keyword_default,
    in_a_partial,
    as_a_bound_method,
    as_a_bound_method_in_a_tuple,
]


@pytest.mark.parametrize("make", WHERE, ids=lambda make: make.__name__)
def test_an_iterator_is_refused_wherever_it_is_kept(make: Callable[[Any], Any]) -> None:
    iterator = floats()
    assert_refused(make(iterator), ws.errors.SideEffectError, "iterator|generator")
    assert list(iterator) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("make", [in_a_set], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "iterator", [floats, itertools.count, lambda: iter([1.0, 2.0])], ids=["generator", "count", "list"]
)
def test_an_iterator_that_moved_is_noticed_where_no_stand_in_fits(make: Any, iterator: Callable[[], Any]) -> None:
    assert_refused(make(iterator()), ws.errors.SideEffectError, "took an element")


def test_an_iterator_among_the_arguments_is_refused_before_it_moves() -> None:
    iterator = floats()

    def step(x: torch.Tensor, scales: Any) -> torch.Tensor:
        return x * next(scales)  # <- here

    error = assert_refused(step, ws.errors.SideEffectError, "scales", step, (iterator,))
    assert "argument" in error.fix
    assert next(iterator) == 1.0


def test_an_iterator_that_the_step_does_not_read_is_no_matter() -> None:
    holder = SimpleNamespace(it=floats(), scale=2.0)
    step = ws.compile(lambda x: x * holder.scale)
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert next(holder.it) == 1.0


def test_an_iterator_made_in_the_step_is_used() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for i, scale in enumerate(iter([1.0, 2.0])):
            x = x * scale + i
        return x * next(itertools.count(3))

    assert torch.equal(ws.compile(step)(torch.ones(2)), step(torch.ones(2)))


def test_an_iterator_class_of_the_users_is_followed() -> None:
    class Schedule:
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self) -> Schedule:
            return self

        def __next__(self) -> int:
            self.position += 1
            return self.position

    def make() -> Any:
        schedule = Schedule()
        return lambda: next(schedule), lambda i: None, lambda: schedule.position

    assert_follows(make)


@pytest.mark.parametrize("make", [queue.Queue, queue.SimpleQueue], ids=["Queue", "SimpleQueue"])
def test_a_queue_is_refused_before_anything_is_taken(make: Callable[[], Any]) -> None:
    scales = make()
    scales.put(2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * scales.get()  # <- here

    assert_refused(step, ws.errors.SideEffectError, "Queue", step)
    assert scales.get() == 2.0


def test_an_open_file_is_refused_before_a_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "scales.txt"
    path.write_text("2.0\n3.0\n")
    with path.open() as file:

        def step(x: torch.Tensor) -> torch.Tensor:
            return x * float(file.readline())  # <- here

        assert_refused(step, ws.errors.SideEffectError, "file", step)
        assert file.readline() == "2.0\n"


# Clocks.

USES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "tensor": lambda t, x: x * t,
    "tensor from the right": lambda t, x: t * x,
    "torch function": lambda t, x: torch.add(x, 1.0, alpha=t),
    "full": lambda t, x: x + torch.full((3,), t),
    "item": lambda t, x: x.index_fill(0, torch.tensor([0]), t),
    "list of numbers": lambda t, x: x + torch.tensor([t, t, t]),
    "branch": lambda t, x: x * 2 if t > 5 else x,
    "truth": lambda t, x: x * 2 if t else x,
    "int": lambda t, x: x * int(t),
    "float": lambda t, x: x * float(t),
    "minimum": lambda t, x: x * min(t, 3.0),
    "result": lambda t, x: (x, t),
    "nested result": lambda t, x: {"x": x, "times": [t]},
    "arithmetic": lambda t, x: x * ((t - 3) / 7 + 1) ** 2,
    "math": lambda t, x: x * math.sqrt(t),
    "round": lambda t, x: x * round(t, 1),
}


@pytest.mark.parametrize("use", USES)
def test_a_clock_that_reaches_the_graph_is_refused_with_the_line_of_the_clock(use: str) -> None:
    apply = USES[use]

    def step(x: torch.Tensor) -> Any:
        now = time.time()  # <- here
        return apply(now - 1.0, x)

    assert_refused(step, ws.errors.ClockError, "clock", step)
    assert type(time.time()) is float


def renamed_perf_counter() -> Any:
    return perf_counter()


def monotonic_ns() -> Any:
    return time.monotonic_ns()


def process_time() -> Any:
    return time.process_time()


def hour() -> Any:
    return time.localtime().tm_hour


def datetime_now() -> Any:
    return datetime.datetime.now().timestamp()


def datetime_difference() -> Any:
    return (renamed_datetime.now() - renamed_datetime(2020, 1, 1)).total_seconds()


def datetime_field() -> Any:
    return renamed_datetime.utcnow().second


READS = [renamed_perf_counter, monotonic_ns, process_time, hour, datetime_now, datetime_difference, datetime_field]


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_every_clock_of_python_is_seen(read: Callable[[], Any]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * read()

    error = assert_refused(step, ws.errors.ClockError, "clock")
    assert error.location is not None
    assert error.location.function == read.__name__
    assert type(datetime.datetime.now()) is datetime.datetime


SLIPS: dict[str, Callable[[], Any]] = {
    "an int times a float": lambda: time.time_ns() * 1e-9 % 1e-3,
    "a float divided by an int": lambda: 1e9 / time.time_ns(),
    "bits": lambda: time.monotonic_ns() & 7,
    "an index": lambda: (0.5, 1.5, 2.5)[time.time_ns() % 3],
    "text that is parsed": lambda: float(f"{time.perf_counter():.3f}"),
    "strftime": lambda: int(time.strftime("%S")),
    "ctime": lambda: int(time.ctime()[17:19]),
    "today": lambda: datetime.date.today().day,
    "numpy": lambda: float(np.float32(2) * time.time()),
    "a division of differences": lambda: (datetime.datetime.now() - EPOCH) / datetime.timedelta(seconds=1),
    "math.fsum": lambda: math.fsum([time.time()]),
    "timeit": lambda: timeit.default_timer() % 1.0,
    "os.times": lambda: os.times().elapsed,
    "getrusage": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_utime,
}
EPOCH = datetime.datetime(2020, 1, 1)


@pytest.mark.parametrize("slip", SLIPS)
def test_a_clock_whose_number_became_plain_is_refused_with_its_line(slip: str) -> None:
    read = SLIPS[slip]
    assert_refused(lambda x: x * read(), ws.errors.ClockError, "clock")
    assert type(datetime.date.today()) is datetime.date
    assert isinstance(datetime.datetime.now(), datetime.date)


def test_a_clock_in_returned_text_is_refused_with_the_line_of_its_reading() -> None:
    def step(x: torch.Tensor) -> Any:
        started = time.perf_counter()
        print(f"started at {started}")
        moment = time.time()  # <- here
        return x * 2, f"{moment:.2f}"

    assert_refused(step, ws.errors.ClockError, "clock", step)


def test_a_comparison_trace_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print(f"{time.time():.0f} s")
        return x * 2

    ws.compile(step, lower="eager")(torch.ones(2))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_clock_in_an_attribute_or_argument_is_seen() -> None:
    holder = Holder(None)
    holder.clock = time.time  # type: ignore[attr-defined]
    assert_refused(lambda x: x * holder.clock(), ws.errors.ClockError, "clock")  # type: ignore[attr-defined]
    assert_refused(lambda x, clock: x * clock(), ws.errors.ClockError, "clock", args=(time.perf_counter,))
    clocks = (time.time, functools.partial(time.time))
    assert_refused(lambda x: x * clocks[0](), ws.errors.ClockError, "clock")
    assert_refused(lambda x: x * clocks[1](), ws.errors.ClockError, "clock")
    assert_refused(lambda x, read=time.time: x * read(), ws.errors.ClockError, "clock")
    assert holder.clock is time.time  # type: ignore[attr-defined]


def test_a_clock_that_is_kept_is_refused_with_the_line() -> None:
    holder = Holder(None)

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.started = time.time()  # type: ignore[attr-defined]  # <- here
        return x * 2

    assert_refused(step, ws.errors.ClockError, "started", step)
    assert not hasattr(holder, "started")


def test_a_step_may_time_itself_and_write_logs(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("users")

    def step(x: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        y = x * 2
        elapsed = time.perf_counter() - started
        moment = datetime.datetime.now()
        log.warning("%.3f s, %s, %s", elapsed * 1000, round(elapsed, 3), moment)
        print(f"{elapsed:.3f} at {moment:%H:%M} {time.strftime('%H', time.localtime())} {math.floor(elapsed)} {moment}")
        return y

    compiled = ws.compile(step)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert "s, " in caplog.text
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


# Random bytes of the system.

RANDOM: dict[str, Callable[[], Any]] = {
    "uuid4": lambda: uuid.uuid4().int % 7,
    "uuid1": lambda: uuid.uuid1().int % 7,
    "urandom": lambda: os.urandom(1)[0],
    "getrandom": lambda: os.getrandom(1)[0],
    "token": lambda: secrets.token_bytes(1)[0],
    "randbelow": lambda: secrets.randbelow(5),
    "choice": lambda: secrets.choice([1.0, 2.0]),
    "numpy": lambda: np.random.default_rng().random(),
}


GENERATORS: dict[str, Callable[[], Any]] = {
    "RandomState": lambda: (lambda r: lambda: r.rand())(np.random.RandomState(3)),
    "RandomState.rand": lambda: np.random.RandomState(3).rand,
    "BitGenerator": lambda: (lambda b: lambda: b.random_raw() % 7)(np.random.PCG64(3)),
    "Random.random": lambda: random.Random(3).random,
    "Generator.random": lambda: np.random.default_rng(3).random,
    "partial": lambda: functools.partial(random.Random(3).uniform, 1, 2),
    "in a tuple": lambda: (lambda t: lambda: t[0].random())((random.Random(3),)),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_python_or_numpy_is_refused_however_it_is_kept(kind: str) -> None:
    draw = GENERATORS[kind]()
    error = assert_refused(lambda x: x * draw(), ws.errors.RandomStateError, "draws from")
    assert error.location is not None
    assert error.location.file == __file__
    assert draw() == GENERATORS[kind]()(), "the generator is where it was"


@pytest.mark.parametrize("draw", RANDOM)
def test_random_bytes_of_the_system_are_refused_with_the_line(draw: str) -> None:
    read = RANDOM[draw]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * read()

    error = assert_refused(step, ws.errors.RandomStateError, "draws from")
    assert error.location is not None
    assert error.location.file == __file__
    assert len(os.urandom(4)) == 4


def rewinds(generator: torch.Generator, x: torch.Tensor) -> torch.Tensor:
    state = generator.get_state()
    drawn = torch.rand(3, generator=generator)
    generator.set_state(state)  # <- here
    return x + drawn


@pytest.mark.parametrize("profiler", ["function", "cProfile"])
def test_a_generator_that_is_set_to_its_state_is_seen_while_a_profiler_is_active(profiler: str) -> None:
    generator, seen = torch.Generator().manual_seed(3), []
    profile = cProfile.Profile()
    before = generator.get_state()
    if profiler == "function":
        sys.setprofile(lambda frame, event, arg: seen.append(frame.f_code.co_name))
    else:
        profile.enable()
    active = sys.getprofile()
    try:
        with pytest.raises(ws.errors.RandomStateError) as caught:
            ws.compile(lambda x: rewinds(generator, x), lower="eager")(torch.ones(3))
        assert sys.getprofile() is active
    finally:
        sys.setprofile(None)
        profile.disable()
    assert caught.value.location is not None
    assert caught.value.location.line == marked_line(rewinds)
    assert torch.equal(generator.get_state(), before)
    assert profiler != "function" or "rewinds" in seen


class ProfilerInC:
    """A profiler without a function: `sys.getprofile()` returns its state."""


def test_a_profiler_that_capture_could_not_start_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()
    monkeypatch.setattr(sys, "getprofile", ProfilerInC)
    step = ws.compile(lambda x: rewinds(generator, x), lower="eager")
    with pytest.raises(ws.errors.UnsupportedError, match="ProfilerInC"):
        step(torch.ones(3))
    drawing = ws.compile(lambda x: x + torch.rand(3, generator=generator), lower="eager")
    assert drawing(torch.zeros(3)).shape == (3,)
