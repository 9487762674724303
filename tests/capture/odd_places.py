"""Steps that read or change something in an odd place: eager is the reference, call by call.

A program is a function that makes (step, between, seen): the step takes a tensor, `between(i)` runs after call i, and
what `seen()` gives must be equal after each call.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch

import wholestep as ws

Made = tuple[Any, ...]
Program = Callable[[], Made]
CALLS = 5


def nothing(i: int) -> None:
    """Between two calls."""


def at_address(address: int) -> Any:
    """An object to which nothing leads from the step's arguments and variables."""
    return ctypes.cast(address, ctypes.py_object).value


def batch(i: int) -> torch.Tensor:
    """The argument of call i."""
    return torch.arange(1.0, 4.0) + i


def plain(value: Any) -> Any:
    """A value in a form that `==` compares to the bit."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.detach().double().flatten().tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return (type(value), repr(value))


def run(step: Callable[..., Any], made: Made, calls: int) -> list[Any]:
    """What each call gave, and what was seen after it; an error of Python in a later call ends it."""
    _, between, seen, arguments = (*made, *(None, nothing, lambda: None, batch)[len(made) :])
    found: list[Any] = []
    for i in range(calls):
        try:
            found.append((plain(step(arguments(i))), plain(seen())))
        except ws.errors.WholestepError:
            raise
        except Exception as error:
            if not found:
                raise
            found.append(type(error))
            break
        between(i)
    return found


def assert_same(program: Program, *, graphs: int | None = None, calls: int = CALLS) -> Any:
    """The compiled step does what eager does in each call. Returns it."""
    torch.manual_seed(0)
    made = program()
    eager = run(made[0], made, calls)
    torch.manual_seed(0)
    made = program()
    compiled = ws.compile(made[0], lower="eager")
    assert run(compiled, made, calls) == eager
    if graphs is not None:
        assert len(compiled.graphs) <= graphs, compiled.recompiles
    return compiled


def assert_refused(program: Program, code: str, match: str = "") -> ws.errors.WholestepError:
    """The first call is refused with the code and a line of the program, and nothing of what is seen has changed."""
    torch.manual_seed(0)
    made = program()
    seen = made[2] if len(made) > 2 else lambda: None
    before = plain(seen())
    error: ws.errors.WholestepError | None = None
    with contextlib.ExitStack():
        try:
            ws.compile(made[0], lower="eager")(batch(0))
        except ws.errors.WholestepError as found:
            error = found
    assert error is not None, "not refused"
    assert error.code == code, error
    assert match in str(error), error
    assert error.location is not None, error
    assert error.location.file == made[0].__code__.co_filename, error
    assert plain(seen()) == before
    return error
