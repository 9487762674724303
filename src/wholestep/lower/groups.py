"""In which order the nodes of a graph run, and in which groups: compiled or operator by operator.

Communication stays where the passes put it and cuts the graph into stretches. Within a stretch nodes may change places:
first everything ready that stays outside, then everything ready that Inductor can have, and so on in turns. Taking all
that is ready each time gives the fewest groups that data flow allows, and no collective waits for work it had not
waited for before.

    before   a  b*  c  all_reduce  d  e*  f  wait  g     (* stays outside)
    after    [a c] b all_reduce [d f] e wait [g]         with b after a only if it needs it
"""

from __future__ import annotations

import heapq
import itertools
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from wholestep.ir.effects import communicates, is_communication, is_custom_operator, may_draw, may_write, writes
from wholestep.ir.meta import node_meta
from wholestep.ir.mutable import call_on_copies
from wholestep.ir.rng import SIDE_EFFECTS
from wholestep.torch_private.operators import OpOverload


@dataclass(eq=False)
class Group:
    """Nodes that run after each other."""

    nodes: list[fx.Node]
    compiled: bool
    part: int = 0
    """Groups of different parts stay apart."""


def form_groups(graph: fx.Graph, reasons: dict[fx.Node, str], write_backs: set[fx.Node]) -> list[Group]:
    """All nodes but inputs, output and write-backs, in the order in which they will run."""
    body = [
        n for n in _parts_behind_their_source(graph) if n.op not in ("placeholder", "output") and n not in write_backs
    ]
    if any(n.op != "call_function" and n.op != "get_attr" for n in body) or any(
        may_write(n.target) and writes(n) for n in body
    ):
        return _runs(body, reasons)
    groups: list[Group] = []
    stretch: list[fx.Node] = []
    current = 0
    for node, part in zip(body, _parts(body), strict=True):
        if part != current:
            groups += _in_turns(stretch, reasons, current)
            stretch, current = [], part
        if is_communication(node.target) or communicates(node):
            groups += _in_turns(stretch, reasons, part)
            groups.append(Group([node], compiled=False, part=part))
            stretch = []
        else:
            stretch.append(node)
    return _joined(groups + _in_turns(stretch, reasons, current))


def _parts(body: list[fx.Node]) -> list[int]:
    """The number of the part that each node is in."""
    return list(itertools.accumulate(int(node_meta(node).begins) for node in body))


def _parts_behind_their_source(graph: fx.Graph) -> list[fx.Node]:
    """The nodes in order, with elements of a result right behind it."""
    parts: dict[fx.Node, list[fx.Node]] = {}
    order: list[fx.Node] = []
    for node in graph.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.op == "call_function" and not isinstance(node.args[1], fx.Node):
            parts.setdefault(source, []).append(node)
        else:
            order.append(node)
    if not parts:
        return order
    found: list[fx.Node] = []
    for node in order:
        stack = [node]
        while stack:
            each = stack.pop()
            found.append(each)
            stack += reversed(parts.get(each, ()))
    return found


def _runs(body: list[fx.Node], reasons: dict[fx.Node, str]) -> list[Group]:
    """Where nodes write into tensors nothing changes places."""
    parts = _parts(body)
    return _joined([Group([node], not reasons[node], part) for node, part in zip(body, parts, strict=True)])


def _joined(groups: list[Group]) -> list[Group]:
    found: list[Group] = []
    for group in groups:
        if found and (found[-1].compiled, found[-1].part) == (group.compiled, group.part):
            found[-1].nodes += group.nodes
        elif group.nodes:
            found.append(Group(list(group.nodes), group.compiled, group.part))
    return found


def _in_turns(stretch: list[fx.Node], reasons: dict[fx.Node, str], part: int) -> list[Group]:
    place = {node: i for i, node in enumerate(stretch)}
    waits_for, followers = _edges(stretch, place)
    ready: dict[bool, list[int]] = {True: [], False: []}
    for i, node in enumerate(stretch):
        if not waits_for[i]:
            heapq.heappush(ready[not reasons[node]], i)
    groups: list[Group] = []
    compiled = False
    while ready[True] or ready[False]:
        group = Group([], compiled, part)
        while ready[compiled]:
            i = heapq.heappop(ready[compiled])
            group.nodes.append(stretch[i])
            for j in followers[i]:
                waits_for[j] -= 1
                if not waits_for[j]:
                    heapq.heappush(ready[not reasons[stretch[j]]], j)
        if group.nodes:
            groups.append(group)
        compiled = not compiled
    return groups


def _edges(stretch: list[fx.Node], place: dict[fx.Node, int]) -> tuple[list[int], list[list[int]]]:
    """How many nodes each one waits for, and who waits for it: data, random draws and effects in their order."""
    waits_for = [0] * len(stretch)
    followers: list[list[int]] = [[] for _ in stretch]
    last: int | None = None
    for i, node in enumerate(stretch):
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
    """Whether a node must keep its place among others of its kind: it draws random numbers or has an effect."""
    target: Any = node.target
    if target in SIDE_EFFECTS:
        return True
    if target is call_on_copies:
        target = node.args[0]
        # Of operators of other libraries nothing is known.
        return may_draw(target) or target.namespace != "aten"
    if isinstance(target, OpOverload):
        return may_draw(target) or is_custom_operator(target)
    return node.op == "call_function" and node.is_impure()
