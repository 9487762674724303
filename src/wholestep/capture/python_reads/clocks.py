"""Clocks: a step may read one to time itself and to write logs, and nothing else.

While a step is traced, `time.time()` and its kin give user code a number that remembers the line it came from.
Arithmetic with it gives such numbers again; printing and formatting work. Where it would reach the graph or outlive
the call it is refused, because a replay reads no clock:

    t0 = time.perf_counter()
    ...
    log.info("%.3f s", time.perf_counter() - t0)     allowed, and written once: a replay does not run it
    loss = loss * (time.time() - start)              refused: a tensor
    if time.time() - self.last > 60:                 refused: a branch
    self.last = time.time()                          refused: state
    return loss, time.time() - t0                    refused: the result
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime as RealDatetime
from datetime import timedelta as RealDelta
from typing import Any, NoReturn

from wholestep.capture.objects.callers import called_by_user, caller_location
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import ClockError, Location

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
_MATH = [name for name in dir(math) if callable(getattr(math, name)) and not name.startswith("_")]


class ClockNumber:
    """A number that was read from a clock, or computed from one."""

    origin: Location | None

    def refuse(self, what: str) -> NoReturn:
        raise ClockError(
            f"{what} depends on a clock that is read here; a replay reads no clock, and would use this time for ever.",
            fix="read the clock outside of the step, and pass what follows from it as an argument.",
            location=self.origin,
        )

    def _branch(self, *_: Any) -> NoReturn:
        self.refuse("a branch, or a conversion to int, float or bool,")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _branch

    def __hash__(self) -> int:
        self._branch()


def clock_number(value: Any, origin: Location | None) -> Any:
    """A number as one that came from a clock; other values as they are."""
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


def _arithmetic(name: str, base: type) -> Any:
    plain = getattr(base, name)

    def operate(self: Any, *others: Any) -> Any:
        for other in others:
            if scalar_of(other) is not None:
                self.refuse("a scalar input of the graph, in arithmetic with it,")
        return clock_number(plain(self, *others), self.origin)

    return operate


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


class _LikeDatetime(type):
    """Instances of the real class count as instances of its stand-in."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, RealDatetime)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, RealDatetime)


_FIELDS = frozenset({"year", "month", "day", "hour", "minute", "second", "microsecond"})


class ClockDatetime(ClockNumber, RealDatetime, metaclass=_LikeDatetime):
    """Lies in the place of `datetime.datetime`; its instances are times that were read from the clock."""

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


CLOCKS = frozenset({id(getattr(time, name)) for name in _READS if hasattr(time, name)} | {id(RealDatetime)})
"""Clocks that user code may hold on to (`from time import time`), by identity."""


class Clocks:
    """The clocks of one capture."""

    def __init__(self) -> None:
        clocks = [getattr(time, name) for name in _READS if hasattr(time, name)]
        self.readers: dict[int, Any] = {id(real): self._reading(real) for real in clocks}
        """What lies in the place of each clock while tracing, by identity of the clock."""
        self.was_read = False
        self.readers[id(RealDatetime)] = self._datetime()

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A clock that gives user code numbers which remember where they came from."""

        def read(*args: Any, **kwargs: Any) -> Any:
            value = real(*args, **kwargs)
            if not called_by_user() or (args and real.__name__ in ("localtime", "gmtime")):
                return value
            self.was_read = True
            if isinstance(value, time.struct_time):
                return ClockTime(clock_number(item, caller_location()) for item in value)
            return clock_number(value, caller_location())

        read.__name__ = real.__name__
        return read

    def _datetime(self) -> type:
        """The stand-in for the class `datetime`."""

        def now(cls: type, tz: Any = None) -> Any:
            value = RealDatetime.now(tz)
            if not called_by_user():
                return value
            self.was_read = True
            return _moment(value, caller_location())

        def utcnow(cls: type) -> Any:
            moment = now(cls, datetime.UTC)
            if isinstance(moment, ClockDatetime):
                return _moment(_plain_moment(moment).replace(tzinfo=None), moment.origin)
            return moment.replace(tzinfo=None)

        members = {"now": classmethod(now), "utcnow": classmethod(utcnow), "today": classmethod(lambda cls: now(cls))}
        return _LikeDatetime("datetime", (ClockDatetime,), members)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace the clocks in their modules."""
        before: list[tuple[Any, str, Any]] = [(time, n, getattr(time, n)) for n in _READS if hasattr(time, n)]
        before.append((datetime, "datetime", RealDatetime))
        functions = [(math, name, getattr(math, name)) for name in _MATH]
        try:
            for owner, name, real in before:
                setattr(owner, name, self.readers[id(real)])
            for owner, name, real in functions:
                setattr(owner, name, _through(real))
            yield
        finally:
            for owner, name, real in [*before, *functions]:
                setattr(owner, name, real)


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
