"""Where a node comes from, whoever made the graph: the user's line, the module path, forward or backward.

Our own capture says so in `NodeMeta`; dynamo and AOTAutograd leave a `stack_trace` and an `nn_module_stack`
(`fwd_nn_module_stack` on nodes of the backward).
"""

from __future__ import annotations

import os
import re

import torch
from torch import fx

from wholestep.errors import Location
from wholestep.ir.meta import KEY, node_meta

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n(?P<text>[^\n]*)', re.MULTILINE
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def location_of_node(node: fx.Node) -> Location | None:
    """The line of the user's code that made a node: the innermost frame that is not torch's."""
    if node_meta(node).location is not None:
        return node_meta(node).location
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return None
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return None
    own = [frame for frame in frames if not frame["file"].startswith(_TORCH)]
    found = (own or frames)[-1]
    return Location(found["file"], int(found["line"]), found["function"], found["text"].strip())


def module_path(node: fx.Node) -> str:
    """The module whose forward (or whose backward) a node belongs to, `layers.0.attn`; "" where nobody knows."""
    if node_meta(node).module_path:
        return node_meta(node).module_path
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if isinstance(stack, dict) and stack:
            path, _ = list(stack.values())[-1]
            path = str(path)
            return "" if re.fullmatch(r"L\['\w+'\]", path) else plain_path(path)
    return ""


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
