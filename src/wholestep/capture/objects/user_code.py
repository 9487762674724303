"""Whether code is the user's (also where the standard library or NumPy called it) or that of a library."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy
import torch

import wholestep
from wholestep.errors import MADE_WHILE_TRACING, CaptureError, Location, WholestepError
from wholestep.ir.meta import is_installed_file, location_of

_STANDARD = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_SKIPPED = (os.path.dirname(numpy.__file__) + os.sep,)
_LOADS = os.path.dirname(torch.__file__) + os.sep + "serialization.py"
_OURS = os.path.dirname(wholestep.__file__) + os.sep
_INTERPOSED = tuple(
    os.path.join(_OURS, "capture", *place)
    for place in (
        ("objects", "user_code.py"),
        ("python_reads", "clocks.py"),
        ("python_reads", "outside_reads.py"),
        ("effects", "showing_calls.py"),
    )
)
_OWN_ACCOUNT = ("torch", "tqdm", "rich", "wandb", "tensorboard", "transformers", "numpy", "_pytest", "pluggy")

_kind_of: dict[CodeType, str] = {}


def called_by_user() -> bool:
    """Whether the nearest frame outside of the standard library and NumPy is user code.

    `torch.load` counts as a call of its caller. Other frames of torch, and those of progress bars, read clocks and
    files for their own use: no value of the step depends on that.
    """
    return _caller(2) is not None


def caller_location() -> Location | None:
    """The line of user code that made the call."""
    return location_of(_caller(2), with_text=True)


def is_user_code(code: CodeType) -> bool:
    """Whether code is the user's."""
    kind = _kind_of.get(code)
    if kind is None:
        kind = _kind_of[code] = _kind(code)
    return kind == "user"


def user_code_location() -> Location | None:
    """The line of user code that is running, whatever it called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return location_of(frame, with_text=True)


def _caller(depth: int) -> FrameType | None:
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        kind = kind_of_code(frame.f_code)
        if kind != "through":
            return frame if kind == "user" else None
        frame = frame.f_back
    return None


def kind_of_code(code: CodeType) -> str:
    """Whose code it is: "user", "library", or "through" where the caller counts (the standard library, NumPy)."""
    kind = _kind_of.get(code)
    if kind is None:
        kind = _kind_of[code] = _kind(code)
    return kind


def is_installed(code: CodeType) -> bool:
    """Whether code is that of an installed package."""
    return is_installed_file(code.co_filename)


def _kind(code: CodeType) -> str:
    file = code.co_filename
    if file.startswith(("<frozen", *_SKIPPED)) or file in (*_INTERPOSED, _LOADS):
        return "through"
    if file.startswith(_OURS):
        return "library"
    if file.startswith(_PACKAGES):
        place = next(p for p in _PACKAGES if file.startswith(p))
        return "library" if file[len(place) :].split(os.sep)[0] in _OWN_ACCOUNT else "user"
    if file.startswith(os.path.dirname(torch.__file__) + os.sep):
        return "library"
    if file.startswith(_STANDARD):
        inside = os.path.basename(os.path.dirname(file))
        return "library" if inside in ("logging", "importlib") else "through"
    return "user"


_STANDARD_MODULES = frozenset(sys.stdlib_module_names) - {"__main__"}
_INTEGRATIONS = "wholestep.integrations."
"""Classes of ours that stand for a user's framework: what they hold is part of the step."""
_LIBRARIES = frozenset({"torch", "wholestep", "numpy", "transformers", "rich"})
_TOOLS = frozenset({"pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis", "IPython", "ipykernel", "debugpy"})
"""Programs that run the user's: reached through loggers, threads and standard output, and not part of a step."""


def is_foreign(member: Any) -> bool:
    """Whether a function, class or module belongs to Python or to a library that the search does not enter."""
    name = member.__name__ if isinstance(member, ModuleType) else getattr(member, "__module__", None)
    root = name.split(".")[0] if isinstance(name, str) else ""
    if root == "wholestep" and isinstance(name, str) and name.startswith(_INTEGRATIONS):
        return False
    return root in _LIBRARIES or root in _STANDARD_MODULES or root in _TOOLS


@contextmanager
def none_swallowed() -> Iterator[None]:
    """Raise a refusal that user code in the block caught (`except Exception:`): eager would not take that branch."""
    made: list[CaptureError] = []
    token = MADE_WHILE_TRACING.set(made)
    try:
        yield
    except Exception as error:
        if not isinstance(error, WholestepError):
            _raise_swallowed(made, error)
        raise
    finally:
        MADE_WHILE_TRACING.reset(token)
    _raise_swallowed(made)


def _raise_swallowed(made: list[CaptureError], cause: Exception | None = None) -> None:
    for error in made:
        passed = error.__traceback__  # begins with the frame that caught the error
        if passed is not None and is_user_code(passed.tb_frame.f_code):
            raise error from cause
