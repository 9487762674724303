"""Clocks: a step may read one to time itself and to write logs, and nothing else.

While a step is traced, `time.time()` and the like return a number to user code that records the line it came from.
Arithmetic with it returns such numbers again; printing and formatting work. Where it would reach the graph or outlive
the call it is refused, because a replay reads no clock:

    t0 = time.perf_counter()
    ...
    log.info("%.3f s", time.perf_counter() - t0)     allowed, and written once: a replay does not run it
    loss = loss * (time.time() - start)              refused: a tensor
    if time.time() - self.last > 60:                 refused: a branch
    self.last = time.time()                          refused: state
    return loss, time.time() - t0                    refused: the result

Some uses lose that mark: an index, `1e9 / time.time_ns()`, text that is parsed again. So a step that read a clock is
traced a second time in which every reading is later, and must record the same program.
"""

from __future__ import annotations

import datetime
import functools
import gc
import math
import os
import resource
import sys
import time
import timeit
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date as RealDate
from datetime import datetime as RealDatetime
from datetime import timedelta as RealDelta
from typing import Any, NoReturn

import torch

from wholestep.capture.objects.user_code import called_by_user, caller_location
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import ClockError, Location
from wholestep.ir.captured_step import NamesReplaced

_READS = (
    "time",
    "time_ns",
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
    "clock_gettime",
    "clock_gettime_ns",
    "localtime",
    "gmtime",
)
_TEXTS = ("ctime", "asctime", "strftime")
"""Functions of `time` that read the clock if they are called without a time."""
_PATCHED = [name for name in (*_READS, *_TEXTS) if hasattr(time, name)]
_LATER_NS = 90_091_037_000_003
"""By how much readings of a second trace are later: no small number divides it, and every field of a date changes."""
_LATER = RealDelta(microseconds=_LATER_NS // 1000)
_MATH = [name for name in dir(math) if callable(getattr(math, name)) and not name.startswith("_")]


@dataclass(frozen=True)
class ClockReading:
    """The value that a clock returned to user code, and the line that read it."""

    value: Any
    line: Location | None

    def later(self, times: int) -> Any:
        """The same clock read later."""
        value = self.value
        if isinstance(value, int):
            return value + times * _LATER_NS
        if isinstance(value, float):
            return value + times * _LATER_NS * 1e-9
        if isinstance(value, tuple) and not isinstance(value, time.struct_time):
            return value  # the fields differ by themselves
        if isinstance(value, time.struct_time):
            return time.localtime(time.mktime(value) + times * _LATER.total_seconds())
        return value + times * _LATER  # a date or a time


class ClockNumber:
    """A number that was read from a clock, or computed from one."""

    origin: Location | None

    def refuse(self, what: str) -> NoReturn:
        raise ClockError(
            f"{what} depends on a clock that is read here; a replay reads no clock, and would always use this time.",
            fix="read the clock outside of the step, and pass what follows from it as an argument.",
            location=self.origin,
        )

    def _branch(self, *_: Any) -> NoReturn:
        self.refuse("a branch, or a conversion to int, float or bool,")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _branch

    def __hash__(self) -> int:
        self._branch()


def clock_number(value: Any, origin: Location | None) -> Any:
    """A number marked as read from a clock; other values unchanged."""
    if type(value) is float:
        made: Any = ClockFloat(value)
    elif type(value) is int:
        made = ClockInt(value)
    elif type(value) is tuple:
        return tuple(clock_number(item, origin) for item in value)
    else:
        return value
    made.origin = origin
    return made


def _arithmetic(name: str, base: Any) -> Any:
    method = getattr(base, name)

    def operate(self: Any, *others: Any) -> Any:
        for other in others:
            if scalar_of(other) is not None:
                self.refuse("a scalar input of the graph, in arithmetic with it,")
        value = method(self, *others)
        if value is NotImplemented and isinstance(others[0], float | complex):  # an int from a clock and a float
            value = getattr(type(others[0]), name)(type(others[0])(base.__pos__(self)), *others)
        return clock_number(value, self.origin)

    return operate


_now, _local = time.time, time.localtime
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
_METHODS = [f"__{side}{name}__" for name in _BINARY for side in ("", "r")]
_METHODS += ["__neg__", "__pos__", "__abs__", "__round__", "__floor__", "__ceil__"]


def _number(name: str, base: type) -> Any:
    members: dict[str, Any] = {method: _arithmetic(method, base) for method in _METHODS}
    members |= dict.fromkeys(("__int__", "__float__", "__trunc__", "is_integer"), ClockNumber._branch)
    return type(name, (ClockNumber, base), members)


ClockFloat = _number("ClockFloat", float)
ClockInt = _number("ClockInt", int)


class ClockTime(tuple):  # type: ignore[type-arg]
    """`time.localtime()`: a tuple that `time.strftime` takes, of numbers that came from a clock."""

    def __getattr__(self, name: str) -> Any:
        names = ("year", "mon", "mday", "hour", "min", "sec", "wday", "yday", "isdst")
        short = name.removeprefix("tm_")
        if not name.startswith("tm_") or short not in names:
            raise AttributeError(name)
        return self[names.index(short)]


class ClockFields:
    """`os.times()`, `resource.getrusage()`: named fields that came from a clock."""

    def __init__(self, fields: Any, origin: Location | None) -> None:
        self._fields, self._origin = fields, origin

    def __getattr__(self, name: str) -> Any:
        return clock_number(getattr(self._fields, name), self._origin)

    def __getitem__(self, index: Any) -> Any:
        return clock_number(self._fields[index], self._origin)

    def __iter__(self) -> Iterator[Any]:
        return (clock_number(item, self._origin) for item in self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return repr(self._fields)


class ClockDelta(ClockNumber, RealDelta):
    """The difference of two times."""

    def total_seconds(self) -> Any:
        return clock_number(RealDelta.total_seconds(self), self.origin)

    def __getattribute__(self, name: str) -> Any:
        value = RealDelta.__getattribute__(self, name)
        return clock_number(value, self.origin) if name in ("days", "seconds", "microseconds") else value


def _delta(value: RealDelta, origin: Location | None) -> Any:
    made = RealDelta.__new__(ClockDelta, days=value.days, seconds=value.seconds, microseconds=value.microseconds)
    made.origin = origin
    return made


class _LikeReal(type):
    """Instances of the real class count as instances of its stand-in."""

    _real: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls._real)


_FIELDS = frozenset({"year", "month", "day", "hour", "minute", "second", "microsecond"})


class ClockDatetime(ClockNumber, RealDatetime, metaclass=_LikeReal):
    """Takes the place of `datetime.datetime`; its instances are times that were read from the clock."""

    _real = RealDatetime

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return RealDatetime(*args, **kwargs)

    def __sub__(self, other: Any) -> Any:
        result = _plain_moment(self) - (_plain_moment(other) if isinstance(other, RealDatetime) else other)
        return _delta(result, self.origin) if isinstance(result, RealDelta) else _moment(result, self.origin)

    def __rsub__(self, other: Any) -> Any:
        return _delta(other - _plain_moment(self), self.origin)

    def __add__(self, other: Any) -> Any:
        return _moment(_plain_moment(self) + other, self.origin)

    __radd__ = __add__

    def timestamp(self) -> Any:
        return clock_number(_plain_moment(self).timestamp(), self.origin)

    def __getattribute__(self, name: str) -> Any:
        value = RealDatetime.__getattribute__(self, name)
        return clock_number(value, self.origin) if name in _FIELDS else value


def _moment(value: Any, origin: Location | None) -> Any:
    fields = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    made: Any = RealDatetime.__new__(ClockDatetime, *fields, value.tzinfo, fold=value.fold)
    made.origin = origin
    return made


def _plain_moment(value: Any) -> Any:
    if type(value) is not ClockDatetime:
        return value
    return RealDatetime.combine(value.date(), value.time(), value.tzinfo)


def _through(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` whose result came from a clock where an argument did."""

    def call(*args: Any, **kwargs: Any) -> Any:
        clock = next((a for a in args if isinstance(a, ClockNumber)), None)
        if clock is None:
            return real(*args, **kwargs)
        return clock_number(real(*args, **kwargs), clock.origin)

    return call


_OF_THE_PROCESS: tuple[tuple[Any, str], ...] = (
    (os, "times"),
    (resource, "getrusage"),
    (gc, "get_count"),
    (sys, "getrefcount"),
    (tracemalloc, "get_traced_memory"),
    *((torch.cuda, f"{peak}memory_{what}") for peak in ("", "max_") for what in ("allocated", "reserved")),
)
"""Readings of the time that this process has used, and of its memory: they differ by themselves like a clock."""
_READS_OF_THE_PROCESS = [getattr(owner, name) for owner, name in _OF_THE_PROCESS]
CLOCKS = frozenset(
    map(id, [*(getattr(time, name) for name in _PATCHED), RealDatetime, RealDate, *_READS_OF_THE_PROCESS])
)
"""Clocks that user code may hold by a name of its own (`from time import time`), by identity."""


class Clocks:
    """The clocks of one capture. `again`: the readings of an earlier trace of the same call, and which are later."""

    def __init__(self, again: tuple[tuple[ClockReading, ...], frozenset[int]] | None = None) -> None:
        self._again = again
        self.readings: list[ClockReading] = []
        self.readers: dict[int, Any] = {
            id(getattr(time, name)): (self._text if name in _TEXTS else self._reading)(getattr(time, name))
            for name in _PATCHED
        }
        """The stand-in of each clock while tracing, by identity of the clock."""
        self.readers |= {id(read): self._reading(read) for read in _READS_OF_THE_PROCESS}
        self.readers[id(RealDatetime)] = self._datetime()
        self.readers[id(RealDate)] = self._date()

    def _note(self, value: Any) -> Any:
        """The value that user code gets where it reads a clock: the time, or the reading of the earlier trace."""
        at = len(self.readings)
        self.readings.append(ClockReading(value, caller_location()))
        if self._again is None or at >= len(self._again[0]):
            return value
        before, later = self._again
        return before[at].later(at + 1) if at in later else before[at].value

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A clock that returns marked numbers to user code."""

        @functools.wraps(real)
        def read(*args: Any, **kwargs: Any) -> Any:
            value = real(*args, **kwargs)
            if not called_by_user() or (args and real.__name__ in ("localtime", "gmtime")):
                return value
            value = self._note(value)
            if isinstance(value, time.struct_time):
                return ClockTime(clock_number(item, caller_location()) for item in value)
            if isinstance(value, tuple):
                return ClockFields(value, caller_location())
            return clock_number(value, caller_location())

        return read

    def _text(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function that formats the time it is given, or the current time."""
        least = 1 if real.__name__ == "strftime" else 0

        @functools.wraps(real)
        def read(*args: Any) -> Any:
            if not called_by_user() or len(args) > least:
                return real(*args)
            now = self._note(_now())
            return real(*args, now if real.__name__ == "ctime" else _local(now))

        return read

    def _datetime(self) -> type:
        """The stand-in for the class `datetime`."""

        def now(cls: type, tz: Any = None) -> Any:
            value = RealDatetime.now(tz)
            return _moment(self._note(value), caller_location()) if called_by_user() else value

        def utcnow(cls: type) -> Any:
            moment = now(cls, datetime.UTC)
            if isinstance(moment, ClockDatetime):
                return _moment(_plain_moment(moment).replace(tzinfo=None), moment.origin)
            return moment.replace(tzinfo=None)

        members = {"now": classmethod(now), "utcnow": classmethod(utcnow), "today": classmethod(lambda cls: now(cls))}
        return _LikeReal("datetime", (ClockDatetime,), {**members, "_real": RealDatetime})

    def _date(self) -> type:
        """The stand-in for the class `date`."""

        def today(cls: type) -> Any:
            return self._note(RealDate.today()) if called_by_user() else RealDate.today()

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            return RealDate(*args, **kwargs)

        return _LikeReal("date", (RealDate,), {"today": classmethod(today), "__new__": new, "_real": RealDate})

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace the clocks in their modules."""
        before: list[tuple[Any, str, Any]] = [(time, name, getattr(time, name)) for name in _PATCHED]
        before += [(datetime, "datetime", RealDatetime), (datetime, "date", RealDate)]
        before += [(timeit, "default_timer", timeit.default_timer)]
        before += [(*place, read) for place, read in zip(_OF_THE_PROCESS, _READS_OF_THE_PROCESS, strict=True)]
        functions = [(math, name, getattr(math, name)) for name in _MATH]
        with ExitStack() as stack:
            for owner, name, real in [*before, *functions]:
                stack.callback(setattr, owner, name, real)
            for owner, name, real in before:
                setattr(owner, name, self.readers[id(real)])
            for owner, name, real in functions:
                setattr(owner, name, _through(real))
            for owner, name, real in [*before, *functions]:
                NamesReplaced.note(stack, owner, name, real)
            yield


def refuse_clocks(values: Any, what: str, depth: int = 0) -> None:
    """Raise where a number from a clock is among values that reach the graph or outlive the call."""
    if isinstance(values, ClockNumber):
        values.refuse(what)
    if depth < 4 and type(values) in (list, tuple, set):
        for item in values:
            refuse_clocks(item, what, depth + 1)
    elif depth < 4 and type(values) is dict:
        for item in values.values():
            refuse_clocks(item, what, depth + 1)
