"""Marks on nodes that run in the next iteration, and the moves that become of them.

a graph module     passes mark nodes (`NodeMeta.move`) and note where they go; the graph computes what it did
a StepGraph        the runtime makes the graphs of first and other iterations from the marks
IterGraphModule    makes the moves of a marked graph when it is given one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.iter.moves import first_readers, move_of
from wholestep.ir.meta import node_meta, update_node_meta

DESTINATIONS = "wholestep_destinations"
"""In the `meta` of a graph module: number of a move to the name of the node that it runs before."""
LATE = "wholestep_late_outputs"
"""In the `meta` of a graph module: places in the output that may be filled by the next iteration (gradients)."""
CREATES = "wholestep_creates_state"
"""In the `meta` of a graph module: whether its step is one that creates the state of its optimizer."""


def gm_meta(gm: Any) -> dict[str, Any]:
    """Where a graph module, or the main one of an IterGraphModule, keeps what passes know."""
    meta: dict[str, Any] = getattr(gm, "main_gm", gm).meta
    return meta


def late_outputs(gm: Any) -> tuple[int, ...]:
    """Places in the output of a graph that may be filled by the next iteration."""
    found: tuple[int, ...] = gm_meta(gm).get(LATE, ())
    return found


def marked_moves(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The nodes that are marked to run in the next iteration, by the number of their move."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        number = node_meta(node).move
        if number:
            found.setdefault(number, []).append(node)
    return found


def deadline(
    group: Iterable[fx.Node], readers: dict[fx.Node, fx.Node], place: dict[fx.Node, int], graph: fx.Graph
) -> fx.Node:
    """The first node that reads what a group writes; the end of the graph if there is none."""
    found = [readers[state] for state in move_of(group, set()).state if state in readers]
    return min(found, key=place.__getitem__) if found else next(iter(reversed(graph.nodes)))


def requested_moves(
    graph: fx.Graph, marked: Mapping[int, list[fx.Node]], names: Mapping[int, str]
) -> list[tuple[list[fx.Node], fx.Node]]:
    """Where each move goes: as it was asked for, but not after the first use of what it writes."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    by_name = {node.name: node for node in graph.nodes}
    readers = first_readers(graph, {node: None for nodes in marked.values() for node in nodes})
    found = []
    for number, nodes in marked.items():
        target = deadline(nodes, readers, place, graph)
        asked = by_name.get(names.get(number, ""), target)
        found.append((nodes, asked if place[asked] < place[target] and asked.op != "placeholder" else target))
    return found


def make_marked_moves(graph: IterGraph, meta: Mapping[str, Any]) -> None:
    """Make the moves that are marked in a graph, whose module has that metadata; the marks are gone then."""
    marked = marked_moves(graph)
    if not marked:
        return
    graph.move_all_to_next_iter(requested_moves(graph, marked, meta.get(DESTINATIONS, {})))
    for nodes in marked.values():
        for node in nodes:
            update_node_meta(node, move=0)
