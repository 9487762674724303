"""A graph as arrays: what simulation and scheduling need of it, read once, by the index of the node.

    number   node                                     kind      stream
    7        g = mm(..)                               COMPUTE
    8        a = all_reduce(g, 'sum', '0')            ISSUE     group 0
    9        w = wait_tensor(a)                       WAIT      issued[9] = 8, held[9] = the storage of g
    10       v = view(w, [-1])                        FREE

A collective reads its inputs until its wait, so their storages live until then (`held`). Effects and aliases are those
that `ir.effects` tells.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy
import numpy.typing
import torch
from torch import Tensor, fx

from wholestep.errors import OptionError, called
from wholestep.ir.collectives import is_part
from wholestep.ir.effects import (
    find_storages,
    is_collective,
    is_measure,
    is_wait,
    main_device,
    may_write,
    read_by,
    shared_positions,
    stored_in,
)
from wholestep.ir.graph_walks import collector_paused, tensors_in
from wholestep.ir.groups import group_of, group_size
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.fx_graphs import NODE_SOURCES
from wholestep.torch_private.operators import OpOverload, may_copy, plain_name

INPUT, FREE, COMPUTE, ISSUE, WAIT, READ, OUTPUT = range(7)
"""Kinds of nodes. FREE: runs nothing (views, sizes, elements of lists). READ: the host waits for a value."""

Floats = numpy.typing.NDArray[numpy.float64]
Integers = numpy.typing.NDArray[numpy.int64]

_ALLOCATE = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal"})
_MOVES = frozenset({"device_put", "_to_copy", "to", "copy_", "copy"})
_UNDECIDED = -1


@dataclass(frozen=True, eq=False)
class StepIndex:
    """The nodes of a graph by number, in the order of the graph."""

    graph: fx.Graph
    nodes: list[fx.Node]
    number: dict[fx.Node, int]
    kind: list[int]
    sources: list[tuple[int, ...]]
    """What each node reads."""
    issued: list[int]
    """Of a wait, the collective that it waits for; -1 of others, and where it started before this graph."""
    group: list[int]
    """Of a collective, the number of its process group; -1 of others."""
    groups: tuple[str, ...]
    """Names of process groups in the order of first appearance."""
    group_ranks: tuple[int, ...]
    """Their sizes; 1 where unknown."""
    sizes: Integers
    """Bytes of each storage; 0 on another device than that of most bytes."""
    made: list[tuple[int, ...]]
    """The storages that each node allocates."""
    seen: list[tuple[int, ...]]
    """The storages that must be alive while each node runs, with those that it makes."""
    held: dict[int, tuple[int, ...]]
    """Of a wait, the storages that its collective reads until then."""

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def users(self) -> list[list[int]]:
        """What reads each node, in order."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, sources in enumerate(self.sources):
            for source in sources:
                found[source].append(i)
        return found

    @cached_property
    def waits(self) -> dict[int, list[int]]:
        """Of each collective that is waited for, its waits in order."""
        found: dict[int, list[int]] = {}
        for i, issued in enumerate(self.issued):
            if issued >= 0:
                found.setdefault(issued, []).append(i)
        return found

    @cached_property
    def collectives(self) -> list[int]:
        """All collectives in order."""
        return [i for i, kind in enumerate(self.kind) if kind == ISSUE]

    @cached_property
    def persistent(self) -> set[int]:
        """Storages that the caller holds: of inputs and constants."""
        return {s for i, kind in enumerate(self.kind) if kind == INPUT for s in self.made[i]}

    @cached_property
    def touches(self) -> tuple[Integers, Integers, Integers]:
        """Storages and the nodes that need them alive, sorted by storage, and where each storage begins."""
        storages: list[int] = []
        nodes: list[int] = []
        for i, seen in enumerate(self.seen):
            storages.extend(seen)
            nodes.extend([i] * len(seen))
        for i, held in self.held.items():
            storages.extend(held)
            nodes.extend([i] * len(held))
        by = numpy.argsort(numpy.array(storages, dtype=numpy.int64), kind="stable")
        ordered = numpy.array(storages, dtype=numpy.int64)[by]
        starts = numpy.searchsorted(ordered, numpy.arange(len(self.sizes)))
        return ordered, numpy.array(nodes, dtype=numpy.int64)[by], starts


def graph_of(given: StepGraph | fx.GraphModule | fx.Graph) -> fx.Graph:
    """The graph of what was given."""
    if isinstance(given, StepGraph):
        return given.gm.graph
    if isinstance(given, fx.GraphModule):
        return given.graph
    if isinstance(given, fx.Graph):
        return given
    raise OptionError(f"{called(given)} has no graph.", fix="give a StepGraph, a GraphModule or an fx.Graph.")


def index_step(given: StepGraph | fx.GraphModule | fx.Graph) -> StepIndex:
    """Read a graph once. Values (`meta["val"]`) tell bytes; nodes without them take none."""
    with collector_paused():
        return _index(graph_of(given))


def _index(graph: fx.Graph) -> StepIndex:
    nodes: list[fx.Node] = list(graph.nodes)
    number = dict(zip(nodes, range(len(nodes)), strict=True))
    device = main_device(graph)
    kinds = [_kind(node, device) for node in nodes]
    sources = [tuple(map(number.__getitem__, NODE_SOURCES(node))) for node in nodes]
    names: dict[str, int] = {}
    ranks: list[int] = []
    issued, group = [-1] * len(nodes), [-1] * len(nodes)
    for i, kind in enumerate(kinds):
        if kind == ISSUE:
            name = group_of(nodes[i]) or ""
            if name not in names:
                names[name] = len(names)
                ranks.append(group_size(nodes[i]))
            group[i] = names[name]
        elif kind == WAIT:
            issued[i] = _collective_of(i, kinds, sources, nodes)
    storages = find_storages(graph, device)
    seen_by = storages.seen_by
    made = [storages.made_by.get(node, ()) for node in nodes]
    seen = [_seen(node, seen_by) for node in nodes]
    held = {
        i: tuple(dict.fromkeys(s for source in sources[c] for s in seen_by.get(nodes[source], ())))
        for i, c in enumerate(issued)
        if c >= 0
    }
    sizes = numpy.array(storages.size, dtype=numpy.int64)
    return StepIndex(
        graph, nodes, number, kinds, sources, issued, group, tuple(names), tuple(ranks), sizes, made, seen, held
    )


def _seen(node: fx.Node, seen_by: dict[fx.Node, tuple[int, ...]]) -> tuple[int, ...]:
    own, read = seen_by.get(node, ()), read_by(node)
    if not read:
        return own
    if len(read) == 1 and not own:
        return seen_by.get(read[0], ())
    return tuple(dict.fromkeys((*own, *(s for source in read for s in seen_by.get(source, ())))))


def _collective_of(
    wait: int, kinds: Sequence[int], sources: Sequence[tuple[int, ...]], nodes: Sequence[fx.Node]
) -> int:
    """The collective behind a wait, through elements and views; -1 if it started before this graph."""
    i = wait
    while sources[i]:
        i = sources[i][0]
        if kinds[i] == ISSUE:
            return i
        if kinds[i] != WAIT and not is_part(nodes[i]):
            return -1
    return -1


def _kind(node: fx.Node, device: torch.device) -> int:
    if node.op in ("placeholder", "get_attr"):
        return INPUT
    if node.op == "output":
        return OUTPUT
    target = node.target
    if node.op != "call_function":
        return COMPUTE
    if target is operator.getitem:
        return FREE
    if not isinstance(target, OpOverload):
        return COMPUTE if any(True for _ in tensors_in(node.meta.get("val"))) else FREE
    known = _kind_of_operator(target)
    if known != _UNDECIDED:
        return known
    if may_copy(target) and stored_in(node):
        return FREE
    value = node.meta.get("val")
    tensors = list(tensors_in(value))
    if plain_name(target) in _MOVES and device.type != "cpu":
        ends = {tensor.device.type for tensor in tensors}
        begins = {t.device.type for source in node.all_input_nodes[-1:] for t in tensors_in(source.meta.get("val"))}
        if "cpu" in ends | begins and len(ends | begins) > 1:
            return READ if "cpu" in ends else COMPUTE
    return COMPUTE if tensors or value is None else FREE


@lru_cache(maxsize=4096)
def _kind_of_operator(op: OpOverload) -> int:
    """The kind of every call of an operator, or _UNDECIDED."""
    if is_wait(op):
        return WAIT
    if is_collective(op):
        return ISSUE
    name = plain_name(op)
    if name in _READS:
        return READ
    if is_measure(op) or name in _ALLOCATE or "_assert" in name or "sym_constrain" in name:
        return FREE
    if shared_positions(op) and not may_write(op) and not may_copy(op):
        return FREE
    return _UNDECIDED


Order = Sequence[int]
"""Numbers of nodes in the order in which they run."""


def memory_of(index: StepIndex, order: Order | None = None) -> tuple[Integers, int]:
    """Live bytes while each place of an order runs, and the bytes of inputs among them."""
    places, place = len(index), _places(index, order)
    change = numpy.zeros(places + 1, dtype=numpy.int64)
    held = 0
    if len(index.sizes):
        first, last = _lifetimes(index, place)
        persistent = numpy.zeros(len(index.sizes), dtype=bool)
        persistent[list(index.persistent)] = True
        held = int(index.sizes[persistent].sum())
        others = ~persistent
        numpy.add.at(change, first[others], index.sizes[others])
        numpy.add.at(change, last[others] + 1, -index.sizes[others])
    return numpy.cumsum(change[:places]) + held, held


def lifetimes(index: StepIndex, order: Order | None = None) -> tuple[Integers, Integers]:
    """The places of an order where each storage is allocated and where it is needed last."""
    return _lifetimes(index, _places(index, order)) if len(index.sizes) else (index.sizes, index.sizes)


def _places(index: StepIndex, order: Order | None) -> Integers:
    """Where each node runs."""
    place = numpy.empty(len(index), dtype=numpy.int64)
    place[numpy.arange(len(index)) if order is None else numpy.asarray(order, dtype=numpy.int64)] = numpy.arange(
        len(index)
    )
    return place


def _lifetimes(index: StepIndex, place: Integers) -> tuple[Integers, Integers]:
    """Where each storage is allocated, and where it is needed last; those that leave the graph live to its end."""
    _, nodes, starts = index.touches
    at = place[nodes]
    return numpy.minimum.reduceat(at, starts), numpy.maximum.reduceat(at, starts)


def alive_at(index: StepIndex, where: int, order: Order | None = None) -> list[int]:
    """The storages that are alive at a place of an order, without those of inputs, largest first."""
    first, last = lifetimes(index, order)
    alive = numpy.nonzero((first <= where) & (last >= where) & (index.sizes > 0))[0]
    own = [int(s) for s in alive if int(s) not in index.persistent]
    return sorted(own, key=lambda s: (-int(index.sizes[s]), s))


def makers(index: StepIndex) -> dict[int, int]:
    """The node that allocates each storage."""
    return {s: i for i, made in enumerate(index.made) for s in made}


def costs_by(index: StepIndex, cost: Callable[[fx.Node], float]) -> list[float]:
    """Microseconds of every node by a callable; nodes that run nothing are not asked for."""
    return [
        float(cost(node)) if kind in (COMPUTE, ISSUE, READ) else 0.0
        for node, kind in zip(index.nodes, index.kind, strict=True)
    ]


def values_of(nodes: Iterable[fx.Node]) -> Iterator[Tensor]:
    """The tensors that some nodes give."""
    for node in nodes:
        yield from tensors_in(node.meta.get("val"))


def plain(value: Any) -> str:
    """The name of an operator or function, for tables."""
    if isinstance(value, OpOverload):
        return plain_name(value).split("::")[-1]
    return str(getattr(value, "__name__", value))
