"""Gather the nodes that a backend supports into the fewest partitions that still run one after the other.

    before                            partitions                     as submodules (`fuse_partitions`)
    a = x * 2     supported           0: x * 2, sin, cos(x)          fused_0 -> (b, d)
    b = sin(a)    supported           (1: print)                     c = report(b)
    c = report(b)                     2: c + d                       fused_1(c, d)
    d = cos(x)    supported
    e = c + d     supported

What torch's CapabilityBasedPartitioner does, in a few walks instead of one search per pair. Random draws, collectives,
writes and reads of the same memory, and switches of grad mode keep their order (`order_edges`); a `getitem` that takes
a tuple apart stays with what made the tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, overload, runtime_checkable

import torch
from torch import fx, nn

from wholestep.errors import PartitionError
from wholestep.ir.io.targets import describe_target
from wholestep.partition.graphs import Cuttable, error_at, graph_of, is_body, makes_tuple, sound_nodes, unpacked_from
from wholestep.partition.levels import UnitGraph, components, levels, sink
from wholestep.partition.order_edges import Edges, order_edges
from wholestep.torch_private.operators import OpOverload

_NOT_COMPUTE: tuple[object, ...] = ("_operator.getitem", torch.ops.aten.view)


@runtime_checkable
class OperatorSupport(Protocol):
    """What torch's `OperatorSupportBase` looks like."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        """Whether a backend can run the node."""


@dataclass(frozen=True)
class SupportedPartition:
    """Supported nodes that run together."""

    id: int
    """Its number among all groups, supported or not; see `SupportedPartitions.assignment`."""
    nodes: tuple[fx.Node, ...]
    """In graph order."""


@dataclass(frozen=True)
class SupportedPartitions(Sequence[SupportedPartition]):
    """The partitions in an order in which they can run; also a callback for `split_module`."""

    partitions: tuple[SupportedPartition, ...]
    assignment: Mapping[fx.Node, int]
    """Every node's group. What is unsupported has groups of its own, between the partitions; groups can run in the
    order of their numbers. (Placeholders count to the first group, the output to the last.)"""

    def __call__(self, node: fx.Node) -> int:
        """The group of a node."""
        return self.assignment[node]

    @property
    def supported_ids(self) -> frozenset[int]:
        """The groups that are partitions of supported nodes."""
        return frozenset(partition.id for partition in self.partitions)

    @overload
    def __getitem__(self, index: int) -> SupportedPartition: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[SupportedPartition, ...]: ...

    def __getitem__(self, index: int | slice) -> SupportedPartition | tuple[SupportedPartition, ...]:
        return self.partitions[index]

    def __len__(self) -> int:
        return len(self.partitions)

    def __iter__(self) -> Iterator[SupportedPartition]:
        return iter(self.partitions)


def partition_by_support(
    gm: Cuttable,
    is_supported: Callable[[fx.Node], bool] | OperatorSupport,
    *,
    min_nodes: int = 0,
    non_compute_ops: Collection[object] = (),
    skip_horizontal_fusion: bool = False,
) -> SupportedPartitions:
    """Every supported node in exactly one partition, and no cycle between partitions and the nodes around them.

    There are as few partitions as there can be; so no two of them could be merged. `is_supported` is asked once for
    each node but placeholders, the output and the bodies of `cond` and the like. An unpacking `getitem` goes with what
    made the tuple, whatever is said of it. The graph is not changed.

    Partitions with fewer than `min_nodes` nodes, not counting views, `getitem` and `non_compute_ops` (targets, or the
    names of methods), are dissolved: their nodes count as unsupported. (`min_nodes=2` is the default of torch's.)

    With `skip_horizontal_fusion` nodes are together only if values, or an order that must be kept, connect them. There
    the number is small, but not promised to be the smallest, and a longer search might find two that could be merged.
    """
    if type(min_nodes) is not int or min_nodes < 0:
        raise PartitionError(f"min_nodes must be a number of nodes, not {min_nodes!r}.")
    nodes = sound_nodes(graph_of(gm))
    supported = _ask(nodes, is_supported)
    members, units = _units(nodes, supported, order_edges(nodes))
    level = levels(units)
    sink(units, level)
    group = components(units, level) if skip_horizontal_fusion else list(level)
    return _lay_out(nodes, members, units, level, group, _Counter(min_nodes, non_compute_ops))


def _ask(nodes: Sequence[fx.Node], is_supported: Callable[[fx.Node], bool] | OperatorSupport) -> dict[fx.Node, bool]:
    if isinstance(is_supported, OperatorSupport):
        root = nodes[0].graph.owning_module
        ask: Callable[[fx.Node], bool] = partial(
            is_supported.is_node_supported, dict(root.named_modules()) if root is not None else {}
        )
    elif callable(is_supported):
        ask = is_supported
    else:
        raise PartitionError(
            f"is_supported must be a function of a node, or have is_node_supported, not {is_supported!r}."
        )
    found: dict[fx.Node, bool] = {}
    for node in nodes:
        if node.op in ("placeholder", "output") or is_body(node):
            continue
        try:
            answer = ask(node)
        except Exception as error:
            raise error_at(node, f"is_supported raised {type(error).__name__}: {error}") from error
        if type(answer) is not bool:
            raise error_at(node, f"is_supported returned {answer!r} for {node.name}.", fix="return True or False.")
        found[node] = answer
    return found


def _units(
    nodes: Sequence[fx.Node], supported: Mapping[fx.Node, bool], before: Edges
) -> tuple[list[list[fx.Node]], UnitGraph]:
    """Each unit's nodes, and the graph of units. The output is none."""
    place = {node: i for i, node in enumerate(nodes)}
    ordered = {each for node, earlier in before.items() for each in (node, *earlier)}
    unit_of: dict[fx.Node, int] = {}
    members: list[list[fx.Node]] = []
    is_supported: list[bool] = []
    sources: list[list[int]] = []
    movable: list[bool] = []
    for node in nodes[:-1]:
        producer = unpacked_from(node)
        if producer is not None and not _separated(node, producer, before, place):
            unit_of[node] = unit = unit_of[producer]
            members[unit].append(node)
            movable[unit] = False
            continue
        unit_of[node] = len(members)
        members.append([node])
        is_supported.append(supported.get(node, False))
        inputs = node.all_input_nodes
        sources.append(list({unit_of[source] for source in (*inputs, *before.get(node, ()))}))
        movable.append(node not in ordered and all(_moves_along(source, movable[unit_of[source]]) for source in inputs))
    return members, UnitGraph(is_supported, sources, movable)


def _moves_along(source: fx.Node, movable: bool) -> bool:
    """Whether a later use of a value keeps nothing else alive: it is an input, or moves too."""
    return source.op in ("placeholder", "get_attr") or (movable and len(source.users) == 1)


def _separated(node: fx.Node, producer: fx.Node, before: Edges, place: Mapping[fx.Node, int]) -> bool:
    """Whether a mode is switched between a value and an index into it, and the value may be a tensor after all."""
    return node in before and not makes_tuple(producer) and any(place[e] > place[producer] for e in before[node])


class _Counter:
    """Whether a partition has enough nodes that compute."""

    def __init__(self, least: int, non_compute_ops: Collection[object]) -> None:
        self._least = least
        self._others = {*_NOT_COMPUTE, *non_compute_ops}

    def enough(self, nodes: Sequence[fx.Node]) -> bool:
        return not self._least or sum(self._computes(node) for node in nodes) >= self._least

    def _computes(self, node: fx.Node) -> bool:
        target = node.target
        if node.op == "get_attr" or target in self._others or describe_target(target) in self._others:
            return False
        return not (isinstance(target, OpOverload) and target.overloadpacket in self._others)


def _lay_out(
    nodes: Sequence[fx.Node],
    members: Sequence[list[fx.Node]],
    units: UnitGraph,
    level: Sequence[int],
    group: Sequence[int],
    counter: _Counter,
) -> SupportedPartitions:
    """Number the groups in a line: at each level the partitions, then what is unsupported there."""
    place = {node: i for i, node in enumerate(nodes)}
    kept: dict[int, dict[int, list[fx.Node]]] = {}
    loose: dict[int, list[fx.Node]] = {}
    for unit, own in enumerate(members):
        if units.supported[unit]:
            kept.setdefault(level[unit], {}).setdefault(group[unit], []).extend(own)
        else:
            calls = [node for node in own if node.op not in ("placeholder", "get_attr")]
            loose.setdefault(level[unit], []).extend(calls)
    assignment: dict[fx.Node, int] = {}
    partitions: list[SupportedPartition] = []
    number, between = 0, loose.get(-1, [])
    for at in range(max((*kept, *loose), default=-1) + 1):
        large = []
        for found in kept.get(at, {}).values():
            found.sort(key=place.__getitem__)
            if counter.enough(found):
                large.append(found)
            else:
                between += found
        if large and between:
            assignment.update(dict.fromkeys(between, number))
            number, between = number + 1, []
        for found in sorted(large, key=lambda nodes: place[nodes[0]]):
            assignment.update(dict.fromkeys(found, number))
            partitions.append(SupportedPartition(number, tuple(found)))
            number += 1
        between += loose.get(at, [])
    assignment.update(dict.fromkeys(between, number))
    last = number if between else max(number - 1, 0)
    return SupportedPartitions(tuple(partitions), _with_inputs(nodes, assignment, last))


def _with_inputs(nodes: Sequence[fx.Node], assignment: dict[fx.Node, int], last: int) -> dict[fx.Node, int]:
    """Also where placeholders, constants (with their first user) and the output count to; in graph order."""
    for node in reversed(nodes):
        if node.op == "output":
            assignment[node] = last
        elif node not in assignment:
            users = [assignment[user] for user in node.users if user in assignment]
            assignment[node] = 0 if node.op == "placeholder" else min(users, default=0)
    return {node: assignment[node] for node in nodes}
