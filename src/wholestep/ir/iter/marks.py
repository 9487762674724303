"""Marks on nodes that run in the next iteration, and the moves that become of them.

a graph module     passes mark nodes (`NodeMeta.move`) and note where they go; the graph computes what it did
a StepGraph        the runtime makes the graphs of first and other iterations from the marks
IterGraphModule    makes the moves of a marked graph when it is given one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.ir.effects import writes
from wholestep.ir.iter.derived import single_graph
from wholestep.ir.iter.graph import IterGraph, find_output, kept
from wholestep.ir.iter.moves import first_readers, move_of
from wholestep.ir.meta import node_meta, update_node_meta

_COPY = torch.ops.aten.copy_.default

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


def marked_graph(main: IterGraph) -> tuple[fx.Graph, dict[int, str]]:
    """The graph as if nothing had moved, each moved node with its mark; and where each move goes (`DESTINATIONS`).

    What `make_marked_moves` undoes. Write-backs come last, as a StepGraph has them, where nothing else writes.
    """
    graph = single_graph(main)
    for node in list(graph.nodes):
        if node.target is kept:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    by_name = {node.name: node for node in graph.nodes}
    moved = {node for move in main.moves for node in move.nodes}
    destinations: dict[int, str] = {}
    for number, move in enumerate(main.moves, 1):
        for node in move.nodes:
            update_node_meta(by_name[node.name], move=number)
        after = move.nodes[-1].next
        while after in moved or after.target is kept:
            after = after.next
        destinations[number] = after.name
    written = [node for node in graph.nodes if writes(node)]
    if all(_is_write_back(node) for node in written):
        output = find_output(graph)
        for node in written:
            output.prepend(node)
    return graph, destinations


def _is_write_back(node: fx.Node) -> bool:
    target = node.args[0] if node.target is _COPY else None
    return (
        isinstance(target, fx.Node) and target.op == "placeholder" and all(user.op == "output" for user in node.users)
    )


def make_marked_moves(graph: IterGraph, meta: Mapping[str, Any]) -> None:
    """Make the moves that are marked in a graph, whose module has that metadata; the marks are gone then."""
    marked = marked_moves(graph)
    if not marked:
        return
    graph.move_all_to_next_iter(requested_moves(graph, marked, meta.get(DESTINATIONS, {})))
    for nodes in marked.values():
        for node in nodes:
            update_node_meta(node, move=0)
