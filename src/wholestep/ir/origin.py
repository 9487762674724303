"""Where a node comes from: the user's line, the module path, forward or backward. The one place that answers this.

wholestep's capture records it in `NodeMeta`. Graphs of dynamo, AOTAutograd and export have a `stack_trace` and an
`nn_module_stack` instead (`fwd_nn_module_stack` on nodes of the backward).
"""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import replace

import torch
from torch import fx

from wholestep.errors import Location
from wholestep.ir.meta import KEY, node_meta

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n(?P<text>[^\n]*)', re.MULTILINE
)
_LIBRARIES = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def location_of_node(node: fx.Node, *, user_only: bool = False) -> Location | None:
    """The line of code that a node was traced from: the innermost frame outside of torch and wholestep.

    Where all frames are inside of them, the innermost one; None under `user_only`.
    """
    recorded = node_meta(node).location
    if recorded is not None:
        return recorded
    trace = node.meta.get("stack_trace")
    frames = list(_FRAME.finditer(trace)) if isinstance(trace, str) else []
    own = [frame for frame in frames if not frame["file"].startswith(_LIBRARIES)]
    if not own and (user_only or not frames):
        return None
    found = (own or frames)[-1]
    return Location(found["file"], int(found["line"]), found["function"], found["text"].strip())


def nearest_location(node: fx.Node | None) -> Location | None:
    """The line of a node, or of the nearest producer that has one, with its source text."""
    queue = [] if node is None else [node]
    seen = set(queue)
    for each in queue:
        found = location_of_node(each)
        if found is not None:
            return replace(found, text=found.text or linecache.getline(found.file, found.line).strip())
        new = [source for source in each.all_input_nodes if source not in seen]
        seen.update(new)
        queue += new
    return None


def module_path(node: fx.Node) -> str:
    """The module whose forward (or whose backward) a node belongs to, `layers.0.attn`; "" where it is not recorded."""
    if node_meta(node).module_path:
        return node_meta(node).module_path
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if isinstance(stack, dict) and stack:
            path, _ = list(stack.values())[-1]
            path = str(path)
            return "" if re.fullmatch(r"L\['\w+'\]", path) else plain_path(path)
    return ""


def module_call(node: fx.Node) -> str:
    """The innermost module call that a node was traced in, as export names it: a second call of a module differs."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack))) if stack else ""


def plain_path(source: str) -> str:
    """`L['self']._modules['layers']._modules['0'].weight` and `L['model'].layers.0.weight` as `layers.0.weight`."""
    text = re.sub(r"^L\['\w+'\](?=\.)|^L\['self'\]|^L__self__|^self\b", "", source)
    text = re.sub(r"\._(modules|parameters|buffers)(?=\[)", "", text)
    parts = [next(part for part in match.groups() if part is not None) for match in _STEP.finditer(text)]
    return ".".join(parts) if parts else text.strip(".")


def phase(node: fx.Node) -> str:
    """forward, backward, update, optimizer or epilogue."""
    if KEY in node.meta:
        return node_meta(node).phase
    is_backward = "fwd_nn_module_stack" in node.meta or node.meta.get("partitioner_tag") == "is_backward"
    return "backward" if is_backward else "forward"
