"""Where a node comes from: the user's line and the module, read from what export records."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

import wholestep
from wholestep.errors import Location

_FOREIGN = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, wholestep.__file__))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<text>[^\n]*)')


def user_line(node: fx.Node) -> Location | None:
    """The innermost line outside of torch that made a node."""
    found = None
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        if not frame["file"].startswith(_FOREIGN):
            found = Location(frame["file"], int(frame["line"]), frame["function"], frame["text"].strip())
    return found


def module_call(node: fx.Node) -> str:
    """The innermost module call that made a node, as export names it; a second call of a module has another name."""
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack)) if stack else ""


def module_path(node: fx.Node) -> str:
    """The innermost module that made a node, as the user would reach it."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""
