"""Regions: groups of nodes that become one compiled call, with what goes in and what comes out.

Views are nobody's property: a view of a value from elsewhere is made again where it is used, so that only whole tensors
cross the edge of a region, with the strides their nodes say. Sizes too are asked of tensors inside of the region.
Write-backs join the region that computes the new value if nothing later reads the old one: Inductor writes in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from wholestep.ir.comm_block import comm_block
from wholestep.ir.effects import is_collective, is_communication, may_write, shared_inputs
from wholestep.ir.graphs import epilogue
from wholestep.ir.slices import postorder, reachable
from wholestep.lower.exact import why_not_exact
from wholestep.lower.groups import Group, form_groups
from wholestep.lower.predicates import (
    NodePredicate,
    SubgraphPredicate,
    accepts_node,
    accepts_subgraph,
    any_node,
    any_subgraph,
)
from wholestep.lower.sizes import missing_places, symbol_places
from wholestep.lower.support import (
    is_changing,
    is_number,
    is_on_gpu,
    is_size,
    is_tiny,
    operators_of,
    touches_cpu,
    why_not,
)
from wholestep.torch_private.operators import may_copy, shares_storage

MIN_ATEN_OPS = 10


@dataclass(eq=False)
class Region:
    """Nodes that become one compiled call."""

    number: int
    nodes: list[fx.Node]
    """In order; write-backs at the end."""
    inputs: list[fx.Node] = field(default_factory=list)
    """Tensors from outside."""
    numbers: list[fx.Node] = field(default_factory=list)
    """Python numbers from outside."""
    borrowed: list[fx.Node] = field(default_factory=list)
    """Views and sizes of other places that are made again inside."""
    outputs: list[fx.Node] = field(default_factory=list)

    @property
    def operators(self) -> int:
        return sum(map(operators_of, self.nodes))


@dataclass(eq=False)
class Plan:
    """What becomes of a graph."""

    groups: list[Group | Region]
    """In the order in which they run."""
    reasons: dict[fx.Node, str]
    """Why nodes stay outside; without an entry: in a region."""
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
) -> Plan:
    """Which nodes are compiled together, in which order everything runs, and why the rest stays outside.

    `may_alias`: two inputs may be given the same memory, so that no write moves before a read of any other input.
    `exact`: only operators whose compiled form equals eager to the last bit.
    """
    reasons = _reasons(graph, node_predicate, exact)
    write_backs = epilogue(graph)
    groups: list[Group | Region] = []
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
    plan = Plan(groups, {node: reason for node, reason in reasons.items() if reason}, [])
    plan.tail = _join_write_backs(graph, plan, write_backs, may_alias)
    _find_edges(graph, plan)
    places = symbol_places(graph)
    for region in plan.regions if places else ():
        region.inputs += missing_places(region.inputs, [*region.borrowed, *region.nodes], places)
    return plan


def _reasons(graph: fx.Graph, node_predicate: NodePredicate, exact: bool) -> dict[fx.Node, str]:
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            found[node] = why_not(node) or (why_not_exact(node) if exact else "")
    gpu = any(is_on_gpu(node) for node in graph.nodes)
    feeding = _feeding_numbers(found)
    for node, reason in found.items():
        if isinstance(source := _whole_of(node), fx.Node) and source in found:
            found[node] = found[source]  # elements stay with what they are elements of
            continue
        if not reason and node in feeding:
            reason = "single numbers outside are computed from it"
        if not reason and gpu and touches_cpu(node):
            reason = "works on the CPU, in a step on the GPU"
        if not reason and _is_used_whole(node):
            reason = "its results are used as one object"
        if not reason and not accepts_node(node_predicate, node):
            reason = "refused by node_predicate"
        found[node] = reason
    return found


def _whole_of(node: fx.Node) -> object:
    """What a node takes an element out of; None if it does not."""
    return node.args[0] if node.target is operator.getitem else None


def _feeding_numbers(reasons: dict[fx.Node, str]) -> set[fx.Node]:
    """Single-element tensors that numbers and tiny nodes outside are computed from, as long as they are as small."""
    found: set[fx.Node] = set()
    for node in reversed(reasons):
        if node in found or is_changing(node) or (reasons[node] and is_tiny(node)):
            found.update(s for s in node.all_input_nodes if _is_single(s))
    return found


def _is_single(node: fx.Node) -> bool:
    val = node.meta.get("val")
    computed = node.op == "call_function" and node.target is not operator.getitem
    return computed and isinstance(val, Tensor) and val.dim() == 0


def _is_used_whole(node: fx.Node) -> bool:
    """Whether a list of results goes somewhere as a list."""
    val = node.meta.get("val")
    return isinstance(val, list | tuple) and any(user.target is not operator.getitem for user in node.users)


def _why_not_group(group: Group, predicate: SubgraphPredicate, min_aten_ops: int) -> str:
    count = sum(map(operators_of, group.nodes))
    if count < min_aten_ops:
        return f"{count} operators between others that stay outside; a region has at least {min_aten_ops}"
    if not accepts_subgraph(predicate, group.nodes):
        return "refused by subgraph_predicate"
    return ""


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at one tensor in another form, or at several parts of it."""
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
    if any(map(is_changing, node.all_input_nodes)):  # `bank[k:k + 3]`: Inductor would take k for a constant
        return False
    return not may_copy(node.target) or shares_storage(node.meta.get("val"), tensors[0].meta.get("val"))


def is_free(node: fx.Node) -> bool:
    """Whether a node is made again wherever it is used: views and sizes."""
    return (is_size(node) and node.op == "call_function") or is_view(node)


def _join_write_backs(graph: fx.Graph, plan: Plan, write_backs: list[fx.Node], may_alias: bool) -> list[fx.Node]:
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
                continue  # the user's own tensor, with what it holds in the end
            for root in roots[source]:
                last[root] = max(last.get(root, -1), at)
        shared = [source for source in shared_inputs(node) if source in roots] if node.op == "call_function" else []
        if shared and node not in write_backs:
            roots[node] = set().union(*(roots[source] for source in shared))
    return last


def _find_edges(graph: fx.Graph, plan: Plan) -> None:
    region_of = {node: region for region in plan.regions for node in region.nodes}
    needed: dict[fx.Node, None] = {}
    for group in plan.groups:
        if isinstance(group, Region):
            _find_inputs(group)
            needed.update(dict.fromkeys(group.inputs))
            needed.update(dict.fromkeys(group.numbers))
        else:
            _need_from(group.nodes, needed)
    _need_from([*plan.tail, next(iter(reversed(graph.nodes)))], needed)
    for node in needed:
        if node in region_of:
            region_of[node].outputs.append(node)


def _need_from(nodes: Iterable[fx.Node], needed: dict[fx.Node, None]) -> None:
    """What nodes outside of regions read, through views."""
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
    region.numbers = [node for node in found if is_changing(node)]


def _borrow(source: fx.Node, inside: set[fx.Node], found: dict[fx.Node, None], region: Region) -> None:
    """Make a view or size from elsewhere inside of the region; anything else is an input."""
    stack: list[tuple[fx.Node, bool]] = [(source, False)]
    while stack:
        node, ready = stack.pop()
        if node in inside or node in found:
            continue
        if not is_free(node):
            found[node] = None
        elif ready:
            inside.add(node)
            region.borrowed.append(node)
        else:
            stack.append((node, True))
            stack += [(each, False) for each in node.all_input_nodes]


def order_of(region: Region) -> Sequence[fx.Node]:
    """The nodes of a region in an order in which they can run."""
    return [*region.borrowed, *region.nodes] if not _mixed(region) else _sorted(region)


def _mixed(region: Region) -> bool:
    own = set(region.nodes)
    return any(source in own for node in region.borrowed for source in node.all_input_nodes)


def _sorted(region: Region) -> list[fx.Node]:
    borrowed = set(region.borrowed)
    return postorder(region.nodes, lambda node: (source for source in node.all_input_nodes if source in borrowed))
