"""The other names of a module of torch, private ones too, for a module of `compat` that stands in its place.

They are looked up when somebody asks: what a release of torch adds or renames is there, and nothing is imported early.
Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

OtherNames = tuple[Callable[[str], Any], Callable[[], list[str]]]


def other_names(module: str, own: Mapping[str, Any]) -> OtherNames:
    """`__getattr__` and `__dir__` of a module with the globals `own`, which has all else from torch's `module`."""

    def getattr_(name: str) -> Any:
        found = importlib.import_module(module)
        if name.startswith("__") or not hasattr(found, name):
            raise AttributeError(f"neither {own['__name__']} nor {module} has {name!r}")
        return getattr(found, name)

    def dir_() -> list[str]:
        return sorted({*own, *dir(importlib.import_module(module))})

    return getattr_, dir_
