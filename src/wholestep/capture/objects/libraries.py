"""Whose code something is: the user's, or that of Python and of libraries that are not looked into."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_LIBRARIES = frozenset({"torch", "wholestep", "numpy", "transformers", "rich"})
_TOOLS = frozenset({"pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis", "IPython", "ipykernel", "debugpy"})
"""What runs the user's program: reached through loggers, threads and standard output, and no part of a step."""


def is_foreign(member: Any) -> bool:
    """Whether a function, class or module belongs to Python or to a library that is not looked into."""
    name = member.__name__ if isinstance(member, ModuleType) else getattr(member, "__module__", None)
    root = name.split(".")[0] if isinstance(name, str) else ""
    return root in _LIBRARIES or root in _STANDARD or root in _TOOLS
