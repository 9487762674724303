"""Group the nodes that a backend supports into the fewest partitions without a cycle.

    before                            partitions                     as submodules (`fuse_partitions`)
    a = x * 2     supported           0: x * 2, sin, cos(x)          fused_0 -> (b, d)
    b = sin(a)    supported           (1: print)                     c = report(b)
    c = report(b)                     2: c + d                       fused_1(c, d)
    d = cos(x)    supported
    e = c + d     supported

This does what torch's CapabilityBasedPartitioner does, in a few walks instead of one search per pair. Random ops,
collectives, writes and reads of the same memory, and grad-mode switches keep their order (`order_edges`); a `getitem`
that unpacks a tuple stays with the producer of the tuple.

The partitions come from levels: how often a path to a node leaves supported nodes, through an unsupported one, and
enters supported nodes again.

    x -> [mul] -> [add] -> (print) -> [sin]
                    \\---------------> [cos]
          0        0        0          1      level; cos: 0

Two supported nodes on a path through an unsupported one can never share a partition, so the longest such path is a
lower bound on their number; one partition per level reaches it. Levels never decrease along an edge, and increase from
an unsupported node to a supported one, so partitions and unsupported nodes form a line without cycles. Each edge is
visited two or three times.

`fuse_partitions` moves each partition into a submodule, in place. A submodule takes the values its nodes use from
outside, in order of first use, and returns those that others use: one value as it is, several as a tuple that `getitem`
nodes unpack.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, overload, runtime_checkable

import torch
from torch import fx, nn

from wholestep.errors import PartitionError
from wholestep.ir.effects import OrderEdges, order_edges
from wholestep.ir.io.arguments import describe_target
from wholestep.ir.meta import node_meta, set_node_meta
from wholestep.partition.call_order import find_cycle, stable_order
from wholestep.partition.graph_checks import (
    Cuttable,
    error_at,
    graph_of,
    is_body,
    makes_tuple,
    sound_nodes,
    unpacked_from,
)
from wholestep.torch_private.fx_graphs import lazy_graph_module, mark_impure
from wholestep.torch_private.operators import OpOverload

_NOT_COMPUTE: tuple[object, ...] = ("_operator.getitem", torch.ops.aten.view)


@runtime_checkable
class OperatorSupport(Protocol):
    """The interface of torch's `OperatorSupportBase`."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        """True if a backend can run the node."""


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
    """The group of every node. Unsupported nodes have groups of their own, between the partitions; groups can run in
    the order of their numbers. (Placeholders are in the first group, the output is in the last.)"""

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

    The number of partitions is minimal, so no two of them can be merged. `is_supported` is called once for each node
    except placeholders, the output and the bodies of `cond` etc. A `getitem` that unpacks a tuple goes with the
    producer of the tuple, whatever `is_supported` returns for it. The graph is not changed.

    Partitions with fewer than `min_nodes` nodes, not counting views, `getitem` and `non_compute_ops` (targets, or the
    names of methods), are dissolved: their nodes count as unsupported. (torch's default is `min_nodes=2`.)

    With `skip_horizontal_fusion` nodes share a partition only if values, or an order that must be kept, connect them.
    Then the number of partitions is small but not guaranteed to be minimal.
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
    nodes: Sequence[fx.Node], supported: Mapping[fx.Node, bool], before: OrderEdges
) -> tuple[list[list[fx.Node]], UnitGraph]:
    """The nodes of each unit, and the graph of units (without the output)."""
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
    """True if a later use of a value does not extend its lifetime: it is an input, or moves too."""
    return source.op in ("placeholder", "get_attr") or (movable and len(source.users) == 1)


def _separated(node: fx.Node, producer: fx.Node, before: OrderEdges, place: Mapping[fx.Node, int]) -> bool:
    """True if a mode switch lies between a value and an index into it, and the value may be a tensor."""
    return node in before and not makes_tuple(producer) and any(place[e] > place[producer] for e in before[node])


class _Counter:
    """Decides if a partition has enough nodes that compute."""

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
    """Number the groups: at each level the partitions, then the unsupported nodes."""
    place = {node: i for i, node in enumerate(nodes)}
    grouped: dict[int, dict[int, list[fx.Node]]] = {}
    loose: dict[int, list[fx.Node]] = {}
    for unit, own in enumerate(members):
        if units.supported[unit]:
            grouped.setdefault(level[unit], {}).setdefault(group[unit], []).extend(own)
        else:
            calls = [node for node in own if node.op not in ("placeholder", "get_attr")]
            loose.setdefault(level[unit], []).extend(calls)
    assignment: dict[fx.Node, int] = {}
    partitions: list[SupportedPartition] = []
    number, between = 0, loose.get(-1, [])
    for at in range(max((*grouped, *loose), default=-1) + 1):
        large = []
        for found in grouped.get(at, {}).values():
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
    """The assignment with placeholders, constants (with their first user) and the output; in graph order."""
    for node in reversed(nodes):
        if node.op == "output":
            assignment[node] = last
        elif node not in assignment:
            users = [assignment[user] for user in node.users if user in assignment]
            assignment[node] = 0 if node.op == "placeholder" else min(users, default=0)
    return {node: assignment[node] for node in nodes}


@dataclass(frozen=True)
class UnitGraph:
    """Indivisible units (a node with the nodes that unpack it), numbered so that edges go from low to high."""

    supported: Sequence[bool]
    sources: Sequence[Sequence[int]]
    """For each unit, the units that must run before it."""
    movable: Sequence[bool]
    """Units without effects that use only inputs of the graph, or values without other users: they may run later."""


def levels(units: UnitGraph) -> list[int]:
    """The earliest level of each unit; -1 for unsupported units without a supported predecessor."""
    supported = units.supported
    found: list[int] = []
    for unit, sources in enumerate(units.sources):
        level = 0 if supported[unit] else -1
        if supported[unit]:
            for source in sources:
                level = max(level, found[source] + (not supported[source]))
        else:
            for source in sources:
                level = max(level, found[source])
        found.append(level)
    return found


def sink(units: UnitGraph, level: list[int]) -> None:
    """Raise movable units to the level of their first user: a cast of a weight need not wait there for ten levels."""
    limit: list[int | None] = [None] * len(level)
    for unit in range(len(level) - 1, -1, -1):
        latest = limit[unit]
        if units.movable[unit] and latest is not None:
            level[unit] = max(level[unit], latest)
        for source in units.sources[unit]:
            allowed = level[unit] - (units.supported[unit] and not units.supported[source])
            known = limit[source]
            limit[source] = allowed if known is None else min(known, allowed)


def components(units: UnitGraph, level: list[int]) -> list[int]:
    """For each supported unit the lowest unit that it is connected to within its level; -1 for the others.

    A group without users at its own level is raised to the level of the first group that uses it, if possible; this
    changes `level`.
    """
    joined = _Joined(len(level))
    supported = units.supported
    for unit, sources in enumerate(units.sources):
        for source in sources:
            if supported[unit] and supported[source] and level[unit] == level[source]:
                joined.join(source, unit)
    _raise_groups(units, level, joined)
    return [joined.find(unit) if supported[unit] else -1 for unit in range(len(level))]


def _raise_groups(units: UnitGraph, level: list[int], joined: _Joined) -> None:
    users: list[list[int]] = [[] for _ in level]
    for unit, sources in enumerate(units.sources):
        for source in sources:
            users[source].append(unit)
    groups: dict[int, list[int]] = {}
    for unit, supported in enumerate(units.supported):
        if supported:
            groups.setdefault(joined.find(unit), []).append(unit)
    # From the last level backwards: the group that another one joins has its final level by then.
    for root in sorted(groups, key=lambda root: -level[root]):
        members = groups[root]
        inside = set(members)
        outside = [(user, unit) for unit in members for user in users[unit] if user not in inside]
        latest = min((level[user] for user, _ in outside), default=-1)
        joins = [(user, unit) for user, unit in outside if level[user] == latest and units.supported[user]]
        if latest > level[root] and joins:
            for unit in members:
                level[unit] = latest
            for user, unit in joins:
                joined.join(user, unit)


class _Joined:
    """Union-find whose representative is the lowest member."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, unit: int) -> int:
        parent = self._parent
        root = unit
        while parent[root] != root:
            root = parent[root]
        while parent[unit] != root:
            parent[unit], unit = root, parent[unit]
        return root

    def join(self, unit: int, other: int) -> None:
        unit, other = self.find(unit), self.find(other)
        self._parent[max(unit, other)] = min(unit, other)


def fuse_partitions(gm: fx.GraphModule, partitions: SupportedPartitions, prefix: str = "fused_") -> fx.GraphModule:
    """Edit `gm` so that each partition is one `call_module` node, named by `prefix` and a count; returns `gm`.

    Nodes are ordered by their groups, and keep their order within a group.
    """
    taken = next((name for i in range(len(partitions)) if hasattr(gm, name := f"{prefix}{i}")), None)
    if taken is not None:
        raise PartitionError(f"the module has an attribute {taken} already.", fix="choose another prefix.")
    if any(node.graph is not gm.graph for part in partitions for node in part.nodes[:1]):
        raise PartitionError("the partitions belong to another graph.", fix="partition this graph, not a copy of it.")
    _reorder(gm.graph, partitions)
    for count, partition in enumerate(partitions):
        _fuse(gm, partition.nodes, f"{prefix}{count}")
    gm.recompile()
    return gm


def fuse_by_partitions(
    gm: fx.GraphModule,
    partitions: Sequence[Iterable[fx.Node]],
    prefix: str = "fused_",
    always_return_tuple: bool = False,
) -> fx.GraphModule:
    """Edit `gm` so that each given set of nodes is one `call_module` node, named `prefix` and its index; returns `gm`.

    Like torch's function of this name. Raises PartitionError if no order of the calls respects data flow and the order
    of writes, random ops and effects.
    """
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    sets = [sorted(dict.fromkeys(partition), key=lambda node: place.get(node, -1)) for partition in partitions]
    unit_of: dict[fx.Node, int] = {}
    for number, members in enumerate(sets):
        for node in members:
            if node not in place:
                raise PartitionError(f"{node.name} is not a node of this graph.", fix="partition this graph.")
            if node in unit_of or node.op in ("placeholder", "output"):
                raise PartitionError(
                    f"{node.name} cannot be in partition {number}.",
                    fix="inputs and outputs belong to no partition, every other node to at most one.",
                )
            unit_of[node] = number
    units = [members for members in sets if members]
    units += [[node] for node in nodes if node not in unit_of and node.op not in ("placeholder", "output")]
    output = gm.graph.output_node()
    for unit in _in_order(units, order_edges(nodes), place):
        for node in unit:
            output.prepend(node)
    for number, members in enumerate(sets):
        if members:
            _fuse(gm, members, f"{prefix}{number}", always_return_tuple)
    gm.recompile()
    return gm


def _in_order(units: Sequence[list[fx.Node]], before: OrderEdges, place: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """The units in topological order, by the position of their first nodes."""
    units = sorted(units, key=lambda unit: place[unit[0]])
    of = {node: i for i, unit in enumerate(units) for node in unit}
    after: list[set[int]] = [set() for _ in units]
    for node, unit in of.items():
        for source in (*node.all_input_nodes, *before.get(node, ())):
            other = of.get(source, unit)
            if other != unit:
                after[other].add(unit)
    following = [sorted(each) for each in after]
    order = stable_order(following)
    if len(order) != len(units):
        cycle = [units[i] for i in find_cycle(following, order)]
        nodes = next((unit for unit in cycle if len(unit) > 1), cycle[0])
        raise PartitionError(
            f"Invalid partition, found dependency cycles: {', '.join(node.name for node in nodes[:5])} need each other "
            "through nodes outside their partition.",
            fix="use partition_by_support, whose partitions have no cycles.",
        )
    return [units[i] for i in order]


def _reorder(graph: fx.Graph, partitions: SupportedPartitions) -> None:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    output = graph.output_node()
    for node in sorted(nodes, key=partitions):  # stable: equal groups keep their order
        output.prepend(node)


def _fuse(gm: fx.GraphModule, nodes: Sequence[fx.Node], name: str, always_tuple: bool = False) -> None:
    inside = set(nodes)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph, inputs = _subgraph(nodes, outputs, always_tuple)
    module = lazy_graph_module(gm, graph, name)
    module.train(gm.training)
    if not outputs:
        mark_impure(module)
    gm.add_submodule(name, module)
    with gm.graph.inserting_after(nodes[-1]):
        call = gm.graph.create_node("call_module", name, tuple(inputs), {}, name=name)
    set_node_meta(call, node_meta(nodes[-1]))
    if len(outputs) == 1 and not always_tuple:
        call.meta = dict(outputs[0].meta)
        outputs[0].replace_all_uses_with(call)
    else:
        if all("val" in node.meta for node in outputs):
            call.meta["val"] = tuple(node.meta["val"] for node in outputs)
        after = call
        for i, node in enumerate(outputs):
            with gm.graph.inserting_after(after):
                after = gm.graph.call_function(operator.getitem, (call, i))
            after.meta = dict(node.meta)
            node.replace_all_uses_with(after, delete_user_cb=lambda user: user not in inside)
    bodies = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if is_body(used))
    for node in reversed(nodes):
        gm.graph.erase_node(node)
    for body in bodies:
        if not body.users:
            gm.graph.erase_node(body)


def _subgraph(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], always_tuple: bool
) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of copies, and the outside nodes that its placeholders stand for. Bodies of `cond` etc. are read inside
    by get_attr, because they cannot be passed as values."""
    inside = set(nodes)
    used = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside))
    bodies = [node for node in used if is_body(node)]
    inputs = [node for node in used if node not in bodies]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name, type_expr=node.type)
        copies[node].meta = dict(node.meta)
    for node in (*bodies, *nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = tuple(copies[node] for node in outputs)
    graph.output(results[0] if len(results) == 1 and not always_tuple else results)
    return graph, inputs
