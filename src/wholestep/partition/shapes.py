"""Symbolic sizes that a partition must be told: those in the shapes of what it takes in.

A child that takes a tensor of shape [s0, 4] can only be compiled or guarded if it can name s0. So the node that first
had s0 as its value goes in as well, be it recorded in `meta["val"]` (make_fx, export) or in `meta["example_value"]`
(dynamo).
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

KEYS = ("val", "example_value")

_NUMBERS = (torch.SymInt, torch.SymFloat)


class Symbols:
    """Which node first had a symbol as its value; nodes are added in the order of the graph."""

    def __init__(self) -> None:
        self._bound: dict[sympy.Symbol, fx.Node] = {}
        self._used: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def bind(self, node: fx.Node) -> None:
        """Note the symbol that a node has for its value, if it has one and is the first."""
        meta = node.meta
        for key in KEYS:
            value: Any = meta.get(key)
            # Not isinstance: this runs for each node, and tensor classes may answer it in Python.
            if type(value) in _NUMBERS:
                expression = value.node.expr
                if isinstance(expression, sympy.Symbol):
                    self._bound.setdefault(expression, node)

    def needed_for(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes that had the symbols in the shape of this one's value."""
        if not self._bound:
            return ()
        found = self._used.get(node)
        if found is None:
            symbols: set[sympy.Symbol] = set()
            for key in KEYS:
                _collect(node.meta.get(key), symbols)
            sources = [self._bound[s] for s in sorted(symbols, key=str) if s in self._bound]
            found = self._used[node] = tuple(source for source in sources if source is not node)
        return found


def _collect(value: Any, symbols: set[sympy.Symbol]) -> None:
    if value is None or type(value) in (int, float, bool, str):
        return
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        symbols |= value.node.expr.free_symbols
    elif isinstance(value, Tensor):
        _collect(tuple(value.shape), symbols)
        if value.layout is torch.strided:
            _collect(value.stride(), symbols)
            _collect(value.storage_offset(), symbols)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, symbols)
    elif isinstance(value, dict):
        _collect(list(value.values()), symbols)
