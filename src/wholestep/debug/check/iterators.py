"""Where an iterator is, and whether it can be put back there.

Iterators over lists, tuples and ranges take `__setstate__`; a Python generator, `itertools.count` or a reader of a file
does not, and what was taken from it is gone.
"""

from __future__ import annotations

import warnings
from types import GeneratorType
from typing import Any

from wholestep.ir.user_objects.plain_values import PLAIN


class IteratorPosition:
    """The position of one iterator at one moment."""

    def __init__(self, path: str, iterator: Any) -> None:
        self.path = path
        self._iterator = iterator
        self._position = _position(iterator)

    def put_back(self) -> bool:
        """Whether the iterator is where it was, put back if need be."""
        if _same(_position(self._iterator), self._position):
            return True
        state = self._position[2] if isinstance(self._position, tuple) and len(self._position) > 2 else None
        if not isinstance(state, int) or not hasattr(self._iterator, "__setstate__"):
            return False
        self._iterator.__setstate__(state)
        return _same(_position(self._iterator), self._position)


def _position(iterator: Any) -> Any:
    """Something that differs after `next`; None where nothing can be known."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return "exhausted"
        return frame.f_lasti, frame.f_lineno, {k: _word(v) for k, v in frame.f_locals.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of copying itertools, from Python 3.12 on
            return _word(iterator.__reduce__())
    except TypeError:
        return None


def _word(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple):
        return tuple(map(_word, value))
    if isinstance(value, range):
        return repr(value)  # an iterator over one makes another each time that it is asked
    return _position(value) if hasattr(value, "__next__") else id(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a is b or (isinstance(a, (*PLAIN, dict)) and type(a) is type(b) and a == b))
