"""Optimizers of timm, loaded without torchvision.

`import timm` needs torchvision, whose wheels do not load beside the CPU build of torch. The files in `timm/optim` need
only torch: they are imported as they are, from packages of the same names whose `__init__` does not run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def timm_optimizer(module: str, name: str) -> Any:
    """The class `name` of `timm/optim/<module>.py`."""
    _prepare_packages()
    return getattr(importlib.import_module(f"timm.optim.{module}"), name)


@functools.cache
def _prepare_packages() -> None:
    root = importlib.util.find_spec("timm")
    assert root is not None, "make env installs timm"
    assert root.origin is not None
    folder = Path(root.origin).parent
    timm = _bare_package("timm", folder)
    timm.optim = _bare_package("timm.optim", folder / "optim")  # type: ignore[attr-defined]


def _bare_package(name: str, folder: Path) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    package.__spec__ = importlib.util.spec_from_loader(name, loader=None, is_package=True)
    sys.modules[name] = package
    return package
