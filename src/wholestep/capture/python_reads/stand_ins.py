"""Stand-ins for objects whose reading has an effect: iterators, generators, queues, open files.

    batches = iter(loader)            next(batches) in the step would take one batch at capture and none at a replay
    ids = itertools.count()           the same number at each replay
    lines = open(path)                one line at capture

While a step is traced a stand-in takes the place of such an object. It raises before anything is taken, so the first
element is still there. Where it cannot be placed (inside of a tuple, in a default of a function), the position of the
iterator is compared before and after.
"""

from __future__ import annotations

import io
import multiprocessing.connection
import multiprocessing.queues
import operator
import queue
import weakref
from collections.abc import AsyncGenerator
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy

from wholestep.capture.objects.callers import is_foreign
from wholestep.capture.results.effect_line import Effect
from wholestep.errors import CapturedTensorError, SideEffectError
from wholestep.ir.meta import user_location
from wholestep.ir.user_objects.plain_contents import is_large
from wholestep.ir.user_objects.slots import Slot

if TYPE_CHECKING:
    from wholestep.capture.effects.containers import Recorders

_QUEUES = (
    queue.Queue,
    queue.SimpleQueue,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    multiprocessing.connection.Connection,
)
_READS_FILE = frozenset({"read", "read1", "readline", "readlines", "readinto", "readinto1", "seek", "tell", "truncate"})
_HEAP_TYPE = 1 << 9


def is_consumed(value: Any) -> bool:
    """Whether reading a value consumes something. An iterator written as a class of the user's is followed instead: its
    position is in its attributes."""
    kind = type(value)
    if issubclass(kind, _QUEUES) or issubclass(kind, AsyncGenerator):
        return True
    if not hasattr(kind, "__next__") or issubclass(kind, (StandIn, *weakref.ProxyTypes)):
        return False  # (a weak proxy has all methods, whatever it stands for)
    if kind.__flags__ & _HEAP_TYPE and not is_foreign(kind):
        return False
    return not (isinstance(value, io.IOBase) and not _is_readable(value))


def _is_readable(file: Any) -> bool:
    try:
        return bool(file.readable())
    except ValueError:  # closed
        return False


class StandIn:
    """Takes the place of an object that reading would consume."""

    def __init__(self, real: Any, path: str) -> None:
        self._wholestep_real = real
        self._wholestep_path = path

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        real, path = self._wholestep_real, self._wholestep_path
        kind = type(real).__name__
        if isinstance(real, _QUEUES):
            what = f"the step uses {path}, a {kind}, and a replay would not."
        else:
            what = f"the step takes an element of {path}, a {kind}, and a replay would not take the next one."
        raise SideEffectError(
            what,
            fix="take it outside of the step, and pass it to the step as an argument.",
            location=user_location(),
        )

    __next__ = __length_hint__ = __contains__ = _refuse

    def __iter__(self) -> StandIn:
        if isinstance(self._wholestep_real, io.IOBase):
            self._refuse()
        return self

    def __getattr__(self, name: str) -> Any:
        real = self._wholestep_real
        if name.startswith("__"):
            raise AttributeError(name)
        if isinstance(real, io.IOBase) and name not in _READS_FILE:
            return getattr(real, name)
        if isinstance(real, GeneratorType) and name.startswith("gi_"):
            return getattr(real, name)
        return self._refuse


class LargeArray(numpy.ndarray):
    """Takes the place of an array that is too large to be compared at each call."""

    _wholestep_path = ""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CapturedTensorError(
            f"the step reads {self._wholestep_path}, a NumPy array of {self.nbytes >> 20} MB, which is too large to be "
            "compared at each call.",
            fix="make a tensor of it, or of the part that the step needs, outside of the step.",
            location=user_location(),
        )

    __getitem__ = __setitem__ = __iter__ = __contains__ = __float__ = __int__ = __bool__ = _refuse
    __array__ = __array_ufunc__ = __array_function__ = tolist = tobytes = item = copy = sum = mean = _refuse


def large_array(real: Any, path: str) -> Any:
    """The stand-in of a large array: it has its shape and type."""
    view = real.view(LargeArray)
    view._wholestep_path = path
    return view


def real_of(value: Any) -> Any:
    """What a stand-in stands for; any other value itself."""
    if isinstance(value, StandIn):
        return value._wholestep_real
    return value.wholestep_real if hasattr(type(value), "wholestep_real") else value


class StandIns:
    """The stand-ins of one trace."""

    def __init__(self, replacements: dict[int, Any], recorders: Recorders) -> None:
        self._replacements = replacements
        """Of functions that give another value each time (a clock), by their identity."""
        self._recorders = recorders
        self._made: dict[int, Any] = {}
        self._swapped: list[tuple[Slot, Any, Any]] = []
        self._fixed: list[tuple[str, Any, Any]] = []

    def of(self, real: Any, path: str) -> Any:
        """The stand-in for an object; the object itself if it needs none."""
        if id(real) in self._replacements:
            return self._replacements[id(real)]
        container = self._recorders.stand_in(real, path)
        if container is not None:
            return container
        if is_large(real):
            return large_array(real, path)
        if not is_consumed(real):
            return real
        return self._made.setdefault(id(real), StandIn(real, path))

    def put(self, slot: Slot, real: Any) -> Any:
        """Put the stand-in of an object into the slot that holds it, and return it."""
        stand_in = self.of(real, slot.path)
        try:
            slot.set(stand_in)
        except NotImplementedError:  # an element of a tuple
            self.watch(real, slot.path)
            return real
        self._swapped.append((slot, real, stand_in))
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
