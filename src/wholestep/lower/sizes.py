"""Symbolic sizes of regions: which inputs tell them, and what compiled code takes for granted of them.

A region reads `cat`, of size s0 + s1, and needs s0 and s1: inputs of the graph that have just these sizes come along.
While a region is traced and compiled, sizes are compared (`s0 != 2`, `s0 * s1 is even`), with the answers of the traced
call. These answers are conditions of the compiled code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from wholestep.ir.effects import is_measure
from wholestep.torch_private.symbolic_shapes import shape_env_of, shape_guards, symbol_in, symbols_in

Place = tuple[fx.Node, int | None]
"""An input of a graph, and the dimension of it that a symbol is; None: the input itself is the number."""


def tell_sizes(graph: fx.Graph) -> None:
    """Let nodes that compute sizes say so: a trace may have noted the numbers of its own call."""
    for node in graph.nodes:
        if node.op != "call_function" or type(node.meta.get("val")) is not int:
            continue
        vals = [source.meta.get("val") for source in node.all_input_nodes]
        if is_measure(node.target) or (_is_arithmetic(node.target) and any(isinstance(v, SymInt) for v in vals)):
            args = fx.map_arg(node.args, lambda source: source.meta.get("val"))
            node.meta = {**node.meta, "val": node.target(*args, **node.kwargs)}


def _is_arithmetic(target: Any) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "math") or target in (torch.sym_max, torch.sym_min)


def symbol_places(graph: fx.Graph) -> dict[Any, Place]:
    """Where the symbols of a graph can be read."""
    found: dict[Any, Place] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            for symbol, dim in _told_by(node.meta.get("val")):
                found.setdefault(symbol, (node, dim))
    return found


def _told_by(val: Any) -> list[tuple[Any, int | None]]:
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


def missing_places(inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], places: Mapping[Any, Place]) -> list[fx.Node]:
    """Inputs of the graph that a region has to take so that it knows the sizes of its values."""
    told = {symbol for node in inputs for symbol, _ in _told_by(node.meta.get("val"))}
    wanted = symbols_of([*inputs, *nodes]) - told
    found: dict[fx.Node, None] = {}
    for symbol in sorted(wanted, key=str):
        if symbol in places:
            found.setdefault(places[symbol][0])
    return [node for node in found if node not in inputs]


class SizeConditions:
    """What compiled code takes for granted of sizes."""

    def __init__(self, conditions: Sequence[Any], places: Mapping[Any, Place]) -> None:
        self._conditions = list(conditions)
        self._symbols = sorted({symbol for each in conditions for symbol in each.free_symbols}, key=str)
        self._places = [places.get(symbol) for symbol in self._symbols]
        self._known: dict[tuple[int, ...], bool] = {}

    @property
    def can_be_checked(self) -> bool:
        return None not in self._places

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the graph that tell the sizes."""
        return list(dict.fromkeys(place[0] for place in self._places if place is not None))

    def hold(self, values: Sequence[Any]) -> bool:
        """Whether the conditions hold, given the values of `inputs`."""
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
    """Collects the conditions that are added while regions are compiled."""

    def __init__(self, graph: fx.Graph, before: dict[Any, int]) -> None:
        """`before`: how many conditions there were when something that may be used again was first compiled."""
        self.places = symbol_places(graph)
        nodes = graph.find_nodes(op="placeholder")
        self._env = next((env for n in nodes if (env := shape_env_of(n.meta.get("val"))) is not None), None)
        self._before = 0 if self._env is None else before.setdefault(self._env, len(shape_guards(self._env)))

    def conditions(self) -> SizeConditions:
        """What was assumed until now."""
        added = [] if self._env is None else shape_guards(self._env)[self._before :]
        return SizeConditions([each for each in added if each.free_symbols], self.places)
