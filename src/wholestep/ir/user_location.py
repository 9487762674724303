"""Which line of the user's code is running: the nearest frame that is neither torch's nor ours."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Any

import torch

import wholestep
from wholestep.errors import Location

_FOREIGN = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, wholestep.__file__))
_FOREIGN_FILES = (contextlib.__file__, copy.__file__, "<frozen", "<string>")

_is_user_code: dict[CodeType, bool] = {}


def user_frame(depth: int = 1) -> FrameType | None:
    """The nearest frame of the user's code above the caller."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        known = _is_user_code.get(code)
        if known is None:
            name = code.co_filename
            known = not (name.startswith(_FOREIGN) or name.startswith(_FOREIGN_FILES))
            _is_user_code[code] = known
        if known:
            return frame
        frame = frame.f_back
    return None


def asked_by(file: str) -> bool:
    """Whether the running line of user code is in a file with that ending."""
    frame = user_frame(2)
    return frame is not None and frame.f_code.co_filename.replace(os.sep, "/").endswith(file)


def location_of(frame: FrameType | None, *, with_text: bool = False) -> Location | None:
    """The location a frame stands at."""
    if frame is None:
        return None
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip() if with_text else ""
    return Location(code.co_filename, frame.f_lineno, code.co_name, text)


def user_location(*, with_text: bool = True) -> Location | None:
    """The line of the user's code that is running now."""
    return location_of(user_frame(2), with_text=with_text)


def location_of_exception(error: BaseException) -> Location | None:
    """The deepest line of the user's code in a traceback."""
    found: Location | None = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        name = code.co_filename
        if not (name.startswith(_FOREIGN) or name.startswith(_FOREIGN_FILES)):
            text = linecache.getline(name, trace.tb_lineno).strip()
            found = Location(name, trace.tb_lineno, code.co_name, text)
        trace = trace.tb_next
    return found


def location_of_function(fn: Any) -> Location | None:
    """The first line of a function of the user's, also of one behind `functools.partial` or a callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    fn = fn if inspect.isroutine(fn) or not callable(fn) else type(fn).__call__
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return Location(code.co_filename, code.co_firstlineno, code.co_name, text)
