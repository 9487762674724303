"""Which variables the user's code names: closure cells, globals, and attributes of the modules among them.

Code of torch, of the standard library and of installed packages is not followed: instances of their classes are state,
their functions are not.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_KNOWN = frozenset({"torch", "wholestep", "numpy", "transformers", "rich", "builtins"})
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")

Variable = tuple[str, CellType | dict[str, Any], Any]
"""Name, the cell or the dict that binds it, and what it is bound to."""


def named_by(fn: FunctionType) -> Iterator[Variable]:
    """Variables of a user's function that are bound to something."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell, cell.cell_contents
        except ValueError:
            continue  # not filled yet
    if is_foreign(fn.__module__):
        return
    names = _names(fn.__code__)
    for name in sorted(names.variables):
        if name not in fn.__globals__:
            continue
        value = fn.__globals__[name]
        yield name, fn.__globals__, value
        if isinstance(value, ModuleType) and not is_foreign(value.__name__):
            for attribute in sorted(names.attributes & vars(value).keys()):
                yield f"{name}.{attribute}", vars(value), vars(value)[attribute]


def global_names(fn: FunctionType) -> list[tuple[str, dict[str, Any]]]:
    """Globals that a user's function may bind, also those that are not bound yet."""
    if is_foreign(fn.__module__):
        return []
    return [(name, fn.__globals__) for name in sorted(_names(fn.__code__).variables)]


class _Names:
    def __init__(self, code: CodeType) -> None:
        self.variables = {i.argval for i in dis.get_instructions(code) if i.opname in _GLOBALS}
        self.attributes = set(code.co_names)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                inner = _names(const)
                self.variables |= inner.variables
                self.attributes |= inner.attributes


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> _Names:
    return _Names(code)


def unwrapped(member: Any) -> Any:
    """The function behind a static method, class method or property."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


@lru_cache(maxsize=4096)
def is_foreign(module: str | None) -> bool:
    """Whether a module is torch's, Python's or an installed package: not the user's own code."""
    root = (module or "builtins").split(".")[0]
    if root in _KNOWN or root in _STANDARD:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return any(file.startswith(folder) for folder in installed if folder)
