"""wholestep: an ordinary PyTorch training step as one FX graph.

Public names are loaded when they are first used: `import wholestep` imports no other module, neither torch nor
Inductor, and registers nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholestep import cache as cache
    from wholestep import compat as compat
    from wholestep import compilers as compilers
    from wholestep import debug as debug
    from wholestep import errors as errors
    from wholestep import inspect as inspect
    from wholestep import integrations as integrations
    from wholestep import ir as ir
    from wholestep import lower as lower
    from wholestep import options as options
    from wholestep import parallel as parallel
    from wholestep import partition as partition
    from wholestep import passes as passes
    from wholestep import pipelining as pipelining
    from wholestep import simulate as simulate
    from wholestep.api import build as build
    from wholestep.api import capture as capture
    from wholestep.api import check as check
    from wholestep.api import compile as compile
    from wholestep.api import load as load
    from wholestep.compiled_step import CompiledStep as CompiledStep
    from wholestep.errors import CudaGraphWarning as CudaGraphWarning
    from wholestep.errors import EagerWarning as EagerWarning
    from wholestep.errors import LowerWarning as LowerWarning
    from wholestep.errors import RecompileWarning as RecompileWarning
    from wholestep.errors import WholestepError as WholestepError
    from wholestep.ir.step_graph import StepGraph as StepGraph
    from wholestep.lower.partial_lower import partial_lower as partial_lower
    from wholestep.options import Dim as Dim
    from wholestep.options import Options as Options
    from wholestep.parallel.plan import FullyShard as FullyShard
    from wholestep.parallel.plan import Replicate as Replicate
    from wholestep.partition.split_module import split_module as split_module
    from wholestep.step import Executable as Executable

__version__ = "0.1.0"

_MODULES = (
    "cache",
    "compat",
    "compilers",
    "debug",
    "errors",
    "inspect",
    "integrations",
    "ir",
    "lower",
    "options",
    "parallel",
    "partition",
    "passes",
    "pipelining",
    "simulate",
)
"""Public modules."""

_NAMES = {
    "CompiledStep": "compiled_step",
    "CudaGraphWarning": "errors",
    "Dim": "options",
    "EagerWarning": "errors",
    "Executable": "step",
    "FullyShard": "parallel.plan",
    "LowerWarning": "errors",
    "Options": "options",
    "RecompileWarning": "errors",
    "Replicate": "parallel.plan",
    "StepGraph": "ir.step_graph",
    "WholestepError": "errors",
    "build": "api",
    "capture": "api",
    "check": "api",
    "compile": "api",
    "load": "api",
    "partial_lower": "lower.partial_lower",
    "split_module": "partition.split_module",
}
"""Public name to the module that defines it. The same list as the imports for type checkers above: a test compares."""

__all__ = [
    "CompiledStep",
    "CudaGraphWarning",
    "Dim",
    "EagerWarning",
    "Executable",
    "FullyShard",
    "LowerWarning",
    "Options",
    "RecompileWarning",
    "Replicate",
    "StepGraph",
    "WholestepError",
    "build",
    "cache",
    "capture",
    "check",
    "compat",
    "compile",
    "compilers",
    "debug",
    "errors",
    "inspect",
    "integrations",
    "ir",
    "load",
    "lower",
    "options",
    "parallel",
    "partial_lower",
    "partition",
    "passes",
    "pipelining",
    "simulate",
    "split_module",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _NAMES:
        from difflib import get_close_matches

        near = [] if name.startswith("_") else get_close_matches(name, __all__, 1)
        hint = f". Did you mean: {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """A package whose public names are not replaced by submodules that are called the same.

    Importing `wholestep.capture` makes Python set the attribute `capture` of its parent to that package, whenever it
    happens. `ws.capture` is the function; the package is found by import statements, which look in `sys.modules`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
