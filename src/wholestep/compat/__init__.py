"""Names and paths of removed and of other libraries, on the parts of wholestep: code moves over by changing a prefix.

    torch.distributed._spmd                     wholestep.compat.spmd
    functorch.compile                           wholestep.compat.functorch
    torch.fx.passes.split_module                wholestep.compat.fx.split_module
    torch.fx.passes.infra.partitioner           wholestep.compat.fx.partitioner
    torch.distributed.pipelining, pippy         wholestep.compat.pipelining

Nothing is implemented here that is of use elsewhere: these files rename, and adapt arguments and results. Names that
they do not have fall back to the module of torch that they replace. Those, private ones too, are looked up at access:
what a release of torch adds is there, and nothing is imported early. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

GetattrAndDir = tuple[Callable[[str], Any], Callable[[], list[str]]]


def forwarded_names(module: str, own: Mapping[str, Any]) -> GetattrAndDir:
    """`__getattr__` and `__dir__` of a module with the globals `own` that forwards other names to torch's `module`."""

    def getattr_(name: str) -> Any:
        found = importlib.import_module(module)
        # A module is not forwarded: `from wholestep.compat.pipelining import schedules` means ours.
        if name.startswith("__") or not hasattr(found, name) or isinstance(getattr(found, name), ModuleType):
            raise AttributeError(f"neither {own['__name__']} nor {module} has {name!r}")
        return getattr(found, name)

    def dir_() -> list[str]:
        return sorted({*own, *dir(importlib.import_module(module))})

    return getattr_, dir_
