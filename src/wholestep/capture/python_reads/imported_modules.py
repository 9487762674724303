"""Modules that are imported while a step is traced: what they took of Python and torch is put right afterwards.

    def step(x):
        import helpers            helpers.py: from os import mkdir; from time import perf_counter

While a step is traced, some functions of Python and torch are replaced, and a module that is imported then holds the
replacements by its own names. After the capture these would note reads of a step that nobody traces, refuse what eager
may do, and keep the capture alive.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from wholestep.ir.captured_step import NamesReplaced


@contextmanager
def imports_put_right() -> Iterator[None]:
    """Modules that are imported in the block hold Python's and torch's own functions after it."""
    known = set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - known:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType):
                _put_right(vars(module), name)
        NamesReplaced.stand_ins.clear()


def _put_right(namespace: dict[str, Any], module: str) -> None:
    for key, value in list(namespace.items()):
        real = _real(value)
        if real is not value:
            namespace[key] = real
        elif isinstance(value, FunctionType):
            _put_defaults_right(value)
        elif isinstance(value, type) and value.__module__ == module:
            for name, member in list(vars(value).items()):
                if isinstance(member, FunctionType) and _real(member) is member:
                    _put_defaults_right(member)
                elif _real(member) is not member:
                    setattr(value, name, _real(member))


def _put_defaults_right(function: FunctionType) -> None:
    before = function.__defaults__
    if before and any(_real(each) is not each for each in before):
        function.__defaults__ = tuple(map(_real, before))


def _real(value: Any) -> Any:
    found = NamesReplaced.stand_ins.get(id(value))
    return value if found is None or found[0] is not value else found[1]
