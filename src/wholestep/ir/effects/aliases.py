"""Which nodes of a graph may share memory, and which writes reach what.

v = view(g, [-1])                  one memory class: g, v, m
m = mul_(v, 0.5)                   writes g, an input
a = all_reduce(g, 'sum', '0')      may start anywhere between the two writes
zero_(g)
"""

from __future__ import annotations

import math
import operator
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects.nodes import aliased_inputs, shared_inputs, stored_in, writes, written_inputs
from wholestep.ir.effects.targets import is_arithmetic, may_write
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.ir.slices import reachable
from wholestep.torch_private.operators import OpOverload

Sources = Callable[[fx.Node], Iterable[fx.Node]]
_NO_CALL = frozenset({"placeholder", "get_attr", "output"})


class MemoryClasses:
    """Nodes whose results may share memory (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        """The node that stands for the class of a node."""
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while node is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """Make one class of two."""
        node, other = self.find(node), self.find(other)
        if node is not other:
            self._parent[node] = other


def alias_roots(
    nodes: Iterable[fx.Node], roots: Iterable[fx.Node], sources: Sources = shared_inputs
) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node that may share memory with some of `roots`, those; each root shares its own. `nodes`: in order."""
    found = {root: frozenset({root}) for root in roots}
    for node in nodes:
        if node in found:
            continue
        shared = [found[source] for source in sources(node) if source in found]
        if shared:
            found[node] = shared[0] if len(shared) == 1 else frozenset().union(*shared)
    return found


def written_roots(nodes: Sequence[fx.Node], roots: Sequence[fx.Node], sources: Sources = shared_inputs) -> list[int]:
    """Positions of those of `roots` that nodes write into, directly or through aliases."""
    found = alias_roots(nodes, roots, sources)
    written = {root for node in nodes for value in written_inputs(node) for root in found.get(value, ())}
    return [i for i, root in enumerate(roots) if root in written]


def sharing_with_outputs(graph: fx.Graph) -> set[fx.Node]:
    """The values that leave a graph, and everything that they are views of."""
    return set(reachable(graph.output_node().all_input_nodes, shared_inputs))


class WriteWindows:
    """The writes of a graph by the memory that they go to: between which of them a collective may read its operand.

    A StepGraph has no such writes, and costs one look at each node. Other graphs (`make_fx` of a step with in-place
    operators, a graph by hand) are taken as they are.
    """

    def __init__(self, nodes: Sequence[fx.Node], end: int) -> None:
        """`end`: position of the first write-back; writes from there on do not count."""
        self._classes = MemoryClasses()
        self._writes: dict[fx.Node, list[int]] = {}
        targets = list(map(attrgetter("target"), nodes[:end]))
        by_id = dict(zip(map(id, targets), targets, strict=True))
        pure = {key for key, target in by_id.items() if _cannot_write(target)}
        suspects = compress(range(end), map(not_, map(pure.__contains__, map(id, targets))))  # no Python code per node
        writers = [i for i in suspects if nodes[i].op not in _NO_CALL and writes(nodes[i])]
        if not writers:
            return
        for node in nodes:
            for source in aliased_inputs(node):
                self._classes.join(node, source)
        for i in writers:
            for root in set(map(self._classes.find, written_inputs(nodes[i]))):
                self._writes.setdefault(root, []).append(i)

    @property
    def any(self) -> bool:
        """Whether the graph writes at all."""
        return bool(self._writes)

    def around(self, sources: Iterable[fx.Node], place: int) -> tuple[int, float]:
        """The last write before a place, and the first one after it, to what some nodes hold."""
        last, following = -1, math.inf
        for source in sources if self._writes else ():
            found = self._writes.get(self._classes.find(source), [])
            i = bisect(found, place)
            last = max(last, found[i - 1]) if i else last
            following = min(following, found[i]) if i < len(found) else following
        return last, following


def _cannot_write(target: Any) -> bool:
    """Operators by their schema; of Python's own functions those on scalars, which are many in an optimizer."""
    return not may_write(target) if isinstance(target, OpOverload) else is_arithmetic(target)


@dataclass
class Storages:
    """The storages of a graph's values, by number."""

    size: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    maker: list[fx.Node] = field(default_factory=list)
    """The node that allocates each storage."""
    seen_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The storages that the value of a node lies in."""
    made_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The storages that a node allocates; those of a list, one for each element."""


def find_storages(graph: fx.Graph, device: torch.device | None = None) -> Storages:
    """All storages of a graph; inputs and constants have their own. Those on another device count 0 bytes."""
    found = Storages()
    forms: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        form = forms.get(source) if isinstance(source, fx.Node) else None
        if isinstance(form, list) and isinstance(node.args[1], int):
            forms[node] = form[node.args[1]]
            found.seen_by[node] = tuple(_flat(forms[node]))
        elif shared := stored_in(node):
            found.seen_by[node] = tuple(dict.fromkeys(p for s in shared for p in found.seen_by.get(s, ())))
        else:
            forms[node] = _make(found, node, node.meta.get("val"), device)
            found.seen_by[node] = found.made_by[node] = tuple(_flat(forms[node]))
    return found


def _make(storages: Storages, node: fx.Node, value: Any, device: torch.device | None) -> Any:
    """New storages for a value: a number, or a list of the form of the value; None where there is no tensor."""
    if isinstance(value, list | tuple):
        return [_make(storages, node, item, device) for item in value]
    if not isinstance(value, Tensor):
        return None
    storages.size.append(tensor_bytes(value) if device is None or value.device == device else 0)
    storages.maker.append(node)
    return len(storages.size) - 1


def _flat(form: Any) -> Iterator[int]:
    if isinstance(form, list):
        for item in form:
            yield from _flat(item)
    elif form is not None:
        yield form


def read_by(node: fx.Node) -> list[fx.Node]:
    """The values that must be in memory while a node runs: of a list whose element it takes, only that element."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), list | tuple):
        return []
    return node.all_input_nodes
