"""Plan regions: groups of nodes that become one compiled call, with their inputs and outputs.

Collectives stay where the passes put them and cut the graph into segments. Within a segment nodes may be reordered:
first all ready nodes that stay outside of regions, then all ready nodes that Inductor can compile, and so on in turns.
Taking all that is ready each time gives the fewest groups that data flow allows, and no collective waits for work that
it had not waited for before.

    before   a  b*  c  all_reduce  d  e*  f  wait  g     (* stays outside)
    after    [a c] b all_reduce [d f] e wait [g]         with b after a only if it needs it

Views and sizes belong to no region: a view of a value from outside is recomputed where it is used, so that only whole
tensors cross the boundary of a region, with the strides of their metadata. Write-backs join the region that computes
the new value if nothing later reads the old one: Inductor writes in place.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from wholestep.ir.collectives import comm_block
from wholestep.ir.effects import (
    communicates,
    is_collective,
    is_communication,
    is_custom_operator,
    may_draw,
    may_write,
    shared_inputs,
    writes,
)
from wholestep.ir.graph_functions import CHECKS, SIDE_EFFECTS, call_on_copies
from wholestep.ir.graph_walks import epilogue, postorder, reachable
from wholestep.ir.meta import node_meta
from wholestep.lower.scalar_inputs import missing_sources, symbol_sources
from wholestep.lower.supported_nodes import (
    NodePredicate,
    SubgraphPredicate,
    accepts_node,
    accepts_subgraph,
    any_node,
    any_subgraph,
    is_changing,
    is_number,
    is_on_gpu,
    is_size,
    is_tiny,
    operators_of,
    touches_cpu,
    why_not,
    why_not_exact,
)
from wholestep.torch_private.operators import OpOverload, may_copy, shares_storage

MIN_ATEN_OPS = 10


@dataclass(eq=False)
class Region:
    """Nodes that become one compiled call."""

    number: int
    nodes: list[fx.Node]
    """In order; write-backs at the end."""
    inputs: list[fx.Node] = field(default_factory=list)
    """Tensors from outside."""
    scalars: list[fx.Node] = field(default_factory=list)
    """Scalar inputs: Python scalars from outside."""
    borrowed: list[fx.Node] = field(default_factory=list)
    """Views and sizes from outside that are recomputed inside."""
    outputs: list[fx.Node] = field(default_factory=list)

    @property
    def operators(self) -> int:
        return sum(map(operators_of, self.nodes))


@dataclass(eq=False)
class RegionPlan:
    """Which nodes of a graph are compiled together, and the order of execution."""

    groups: list[NodeGroup | Region]
    """In the order of execution."""
    reasons: dict[fx.Node, str]
    """Why nodes stay outside; nodes without an entry are in a region."""
    tail: list[fx.Node]
    """Write-backs that stay at the end."""

    @property
    def regions(self) -> list[Region]:
        return [group for group in self.groups if isinstance(group, Region)]


def plan_regions(
    graph: fx.Graph,
    node_predicate: NodePredicate = any_node,
    subgraph_predicate: SubgraphPredicate = any_subgraph,
    min_aten_ops: int = MIN_ATEN_OPS,
    *,
    may_alias: bool = True,
    exact: bool = False,
) -> RegionPlan:
    """Which nodes are compiled together, the order of execution, and why the rest stays outside.

    `may_alias`: two inputs may share memory, so that no write moves before a read of any other input. `exact`: only
    operators whose compiled form is bitwise equal to eager.
    """
    reasons = _reasons(graph, node_predicate, exact)
    write_backs = epilogue(graph)
    groups: list[NodeGroup | Region] = []
    count = 0
    for group in form_groups(graph, reasons, set(write_backs)):
        refused = _why_not_group(group, subgraph_predicate, min_aten_ops) if group.compiled else ""
        if group.compiled and not refused:
            groups.append(Region(count, group.nodes))
            count += 1
            continue
        for node in group.nodes:
            reasons[node] = reasons[node] or refused
        groups.append(group)
    plan = RegionPlan(groups, {node: reason for node, reason in reasons.items() if reason}, [])
    plan.tail = _join_write_backs(graph, plan, write_backs, may_alias)
    _find_edges(graph, plan)
    sources = symbol_sources(graph)
    for region in plan.regions if sources else ():
        region.inputs += missing_sources(region.inputs, [*region.borrowed, *region.nodes], sources)
    return plan


def _reasons(graph: fx.Graph, node_predicate: NodePredicate, exact: bool) -> dict[fx.Node, str]:
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            found[node] = why_not(node) or (why_not_exact(node) if exact else "")
    gpu = any(is_on_gpu(node) for node in graph.nodes)
    feeding = _sources_of_scalars(found)
    for node, reason in found.items():
        if isinstance(source := _tuple_of(node), fx.Node) and source in found:
            found[node] = found[source]  # elements stay with the tuple that has them
            continue
        if not reason and node in feeding:
            reason = "scalars outside of regions are computed from it"
        if not reason and gpu and touches_cpu(node):
            reason = "runs on the CPU, in a step on the GPU"
        if not reason and _is_used_as_tuple(node):
            reason = "its results are used as one tuple"
        if not reason and not accepts_node(node_predicate, node):
            reason = "refused by node_predicate"
        found[node] = reason
    return found


def _tuple_of(node: fx.Node) -> object:
    """The tuple that a node takes an element of; None if it does not."""
    return node.args[0] if node.target is operator.getitem else None


def _sources_of_scalars(reasons: dict[fx.Node, str]) -> set[fx.Node]:
    """0-dim tensors that scalars and 0-dim nodes outside of regions are computed from, transitively."""
    found: set[fx.Node] = set()
    for node in reversed(reasons):
        if node in found or is_changing(node) or (reasons[node] and is_tiny(node)):
            found.update(s for s in node.all_input_nodes if _is_single(s))
    return found


def _is_single(node: fx.Node) -> bool:
    val = node.meta.get("val")
    computed = node.op == "call_function" and node.target is not operator.getitem
    return computed and isinstance(val, Tensor) and val.dim() == 0


def _is_used_as_tuple(node: fx.Node) -> bool:
    """True if a tuple of results is used as a tuple."""
    val = node.meta.get("val")
    return isinstance(val, list | tuple) and any(user.target is not operator.getitem for user in node.users)


def _why_not_group(group: NodeGroup, predicate: SubgraphPredicate, min_aten_ops: int) -> str:
    count = sum(map(operators_of, group.nodes))
    if count < min_aten_ops:
        return f"{count} operators between others that stay outside; a region has at least {min_aten_ops}"
    if not accepts_subgraph(predicate, group.nodes):
        return "refused by subgraph_predicate"
    return ""


def is_view(node: fx.Node) -> bool:
    """True if a node is a view of one tensor, or several views of it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target is not operator.getitem and is_view(source)
    if is_communication(node.target) or may_write(node.target):
        return False
    tensors = [source for source in node.all_input_nodes if not is_number(source)]
    if len(tensors) != 1 or shared_inputs(node) != tensors:
        return False
    if any(map(is_changing, node.all_input_nodes)):  # `bank[k:k + 3]`: Inductor would make k a constant
        return False
    return not may_copy(node.target) or shares_storage(node.meta.get("val"), tensors[0].meta.get("val"))


def is_free(node: fx.Node) -> bool:
    """True if a node is recomputed wherever it is used: views and sizes."""
    return (is_size(node) and node.op == "call_function") or is_view(node)


def _join_write_backs(graph: fx.Graph, plan: RegionPlan, write_backs: list[fx.Node], may_alias: bool) -> list[fx.Node]:
    """Put write-backs into the regions that compute their values; returns those that stay."""
    position: dict[fx.Node, int] = {}
    region_of: dict[fx.Node, Region] = {}
    for i, group in enumerate(plan.groups):
        for node in group.nodes:
            position[node] = i
            if isinstance(group, Region):
                region_of[node] = group
    last_read = _last_reads(graph, position, set(write_backs))
    of_any = max(last_read.values(), default=-1)
    written = -1
    tail: list[fx.Node] = []
    for node in write_backs:
        target, value = node.args[0], node.args[1]
        assert isinstance(target, fx.Node)
        region = region_of.get(value) if isinstance(value, fx.Node) else None
        read = max(of_any, written) if may_alias else last_read.get(target, -1)
        if region is None or (may_alias and tail) or read > position[region.nodes[0]]:
            tail.append(node)
        else:
            written = position[region.nodes[0]]
            region.nodes.append(node)
    return tail


def _last_reads(graph: fx.Graph, position: dict[fx.Node, int], write_backs: set[fx.Node]) -> dict[fx.Node, int]:
    """For each input the last group that reads it or something that shares its memory."""
    roots: dict[fx.Node, set[fx.Node]] = {n: {n} for n in graph.nodes if n.op == "placeholder"}
    last: dict[fx.Node, int] = {}
    end = len(position) + 1
    checks = [position[node] for node in graph.nodes if node.target in CHECKS]
    if checks:  # what raises is to leave all inputs as they were
        last.update(dict.fromkeys(roots, max(checks)))
    for node in graph.nodes:
        sources = [source for source in node.all_input_nodes if source in roots]
        if not sources:
            continue
        if node in write_backs:
            sources = [source for source in sources if source is node.args[1]]
        at = end if node.op == "output" or node in write_backs else position[node]
        if is_collective(node.target):
            at = max((position[wait] for wait in comm_block(node).waits), default=end)
        for source in sources:
            if node.op == "output" and source.op == "placeholder":
                continue  # the input itself is returned, with its final contents
            for root in roots[source]:
                last[root] = max(last.get(root, -1), at)
        shared = [source for source in shared_inputs(node) if source in roots] if node.op == "call_function" else []
        if shared and node not in write_backs:
            roots[node] = set().union(*(roots[source] for source in shared))
    return last


def _find_edges(graph: fx.Graph, plan: RegionPlan) -> None:
    region_of = {node: region for region in plan.regions for node in region.nodes}
    needed: dict[fx.Node, None] = {}
    for group in plan.groups:
        if isinstance(group, Region):
            _find_inputs(group)
            needed.update(dict.fromkeys(group.inputs))
            needed.update(dict.fromkeys(group.scalars))
        else:
            _need_from(group.nodes, needed)
    _need_from([*plan.tail, next(iter(reversed(graph.nodes)))], needed)
    for node in needed:
        if node in region_of:
            region_of[node].outputs.append(node)


def _need_from(nodes: Iterable[fx.Node], needed: dict[fx.Node, None]) -> None:
    """Collect what nodes outside of regions read, through views."""
    read = (source for node in nodes for source in node.all_input_nodes)
    found = reachable(read, lambda node: node.all_input_nodes if is_free(node) else ())
    needed.update(dict.fromkeys(node for node in found if not is_free(node)))


def _find_inputs(region: Region) -> None:
    inside = set(region.nodes)
    found: dict[fx.Node, None] = {}
    for node in region.nodes:
        for source in node.all_input_nodes:
            if source not in inside:
                _borrow(source, inside, found, region)
    region.inputs = [node for node in found if not is_changing(node)]
    region.scalars = [node for node in found if is_changing(node)]


def _borrow(source: fx.Node, inside: set[fx.Node], found: dict[fx.Node, None], region: Region) -> None:
    """Recompute a view or size from outside in the region; anything else is an input."""

    def needed(node: fx.Node) -> list[fx.Node]:
        return [] if node in inside or node in found or not is_free(node) else node.all_input_nodes

    for node in postorder([source], needed):
        if node in inside or node in found:
            continue
        if is_free(node):
            inside.add(node)
            region.borrowed.append(node)
        else:
            found[node] = None


def order_of(region: Region) -> Sequence[fx.Node]:
    """The nodes of a region in topological order."""
    return [*region.borrowed, *region.nodes] if not _is_interleaved(region) else _sorted(region)


def _is_interleaved(region: Region) -> bool:
    own = set(region.nodes)
    return any(source in own for node in region.borrowed for source in node.all_input_nodes)


def _sorted(region: Region) -> list[fx.Node]:
    borrowed = set(region.borrowed)
    return postorder(region.nodes, lambda node: (source for source in node.all_input_nodes if source in borrowed))


@dataclass(eq=False)
class NodeGroup:
    """Nodes that run one after the other."""

    nodes: list[fx.Node]
    compiled: bool
    part: int = 0
    """Groups of different parts stay apart."""


def form_groups(graph: fx.Graph, reasons: dict[fx.Node, str], write_backs: set[fx.Node]) -> list[NodeGroup]:
    """All nodes except inputs, output and write-backs, in the order of execution."""
    order = elements_after_their_tuple(graph.nodes)
    body = [n for n in order if n.op not in ("placeholder", "output") and n not in write_backs]
    if any(n.op != "call_function" and n.op != "get_attr" for n in body) or any(writes(n) for n in body):
        return _runs(body, reasons)
    groups: list[NodeGroup] = []
    segment: list[fx.Node] = []
    current = 0
    for node, part in zip(body, _parts(body), strict=True):
        if part != current:
            groups += _in_turns(segment, reasons, current)
            segment, current = [], part
        if is_communication(node.target) or communicates(node):
            groups += _in_turns(segment, reasons, part)
            groups.append(NodeGroup([node], compiled=False, part=part))
            segment = []
        else:
            segment.append(node)
    return _joined(groups + _in_turns(segment, reasons, current))


def _parts(body: list[fx.Node]) -> list[int]:
    """The number of the part that each node is in."""
    return list(itertools.accumulate(int(node_meta(node).begins) for node in body))


def elements_after_their_tuple(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes in order, with the elements of a tuple right after it."""
    parts: dict[fx.Node, list[fx.Node]] = {}
    order: list[fx.Node] = []
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.op == "call_function" and not isinstance(node.args[1], fx.Node):
            parts.setdefault(source, []).append(node)
        else:
            order.append(node)
    if not parts:
        return order
    found: list[fx.Node] = []
    for node in order:
        found += reachable([node], lambda each: reversed(parts.get(each, ())))
    return found


def _runs(body: list[fx.Node], reasons: dict[fx.Node, str]) -> list[NodeGroup]:
    """Groups of a graph that writes into tensors: nothing is reordered."""
    parts = _parts(body)
    return _joined([NodeGroup([node], not reasons[node], part) for node, part in zip(body, parts, strict=True)])


def _joined(groups: list[NodeGroup]) -> list[NodeGroup]:
    found: list[NodeGroup] = []
    for group in groups:
        if found and (found[-1].compiled, found[-1].part) == (group.compiled, group.part):
            found[-1].nodes += group.nodes
        elif group.nodes:
            found.append(NodeGroup(list(group.nodes), group.compiled, group.part))
    return found


def _in_turns(segment: list[fx.Node], reasons: dict[fx.Node, str], part: int) -> list[NodeGroup]:
    place = {node: i for i, node in enumerate(segment)}
    waits_for, followers = _edges(segment, place)
    ready: dict[bool, list[int]] = {True: [], False: []}
    for i, node in enumerate(segment):
        if not waits_for[i]:
            heapq.heappush(ready[not reasons[node]], i)
    groups: list[NodeGroup] = []
    compiled = False
    while ready[True] or ready[False]:
        group = NodeGroup([], compiled, part)
        while ready[compiled]:
            i = heapq.heappop(ready[compiled])
            group.nodes.append(segment[i])
            for j in followers[i]:
                waits_for[j] -= 1
                if not waits_for[j]:
                    heapq.heappush(ready[not reasons[segment[j]]], j)
        if group.nodes:
            groups.append(group)
        compiled = not compiled
    return groups


def _edges(segment: list[fx.Node], place: dict[fx.Node, int]) -> tuple[list[int], list[list[int]]]:
    """How many nodes each node waits for, and which wait for it: data flow, and random ops and side effects in
    order."""
    waits_for = [0] * len(segment)
    followers: list[list[int]] = [[] for _ in segment]
    last: int | None = None
    for i, node in enumerate(segment):
        sources = {place[source] for source in node.all_input_nodes if source in place}
        if is_ordered(node):
            if last is not None:
                sources.add(last)
            last = i
        waits_for[i] = len(sources)
        for source in sources:
            followers[source].append(i)
    return waits_for, followers


def is_ordered(node: fx.Node) -> bool:
    """True if a node must keep its order among others of its kind: a random op, or one with a side effect."""
    target: Any = node.target
    if target in SIDE_EFFECTS:
        return True
    if target is call_on_copies:
        target = node.args[0]
        # Nothing is known of operators of other libraries.
        return may_draw(target) or target.namespace != "aten"
    if isinstance(target, OpOverload):
        return may_draw(target) or is_custom_operator(target)
    return node.op == "call_function" and node.is_impure()
