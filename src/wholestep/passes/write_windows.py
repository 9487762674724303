"""Between which writes a collective may read its operand, in graphs that are not in normal form.

    v = view(g, [-1])
    mul_(v, 0.5)                       writes the memory of g
    a = all_reduce(g, 'sum', '0')      may start anywhere between the two writes
    zero_(g)

A StepGraph has no such writes, and costs one look at each node. Other graphs (`make_fx` of a step with in-place
operators, a graph by hand) are taken as they are: what is no operator may be a view of all that it reads.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

from torch import fx

from wholestep.ir.effects import is_arithmetic, may_write, shared_inputs, writes
from wholestep.torch_private.operators import OpOverload


class WriteWindows:
    """The writes of a graph, by the memory that they go to."""

    def __init__(self, nodes: Sequence[fx.Node], end: int) -> None:
        """`end`: position of the first write-back; what comes from there on is not looked at."""
        self._memory: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, list[int]] = {}
        targets = list(map(attrgetter("target"), nodes[:end]))
        by_id = dict(zip(map(id, targets), targets, strict=True))
        pure = {key for key, target in by_id.items() if _cannot_write(target)}
        suspects = compress(range(end), map(not_, map(pure.__contains__, map(id, targets))))  # no Python code per node
        writers = [i for i in suspects if nodes[i].op not in _SILENT and writes(nodes[i])]
        if not writers:
            return
        for node in nodes:
            for source in _may_share(node):
                self._unite(node, source)
        for i in writers:
            for root in {self._root(source) for source in nodes[i].all_input_nodes}:
                self._writes.setdefault(root, []).append(i)

    @property
    def any(self) -> bool:
        """Whether the graph writes at all."""
        return bool(self._writes)

    def around(self, sources: Iterable[fx.Node], place: int) -> tuple[int, float]:
        """The last write before a place, and the first one after it, to what some nodes hold."""
        last, following = -1, math.inf
        for source in sources if self._writes else ():
            found = self._writes.get(self._root(source), [])
            i = bisect(found, place)
            last = max(last, found[i - 1]) if i else last
            following = min(following, found[i]) if i < len(found) else following
        return last, following

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._memory:
            node = self._memory[node]
        return node

    def _unite(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self._root(one), self._root(other)
        if one is not other:
            self._memory[one] = other


_SILENT = frozenset({"placeholder", "get_attr", "output"})


def _cannot_write(target: Any) -> bool:
    """Operators by their schema; of Python's own functions those on numbers, which are many in an optimizer."""
    return not may_write(target) if isinstance(target, OpOverload) else is_arithmetic(target)


def _may_share(node: fx.Node) -> list[fx.Node]:
    if node.op == "output" or isinstance(node.target, OpOverload):
        return shared_inputs(node)
    return list(node.all_input_nodes)
