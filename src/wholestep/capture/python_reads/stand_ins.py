"""Stand-ins for objects whose reading has an effect: iterators, generators, queues, open files.

    batches = iter(loader)            next(batches) in the step would take one batch at capture and none at a replay
    ids = itertools.count()           the same number at each replay
    lines = open(path)                one line at capture

While a step is traced a stand-in takes the place of such an object. It raises before anything is taken, so the first
element is still there. A tuple, a `partial` or a bound method (`count().__next__`) that holds one is rebuilt with
the stand-in (`with_parts`). Where it cannot be placed (in a set), the position of the iterator is compared before and
after.
"""

from __future__ import annotations

import csv
import functools
import io
import multiprocessing.connection
import multiprocessing.queues
import operator
import os
import queue
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from types import BuiltinFunctionType, GeneratorType, MethodType, MethodWrapperType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy

from wholestep.capture.objects.user_code import is_foreign, user_code_location
from wholestep.capture.results.effect_line import Effect
from wholestep.errors import CapturedTensorError, SideEffectError
from wholestep.ir.user_objects.opaque_state import is_memory, size_of
from wholestep.ir.user_objects.plain_contents import is_large
from wholestep.ir.user_objects.slots import Slot

if TYPE_CHECKING:
    from wholestep.capture.effects.containers import Recorders
    from wholestep.capture.scalars.tables import Tables

_QUEUES = (
    queue.Queue,
    queue.SimpleQueue,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    multiprocessing.connection.Connection,
)
_WRITERS = (type(csv.writer(io.StringIO())), csv.DictWriter)
_READS_FILE = frozenset({"read", "read1", "readline", "readlines", "readinto", "readinto1", "seek", "tell", "truncate"})
_WRITES_FILE = frozenset({"write", "writelines", "getvalue", "getbuffer", "writerow", "writerows", "writeheader"})
_HEAP_TYPE = 1 << 9


_EXTERNAL = frozenset(
    {"socket.socket", "_socket.socket", "sqlite3.Connection", "subprocess.Popen", "http.client.HTTPConnection"}
)
"""Classes of connections to something outside of the process."""


def _is_connection(kind: type) -> bool:
    return is_foreign(kind) and any(f"{base.__module__}.{base.__qualname__}" in _EXTERNAL for base in kind.__mro__)


def is_consumed(value: Any) -> bool:
    """Whether reading a value consumes something. An iterator written as a class of the user's is followed instead: its
    position is in its attributes."""
    kind = type(value)
    if issubclass(kind, (*_QUEUES, *_WRITERS)) or issubclass(kind, AsyncGenerator) or _is_connection(kind):
        return True
    if issubclass(kind, io.IOBase):
        return is_foreign(kind) and _is_open(value) and not _is_of_the_process(value)
    if not hasattr(kind, "__next__") or issubclass(kind, (StandIn, *weakref.ProxyTypes)):
        return False  # (a weak proxy has all methods, whatever it stands for)
    return not (kind.__flags__ & _HEAP_TYPE and not is_foreign(kind))


IMMUTABLE = (tuple, frozenset, functools.partial, BuiltinFunctionType, MethodWrapperType, MethodType)
"""Types of values that are rebuilt when a part of them is replaced."""
_DEEPEST = 6


def with_parts(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """A value whose immutable parts are changed: itself, or a new tuple, `partial` or bound method."""
    kind: Any = type(value)
    is_named = issubclass(kind, tuple) and hasattr(kind, "_make")
    if depth < _DEEPEST and (kind is tuple or kind is frozenset or is_named):
        items = [with_parts(item, change, depth + 1) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return kind._make(items) if is_named else kind(items)
    if depth < _DEEPEST and kind is functools.partial:
        parts = (value.func, value.args, tuple(value.keywords.values()))
        func, args, keywords = with_parts(parts, change, depth + 1)
        if func is parts[0] and args is parts[1] and keywords is parts[2]:
            return value
        return functools.partial(func, *args, **dict(zip(value.keywords, keywords, strict=True)))
    changed = change(value)
    if changed is value and kind in (BuiltinFunctionType, MethodWrapperType, MethodType):
        owner = value.__self__
        if owner is not None and not isinstance(owner, ModuleType | type):
            stand_in = change(owner)
            if isinstance(stand_in, StandIn):
                return stand_in.method(value.__name__)
    return changed


def _is_open(file: Any) -> bool:
    try:
        return bool(file.readable() or file.writable())
    except ValueError:  # closed
        return False


def _is_of_the_process(file: Any) -> bool:
    """Standard output and the like: what is printed is printed at capture."""
    if any(file is each for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        return True
    return getattr(file, "name", None) == os.devnull


class StandIn:
    """Takes the place of an object that reading would consume."""

    def __init__(self, real: Any, path: str) -> None:
        self._wholestep_real = real
        self._wholestep_path = path
        self._wholestep_thread = threading.get_ident()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse_call("")

    def _refuse_call(self, name: str, *_: Any, **__: Any) -> NoReturn:
        real, path = self._wholestep_real, self._wholestep_path
        kind = type(real).__name__
        if name in _WRITES_FILE:
            what = f"the step writes to {path} or asks what was written, a {kind}, and a replay would not write."
        elif is_memory(real):
            raise CapturedTensorError(
                f"the step reads {path}, a {kind} of {size_of(real) >> 20} MB, too large to be compared at each call.",
                fix="make a tensor of the part that the step needs, outside of the step.",
                location=user_code_location(),
            )
        elif isinstance(real, _QUEUES) or _is_connection(type(real)):
            what = f"the step uses {path}, a {kind}, and a replay would not."
        else:
            what = f"the step takes an element of {path}, a {kind}, and a replay would not take the next one."
        raise SideEffectError(
            what,
            fix="write outside of the step what the step returns."
            if name in _WRITES_FILE
            else "take it outside of the step, and pass it to the step as an argument.",
            location=user_code_location(),
        )

    __next__ = __length_hint__ = __contains__ = __getitem__ = __setitem__ = _refuse

    def __iter__(self) -> StandIn:
        if isinstance(self._wholestep_real, io.IOBase):
            self._refuse()
        return self

    def method(self, name: str) -> Any:
        """The replacement of a method that was taken from the object before: it raises when it is called."""
        real = self._wholestep_real
        if isinstance(real, io.IOBase) and name not in _READS_FILE | _WRITES_FILE:
            return getattr(real, name)
        return functools.partial(self._refuse_call, name)

    def __getattr__(self, name: str) -> Any:
        real = self._wholestep_real
        if name.startswith("__"):
            raise AttributeError(name)
        if threading.get_ident() != self._wholestep_thread:
            return getattr(real, name)  # a thread of the user's continues to use it
        if isinstance(real, io.IOBase) and name not in _READS_FILE | _WRITES_FILE:
            return getattr(real, name)
        if isinstance(real, GeneratorType) and name.startswith("gi_"):
            return getattr(real, name)
        if name in _WRITES_FILE:
            return functools.partial(self._refuse_call, name)
        return self._refuse


class LargeArray(numpy.ndarray):
    """Takes the place of an array that is too large to be compared at each call."""

    _wholestep_path = ""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CapturedTensorError(
            f"the step reads {self._wholestep_path}, a NumPy array of {self.nbytes >> 20} MB, which is too large to be "
            "compared at each call.",
            fix="make a tensor of it, or of the part that the step needs, outside of the step.",
            location=user_code_location(),
        )

    __getitem__ = __setitem__ = __iter__ = __contains__ = __float__ = __int__ = __bool__ = _refuse
    __array__ = __array_ufunc__ = __array_function__ = tolist = tobytes = item = copy = sum = mean = _refuse


def large_array(real: Any, path: str) -> Any:
    """The stand-in of a large array: it has its shape and type."""
    view = real.view(LargeArray)
    view._wholestep_path = path
    return view


def real_of(value: Any) -> Any:
    """The object behind a stand-in; any other value itself."""
    if isinstance(value, StandIn):
        return value._wholestep_real
    return value.wholestep_real if hasattr(type(value), "wholestep_real") else value


class StandIns:
    """The stand-ins of one trace."""

    def __init__(self, replacements: dict[int, Any], recorders: Recorders, tables: Tables) -> None:
        self._replacements = replacements
        """Of functions that give another value each time (a clock), by their identity."""
        self._recorders = recorders
        self._tables = tables
        self._made: dict[int, Any] = {}
        self._swapped: list[tuple[Slot, Any, Any]] = []
        self._fixed: list[tuple[str, Any, Any]] = []

    def of(self, real: Any, path: str) -> Any:
        """The stand-in for an object; the object itself if it needs none."""
        table = self._tables.stand_in(real, path)
        return with_parts(real, lambda part: self._of(part, path)) if table is None else table

    def _of(self, real: Any, path: str) -> Any:
        if id(real) in self._replacements:
            return self._replacements[id(real)]
        container = self._recorders.stand_in(real, path)
        if container is not None:
            return container
        if is_large(real) and isinstance(real, numpy.ndarray):
            return large_array(real, path)
        if not is_consumed(real) and not is_large(real):
            return real
        return self._made.setdefault(id(real), StandIn(real, path))

    def put(self, slot: Slot, real: Any) -> Any:
        """Put the stand-in of an object into the slot that holds it, and return it."""
        now = slot.get() if isinstance(real, IMMUTABLE) else real  # it may hold fakes by now
        stand_in = self.of(now, slot.path)
        if stand_in is now:
            return now
        try:
            slot.set(stand_in)
        except NotImplementedError:  # an element of a tuple
            self.watch(real, slot.path)
            return real
        self._swapped.append((slot, now, stand_in))
        return stand_in

    def watch(self, real: Any, path: str) -> None:
        """Where no stand-in can be put, record the position, which shows whether an element was taken."""
        if is_consumed(real):
            self._fixed.append((path, real, _position(real)))

    def restore(self) -> None:
        while self._swapped:
            slot, real, stand_in = self._swapped.pop()
            if slot.get() is stand_in:
                slot.set(real)

    def refuse_moved(self) -> None:
        """Raise if an element was taken of an iterator without a stand-in."""
        for path, real, before in self._fixed:
            if _position(real) != before:
                raise SideEffectError(
                    f"the step took an element of {path}, a {type(real).__name__}, and a replay would not take the "
                    "next one. The element is gone.",
                    fix="take it outside of the step, and pass it to the step as an argument.",
                ).seen_by(Effect(lambda capture, real=real: _position(real), operator.eq))  # type: ignore[misc]


def _position(iterator: Any) -> Any:
    """A value that differs after an element was taken."""
    if isinstance(iterator, GeneratorType):
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    if isinstance(iterator, io.IOBase):
        return iterator.tell() if iterator.seekable() else None
    hint = operator.length_hint(iterator, -1)
    return (hint, repr(iterator))
