"""What a graph module holds beside its graph: parameters, buffers, modules and plain attributes.

A pass may return another module, whose graph reads constants of its own, or set attributes and then fail.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

_TABLES = ("_parameters", "_buffers", "_modules")
_OF_TORCH = frozenset({"_graph", "_code", "meta"})
"""Kept by the pass manager itself, or made anew from the graph."""


class ModuleState:
    """Which objects a graph module had under which names. Their contents are not copied."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        held = vars(gm)
        self._tables: dict[str, dict[str, Any]] = {name: dict(held[name]) for name in _TABLES}
        self._plain = {name: value for name, value in held.items() if name not in _TABLES and name not in _OF_TORCH}

    def restore(self) -> None:
        """Give the module back what it had."""
        held = vars(self._gm)
        for name, content in self._tables.items():
            held[name].clear()
            held[name].update(content)
        for name in [name for name in held if name not in self._plain and name not in (*_TABLES, *_OF_TORCH)]:
            del held[name]
        held.update(self._plain)


def adopt(gm: fx.GraphModule, made: fx.GraphModule) -> None:
    """Let a graph module have what the graph of another one reads: constants, buffers, modules."""
    for node in made.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            _set(gm, str(node.target).split("."), made)


def _set(into: nn.Module, path: list[str], source: Any) -> None:
    *outer, name = path
    for step in outer:
        source = getattr(source, step)
        if not isinstance(into._modules.get(step), nn.Module):
            into.add_module(step, nn.Module())
        into = into.get_submodule(step)
    value = getattr(source, name)
    if getattr(into, name, None) is value:
        return
    if hasattr(into, name):
        delattr(into, name)
    if isinstance(source, nn.Module) and name in source._buffers:
        into.register_buffer(name, value, persistent=name not in source._non_persistent_buffers_set)
    else:
        setattr(into, name, value)
