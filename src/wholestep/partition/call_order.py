"""The order in which partitions are called: a stable topological order, by the position of their first nodes.

    nodes       a(2)  b(0)  c(1, needs b)  d(0)         numbers in brackets: the partition
    order       2     0     1                           by first node, not by number

If the numbers increase along the graph this is the order of the graph. A partition that needs one whose first node
comes later is called after it, and nothing else moves. (torch calls the latest partition that is ready, which reverses
independent ones.) Two kinds of edges order partitions:

    relu (0) -> add (1)        data flow: partition 0 returns relu, partition 1 takes it
    add_(x) (0), mul(x) (1)    effects: no value flows, but mul reads what add_ wrote (`order_edges`)

A child that takes a tensor of shape [s0, 4] can only be compiled or guarded if it can name s0. So the node that first
had s0 as its value is passed as well, recorded in `meta["val"]` (make_fx, export) or `meta["example_value"]` (dynamo).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from wholestep.errors import SplitCycleError, SplitError, SplitOrderError
from wholestep.ir.effects import GraphEffects, order_edges
from wholestep.partition.assignment import CALLS, OUTSIDE, Assignment, error_at
from wholestep.torch_private.autograd import EXIT_AUTOCAST

_SHOWN = 8


def stable_order(after: Sequence[Sequence[int]]) -> list[int]:
    """The partitions in topological order, by index; shorter than the list if there is a cycle."""
    waits = [0] * len(after)
    for following in after:
        for end in following:
            waits[end] += 1
    ready = [place for place, count in enumerate(waits) if count == 0]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for end in after[place]:
            waits[end] -= 1
            if waits[end] == 0:
                heapq.heappush(ready, end)
    return order


def find_cycle(after: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """The partitions of one cycle, given the order that does not reach them. The smallest index comes first."""
    left = set(range(len(after))).difference(order)
    # Each remaining partition waits for another remaining one, so walking backwards must close a cycle.
    waits_for: dict[int, int] = {}
    for place in sorted(left, reverse=True):
        for end in after[place]:
            if end in left:
                waits_for[end] = place
    place = min(left)
    seen: dict[int, int] = {}
    path: list[int] = []
    while place not in seen:
        seen[place] = len(path)
        path.append(place)
        place = waits_for[place]
    cycle = path[seen[place] :][::-1]
    least = cycle.index(min(cycle))
    return cycle[least:] + cycle[:least]


def cycle_error(assignment: Assignment, flow: Flow, order: Sequence[int]) -> SplitError:
    """The error for partitions that need each other's values: one cycle, with the nodes that cause it."""
    cycle = find_cycle(flow.after, order)
    pairs = [_value_between(assignment, a, b) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    names = [assignment.partitions[place].submod_name for place in cycle]
    lines = [
        f"{names[i]}: {made.name} -> {used.name} in {names[(i + 1) % len(names)]}"
        for i, (made, used) in enumerate(pairs)
    ]
    if len(lines) > _SHOWN:
        lines[_SHOWN - 1 : -1] = [f"... {len(lines) - _SHOWN} more ..."]
    return error_at(
        pairs[-1][1],
        f"cycle exists between partitions! {_shortened([*names, names[0]])} need each other's results.",
        fix="assign one of these nodes to another partition, or to one of its own.",
        cls=SplitCycleError,
        around=lines,
    )


def order_error(
    assignment: Assignment, flow: Flow, order: Sequence[int], pairs: Sequence[tuple[fx.Node, fx.Node]]
) -> SplitError:
    """The error for effects that would be reordered: the two nodes, and the partitions that force it."""
    cycle = find_cycle(flow.after, order)
    edges = set(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    place, partitions = assignment.place, assignment.partitions
    first, second = next((a, b) for a, b in pairs if (place[a], place[b]) in edges)
    names = [partitions[i].submod_name for i in cycle]
    return error_at(
        second,
        f"{first.name} must run before {second.name}, and the partitions do not allow it: "
        f"{partitions[place[first]].submod_name} has the first, {partitions[place[second]].submod_name} the second, "
        f"and {_shortened([*names, names[0]])} each come before the next.",
        fix=f"put {first.name} and {second.name} into one partition, or {second.name} into one of its own.",
        cls=SplitOrderError,
        around=[f"%{first.name} in {partitions[place[first]].submod_name}"],
    )


def _value_between(assignment: Assignment, start: int, end: int) -> tuple[fx.Node, fx.Node]:
    place = assignment.place
    for node in assignment.partitions[end].nodes:
        for source in node.all_input_nodes:
            if source.op in CALLS and place[source] == start:
                return source, node
    # Only a symbolic size flows between the two; its user is the partition as a whole.
    gives, needs = assignment.partitions[start].gives, assignment.partitions[end].needs
    return next(node for node in gives if node in needs), assignment.partitions[end].nodes[0]


def _shortened(names: list[str]) -> str:
    if len(names) > _SHOWN:
        names = [*names[: _SHOWN - 2], "...", names[-1]]
    return " -> ".join(names)


class Flow:
    """For each partition, the indices of those that must come after it."""

    __slots__ = ("_known", "after", "has_symbols")

    def __init__(self, count: int) -> None:
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.has_symbols = False
        """True if an edge exists only because a partition is passed a symbolic size that another one computes."""
        self._known: set[int] = set()

    def add(self, first: int, second: int) -> bool:
        """Order `first` before `second`; False if the edge exists."""
        edge = first * len(self.after) + second
        if edge in self._known:
            return False
        self._known.add(edge)
        self.after[first].append(second)
        return True


def find_flow(assignment: Assignment, computed_sizes: bool = True) -> Flow:
    """Fill in the inputs and outputs of partitions. `computed_sizes`: also pass sizes that another one computes."""
    place, partitions = assignment.place, assignment.partitions
    flow, symbols = Flow(len(partitions)), SymbolBindings()

    def cross(source: fx.Node, start: int, end: int) -> None:
        partitions[end].needs.setdefault(source)
        if start != OUTSIDE:
            partitions[start].gives.setdefault(source)
            if flow.add(start, end):
                partitions[start].uses.setdefault(partitions[end])
                partitions[end].sources.setdefault(partitions[start])

    for node in assignment.nodes:
        symbols.bind(node)
        end = place.get(node, OUTSIDE)
        if end == OUTSIDE:
            continue
        # Each child enters and exits autocast itself: no value has to be passed for an exit.
        if node.target is EXIT_AUTOCAST:
            continue
        for source in node.all_input_nodes:
            start = place[source]
            if start == end:
                continue
            cross(source, start, end)
            for size in symbols.needed_for(source):
                start = place[size]
                if start == OUTSIDE:
                    cross(size, start, end)
                elif start != end and computed_sizes:
                    flow.has_symbols = True
                    cross(size, start, end)
    if assignment.output is not None:
        for source in assignment.output.all_input_nodes:
            if (start := place[source]) != OUTSIDE:
                partitions[start].gives.setdefault(source)
    return flow


def forget_flow(assignment: Assignment) -> None:
    """Clear what `find_flow` filled in."""
    for partition in assignment.partitions:
        partition.needs, partition.gives, partition.sources, partition.uses = {}, {}, {}, {}


def order_pairs(assignment: Assignment, effects: GraphEffects) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes in different partitions that must keep their order although no value flows between them."""
    if len(assignment.partitions) < 2 or not (effects.tokens or effects.written or effects.fences):
        return []
    place = assignment.place
    pairs = []
    for node, earlier in order_edges(assignment.nodes, around_switches=False, effects=effects).items():
        end = place.get(node, OUTSIDE)
        if end != OUTSIDE:
            pairs += [(other, node) for other in earlier if place.get(other, OUTSIDE) not in (OUTSIDE, end)]
    return pairs


VALUE_KEYS = ("val", "example_value")

_SYMBOLIC = (torch.SymInt, torch.SymFloat)


class SymbolBindings:
    """The node that first had each symbol as its value; nodes are added in graph order."""

    def __init__(self) -> None:
        self._bound: dict[sympy.Symbol, fx.Node] = {}
        self._used: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def bind(self, node: fx.Node) -> None:
        """Record the symbol that is the value of a node, unless an earlier node has it."""
        meta = node.meta
        for key in VALUE_KEYS:
            value: Any = meta.get(key)
            # Not isinstance: this runs for each node, and tensor subclasses may implement it in Python.
            if type(value) in _SYMBOLIC:
                expression = value.node.expr
                if isinstance(expression, sympy.Symbol):
                    self._bound.setdefault(expression, node)

    def needed_for(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes that bind the symbols in the layout of a node's value."""
        if not self._bound:
            return ()
        found = self._used.get(node)
        if found is None:
            symbols: set[sympy.Symbol] = set()
            for key in VALUE_KEYS:
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
