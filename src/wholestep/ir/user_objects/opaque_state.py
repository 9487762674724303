"""The state of objects that Python reads by calls or by index: memory, locks.

    buffer = memoryview(b); ctypes.c_int(3)          bytes
    threading.Lock(), Semaphore()                    one value that the object tells

Reading it again is free of effects. So it is compared at each call like the contents of an array, and a step that
changes it is refused. Locks count only where the code of the step asks for their state: other threads hold them.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import threading
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

_CTYPES: tuple[type, ...] = (
    ctypes._SimpleCData,
    ctypes.Array,
    ctypes.Structure,
    ctypes.Union,
)
_MEMORY: tuple[type, ...] = (bytearray, array.array, memoryview, mmap.mmap, SharedMemory, *_CTYPES)
_LOCK: tuple[type, ...] = (type(threading.Lock()),)

State = Callable[[Any], Any]
_TOLD: list[tuple[tuple[type, ...], State, Callable[[Any, Any], None]]] = [
    (_LOCK, lambda lock: lock.locked(), lambda lock, held: lock.acquire(False) if held else lock.release()),
    ((threading.Semaphore,), lambda semaphore: semaphore._value, lambda s, value: setattr(s, "_value", value)),
]
ASKS_LOCKS = frozenset({"locked", "acquire", "release", "_value"})
"""Names in code that asks for the state of locks or leaves it changed; `with lock:` leaves it as it was."""


def is_memory(value: Any) -> bool:
    """Whether a value is memory that Python code can read and write element by element."""
    return isinstance(value, _MEMORY)


def tells_state(value: Any) -> bool:
    """Whether a value is a lock or the like."""
    return any(isinstance(value, kinds) for kinds, _, _ in _TOLD)


def size_of(value: Any) -> int:
    """How many bytes memory has."""
    if isinstance(value, _CTYPES):
        return ctypes.sizeof(value)  # type: ignore[arg-type]
    if isinstance(value, memoryview):
        return value.nbytes
    if isinstance(value, SharedMemory):
        return value.size
    return len(value) * (value.itemsize if isinstance(value, array.array) else 1)


def bytes_of(value: Any) -> bytes:
    """What memory holds."""
    if isinstance(value, SharedMemory):
        return bytes(value.buf or b"")
    if isinstance(value, mmap.mmap):
        return value[:]
    if isinstance(value, memoryview):
        return value.tobytes()
    return bytes(value)


def write_bytes(value: Any, data: bytes) -> None:
    """Put back what memory held."""
    if isinstance(value, array.array):
        value[:] = array.array(value.typecode, data)
    elif isinstance(value, SharedMemory):
        if value.buf is not None:
            value.buf[:] = data
    elif isinstance(value, _CTYPES):
        data_of: Any = value
        ctypes.memmove(ctypes.addressof(data_of), data, len(data))
    elif isinstance(value, memoryview):
        if not value.readonly:
            memoryview(value).cast("B")[:] = data
    else:
        value[:] = data


def told_state(value: Any) -> Any:
    """What a lock tells."""
    return next(read(value) for kinds, read, _ in _TOLD if isinstance(value, kinds))


def set_state(value: Any, before: Any) -> None:
    """Put back what a lock told."""
    if told_state(value) != before:
        next(write(value, before) for kinds, _, write in _TOLD if isinstance(value, kinds))
