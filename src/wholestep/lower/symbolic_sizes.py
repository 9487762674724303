"""Symbolic sizes of regions: which inputs have them, and what compiled code assumes of them.

A region that reads `cat`, of size s0 + s1, needs s0 and s1: inputs of the graph with exactly these sizes become inputs
of the region. While a region is traced and compiled, sizes are compared (`s0 != 2`, `s0 * s1 is even`), with the
answers of the traced call. These guards become conditions of the compiled code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from wholestep.ir.effects import is_measure
from wholestep.torch_private.symbolic_shapes import shape_env_of, shape_guards, symbol_in, symbols_in

SymbolSource = tuple[fx.Node, int | None]
"""An input of a graph, and the dimension whose size is a symbol; None: the input itself is the symbol."""


def set_symbolic_sizes(graph: fx.Graph) -> None:
    """Make the metadata of nodes that compute sizes symbolic: a trace may have noted the integers of its own call."""
    for node in graph.nodes:
        if node.op != "call_function" or type(node.meta.get("val")) is not int:
            continue
        vals = [source.meta.get("val") for source in node.all_input_nodes]
        if is_measure(node.target) or (_is_arithmetic(node.target) and any(isinstance(v, SymInt) for v in vals)):
            args = fx.map_arg(node.args, lambda source: source.meta.get("val"))
            node.meta = {**node.meta, "val": node.target(*args, **node.kwargs)}


def _is_arithmetic(target: Any) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "math") or target in (torch.sym_max, torch.sym_min)


def symbol_sources(graph: fx.Graph) -> dict[Any, SymbolSource]:
    """Where the symbols of a graph can be read."""
    found: dict[Any, SymbolSource] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            for symbol, dim in _symbols_read_from(node.meta.get("val")):
                found.setdefault(symbol, (node, dim))
    return found


def _symbols_read_from(val: Any) -> list[tuple[Any, int | None]]:
    sizes: list[tuple[Any, int | None]] = (
        [(size, dim) for dim, size in enumerate(val.shape)] if isinstance(val, Tensor) else [(val, None)]
    )
    return [(symbol, dim) for size, dim in sizes if (symbol := symbol_in(size)) is not None]


def symbols_of(nodes: Iterable[fx.Node]) -> set[Any]:
    """All symbols in the sizes and strides of values."""
    found: set[Any] = set()
    for node in nodes:
        val = node.meta.get("val")
        for item in val if isinstance(val, list | tuple) else [val]:
            found |= symbols_in(item)
    return found


def missing_sources(
    inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], sources: Mapping[Any, SymbolSource]
) -> list[fx.Node]:
    """Inputs of the graph that a region must have in addition, so that it knows the sizes of its values."""
    known = {symbol for node in inputs for symbol, _ in _symbols_read_from(node.meta.get("val"))}
    wanted = symbols_of([*inputs, *nodes]) - known
    found: dict[fx.Node, None] = {}
    for symbol in sorted(wanted, key=str):
        if symbol in sources:
            found.setdefault(sources[symbol][0])
    return [node for node in found if node not in inputs]


class SizeConditions:
    """What compiled code assumes of sizes."""

    def __init__(self, conditions: Sequence[Any], sources: Mapping[Any, SymbolSource]) -> None:
        self._conditions = list(conditions)
        self._symbols = sorted({symbol for each in conditions for symbol in each.free_symbols}, key=str)
        self._places = [sources.get(symbol) for symbol in self._symbols]
        self._known: dict[tuple[int, ...], bool] = {}

    @property
    def can_be_checked(self) -> bool:
        return None not in self._places

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the graph that have the sizes."""
        return list(dict.fromkeys(place[0] for place in self._places if place is not None))

    def hold(self, values: Sequence[Any]) -> bool:
        """True if the conditions hold for these values of `inputs`."""
        given = dict(zip(self.inputs, values, strict=True))
        sizes = tuple(
            int(given[node] if dim is None else given[node].shape[dim]) for node, dim in filter(None, self._places)
        )
        if sizes not in self._known:
            known = dict(zip(self._symbols, sizes, strict=True))
            self._known[sizes] = all(bool(each.subs(known)) for each in self._conditions)
        return self._known[sizes]

    def __str__(self) -> str:
        return ", ".join(map(str, self._conditions))

    def __bool__(self) -> bool:
        return bool(self._conditions)


class WatchedSizes:
    """Collects the guards on sizes that are added while regions are compiled."""

    def __init__(self, graph: fx.Graph, before: dict[Any, int]) -> None:
        """`before`: by shape environment, how many guards there were before its first region was compiled."""
        self.sources = symbol_sources(graph)
        nodes = graph.find_nodes(op="placeholder")
        self._env = next((env for n in nodes if (env := shape_env_of(n.meta.get("val"))) is not None), None)
        self._before = 0 if self._env is None else before.setdefault(self._env, len(shape_guards(self._env)))

    def conditions(self) -> SizeConditions:
        """The guards that were added until now."""
        added = [] if self._env is None else shape_guards(self._env)[self._before :]
        return SizeConditions([each for each in added if each.free_symbols], self.sources)
