"""Which nodes may run in the next iteration, before which node they must, and what they are given there: planning only.

a graph module     passes mark nodes (`NodeMeta.move`) and record their destinations; the graph computes as before
a StepGraph        the runtime builds the graphs of the first and of other iterations from the marks
IterGraphModule    performs the moves of a marked graph when it is constructed from one
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import IterMoveError
from wholestep.ir.call_arguments import nodes_in
from wholestep.ir.effects import alias_roots, shared_inputs, written_inputs
from wholestep.ir.graph_walks import reachable
from wholestep.ir.meta import node_meta

_COPY = torch.ops.aten.copy_.default
# An alias of the same memory: its users read the state later.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_NOTHING: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True)
class Move:
    """Nodes that run in the next iteration, in order; the state (placeholders) they write, and what they are given."""

    nodes: tuple[fx.Node, ...]
    state: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    """The cross-iteration inputs that they read."""


@dataclass(frozen=True)
class MovePlan:
    """How a move changes a graph."""

    nodes: tuple[fx.Node, ...]
    target: fx.Node
    carried: Mapping[fx.Node, bool]
    """What the nodes read of their own iteration; True where it shares memory that others may write."""
    constants: tuple[fx.Node, ...]
    """`get_attr` nodes that have to come before the target."""
    views: tuple[fx.Node, ...] = ()
    """Views of the state that other nodes use too: moved nodes get their own, taken when they run."""


def move_of(nodes: Iterable[fx.Node], cross: set[fx.Node]) -> Move:
    """The nodes of a performed move."""
    nodes = tuple(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    state = dict.fromkeys(root for node in nodes for written in written_inputs(node) for root in roots_of(written))
    return Move(nodes, tuple(state), tuple(n for n in inputs if n in cross))


def plan_moves(
    graph: fx.Graph,
    requests: Sequence[tuple[Sequence[fx.Node], fx.Node]],
    earlier: Sequence[Move] = (),
    late_outputs: Collection[int] = (),
) -> list[MovePlan]:
    """Plans for several moves of one graph; raises IterMoveError for one that would change what the graph computes."""
    planner = _MovePlanner(graph, earlier, needed_outputs(graph, late_outputs))
    chosen = [planner.subgraph(subgraph) for subgraph, _ in requests]
    return [planner.plan(nodes, target) for nodes, (_, target) in zip(chosen, requests, strict=True)]


def check_moves(graph: fx.Graph, moves: Sequence[Move]) -> None:
    """Raise IterMoveError if a node reads state, or another move writes it, before a performed move wrote it."""
    if not moves:
        return
    place = {node: i for i, node in enumerate(graph.nodes)}
    shares = _shared_placeholders(graph)
    number = {node: i for i, move in enumerate(moves) for node in move.nodes}
    written = {root: i for i, move in enumerate(moves) for root in move.state}
    last = [max(place[node] for node in move.nodes) for move in moves]
    for node in graph.nodes:
        if node.op == "output" or node.target in _SAME:
            continue
        for root in {root for source in node.all_input_nodes for root in shares.get(source, _NOTHING)}:
            own = written.get(root)
            if own is not None and number.get(node) != own and place[node] < last[own]:
                raise IterMoveError(
                    f"{node.name} reads {root.name} before {moves[own].nodes[-1].name}, which completes the update of "
                    "the last iteration.",
                    fix=f"leave {node.name} after the nodes that were moved.",
                    node=node.name,
                    location=node_meta(node).location,
                )


def needed_outputs(graph: fx.Graph, late_outputs: Collection[int] = ()) -> set[fx.Node]:
    """The nodes that the output needs in this iteration: all but those at late places only."""
    output = next(iter(reversed(graph.nodes)))
    result = output.args[0] if output.args else ()
    if not late_outputs or not isinstance(result, tuple | list):
        return set(output.all_input_nodes)
    return {n for i, value in enumerate(result) if i not in late_outputs for n in nodes_in(value)}


def state_of(node: fx.Node) -> fx.Node | None:
    """The placeholder that a `copy_` writes: the input itself, also behind a `detach`."""
    return _input_behind(node.args[0]) if node.target is _COPY else None


def _input_behind(value: Any) -> fx.Node | None:
    while isinstance(value, fx.Node) and value.target in _SAME:
        value = value.args[0]
    return value if isinstance(value, fx.Node) and value.op == "placeholder" else None


def first_readers(graph: fx.Graph, besides: Mapping[fx.Node, Any]) -> dict[fx.Node, fx.Node]:
    """For each placeholder, the first node not in `besides` that reads it. The output and `detach` do not count."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output" and node not in besides and node.target not in _SAME:
            for source in node.all_input_nodes:
                state = _input_behind(source)
                if state is not None:
                    found.setdefault(state, node)
    return found


class _MovePlanner:
    def __init__(self, graph: fx.Graph, earlier: Sequence[Move], needed: set[fx.Node]) -> None:
        self._needed = needed
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._shares = _shared_placeholders(graph)
        self._number: dict[fx.Node, int] = {node: i for i, move in enumerate(earlier) for node in move.nodes}
        self._moves = len(earlier)
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            read = () if node.target in _SAME else node.all_input_nodes
            for root in dict.fromkeys(r for source in read for r in self._shares.get(source, ())):
                self._readers.setdefault(root, []).append(node)
            for written in written_inputs(node):
                for root in self._shares.get(written, ()) or (written,):
                    self._writers.setdefault(root, []).append(node)

    def subgraph(self, subgraph: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """The nodes in graph order, now taken as moved."""
        for node in subgraph:
            if self._place.get(node) is None or node.op in ("placeholder", "output"):
                raise IterMoveError(f"{node} is not a node of this graph that can be moved.")
            if node in self._number:
                raise IterMoveError(f"{node.name} is moved twice.", node=node.name)
            self._number[node] = self._moves
        if not subgraph:
            raise IterMoveError("there is nothing to move.", fix="name at least one node.")
        self._moves += 1
        return tuple(sorted(subgraph, key=self._place.__getitem__))

    def plan(self, nodes: tuple[fx.Node, ...], target: fx.Node) -> MovePlan:
        own = self._number[nodes[0]]
        self._check_target(target)
        for node in nodes:
            self._check_users(node, own)
        state = self._check_state(nodes, target, own)
        views = self._views_of(state, nodes, own)
        carried: dict[fx.Node, bool] = {}
        constants: dict[fx.Node, None] = {}
        for node in (*views, *nodes):
            for source in node.all_input_nodes:
                if self._number.get(source) == own or source in state or source in views:
                    continue
                if source.op == "get_attr":
                    if self._place[source] > self._place[target]:
                        constants[source] = None
                    continue
                carried[source] = self._check_carried(source, node)
        return MovePlan(nodes, target, carried, tuple(constants), tuple(views))

    def _views_of(self, state: set[fx.Node], nodes: tuple[fx.Node, ...], own: int) -> dict[fx.Node, None]:
        """The views through which nodes read and write the state, in graph order, with those they are taken of."""

        def is_view(node: fx.Node) -> bool:
            roots = self._shares.get(node, _NOTHING)
            if node.op != "call_function" or self._number.get(node) == own or not roots or not roots <= state:
                return False
            writers = (writer for root in roots for writer in self._writers.get(root, ()))
            return all(self._number.get(writer) == own for writer in writers)

        starts = (source for node in nodes for source in node.all_input_nodes)
        found = reachable(filter(is_view, starts), lambda node: filter(is_view, shared_inputs(node)))
        return dict.fromkeys(sorted(found, key=self._place.__getitem__))

    def _check_target(self, target: fx.Node) -> None:
        if self._place.get(target) is None or target.op == "placeholder":
            raise IterMoveError(f"{target} is not a destination: it is an input, or not in this graph.")
        if target in self._number:
            raise IterMoveError(f"the destination {target.name} runs in the next iteration itself.", node=target.name)

    def _check_users(self, node: fx.Node, own: int) -> None:
        for user in node.users:
            if self._number.get(user) == own or (user.op == "output" and node not in self._needed):
                continue
            if user.op == "output":
                if state_of(node) is not None:
                    continue
                self._fail(node, f"the user's output needs {node.name}: it cannot wait for the next iteration.")
            self._fail(
                node,
                f"{user.name} uses {node.name}. The target nodes for move_to_next_iter_before must satisfy one of the "
                "following conditions: the user of a node is moved too, the user is the output and the node writes "
                "into an input, or the node has no users.",
            )

    def _check_state(self, nodes: tuple[fx.Node, ...], target: fx.Node, own: int) -> set[fx.Node]:
        """The placeholders that the nodes write; no node may read those later in the same iteration."""
        first_write: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            for written in written_inputs(node):
                roots = self._shares.get(written, _NOTHING)
                if not roots and self._number.get(written) != own:
                    self._fail(node, f"{node.name} writes into {written.name}, which is not moved.")
                for root in roots:
                    first_write.setdefault(root, node)
        for root, write in first_write.items():
            for reader in self._readers.get(root, ()):
                number = self._number.get(reader)
                if number == own or reader.op == "output":
                    continue
                if number is not None:
                    self._fail(
                        reader, f"{reader.name} reads {root.name}, which another move writes.", "move both at once."
                    )
                if self._place[reader] > self._place[write]:
                    self._fail(reader, f"{reader.name} reads {root.name} after {write.name} wrote it.")
                if self._place[target] > self._place[reader]:
                    self._fail(
                        reader,
                        f"the destination {target.name} is after {reader.name}, the first use of {root.name} in an "
                        f"iteration: {reader.name} would read the value of an iteration ago.",
                        f"move to before {reader.name}.",
                    )
        return set(first_write)

    def _check_carried(self, value: fx.Node, reader: fx.Node) -> bool:
        """True if a copy has to be carried."""
        roots = self._shares.get(value, _NOTHING)
        for root in roots or (value,):
            for writer in self._writers.get(root, ()):
                number = self._number.get(writer)
                if number is not None and number != self._number[reader]:
                    self._fail(
                        reader, f"{reader.name} reads {root.name}, which another move writes.", "move both at once."
                    )
                if number is None and (root is not value or self._place[writer] < self._place[reader]):
                    self._fail(reader, f"{reader.name} reads {value.name}, which {writer.name} changes in place.")
        val = value.meta.get("val")
        return bool(roots) and (val is None or isinstance(val, Tensor))

    def _fail(self, node: fx.Node, what: str, fix: str = "") -> None:
        raise IterMoveError(what, fix=fix, node=node.name, location=node_meta(node).location)


def _shared_placeholders(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """The placeholders whose memory a node may share."""
    return alias_roots(graph.nodes, (node for node in graph.nodes if node.op == "placeholder"))


def roots_of(node: fx.Node) -> list[fx.Node]:
    """The placeholders whose memory one node may share."""
    return [each for each in reachable([node], shared_inputs) if each.op == "placeholder"]


DESTINATIONS = "wholestep_destinations"
"""In the `meta` of a graph module: number of a move to the name of the node that it runs before."""
_FACTS = "wholestep_iteration_facts"


@dataclass(frozen=True)
class IterationFacts:
    """What has to be known of a captured step to move a part of it into the next iteration."""

    late_outputs: tuple[int, ...] = ()
    """Places in the output that may be filled by the next iteration (gradients)."""
    creates_state: bool = False
    """True if the step creates optimizer state: its graph runs once."""


def note_iteration_facts(gm: fx.GraphModule, facts: IterationFacts) -> None:
    """Record on a graph module, at capture, what passes that move nodes between iterations need."""
    gm.meta[_FACTS] = facts


def iteration_facts(gm: Any) -> IterationFacts:
    """The facts of a graph module, or of the main one of an IterGraphModule; none are known of a bare graph."""
    found: IterationFacts = gm_meta(gm).get(_FACTS, IterationFacts())
    return found


def gm_meta(gm: Any) -> dict[str, Any]:
    """Where a graph module, or the main one of an IterGraphModule, stores what passes recorded."""
    meta: dict[str, Any] = getattr(gm, "main_gm", gm).meta
    return meta


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
    """Where each move goes: as requested, but not after the first use of what it writes."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    by_name = {node.name: node for node in graph.nodes}
    readers = first_readers(graph, {node: None for nodes in marked.values() for node in nodes})
    found = []
    for number, nodes in marked.items():
        target = deadline(nodes, readers, place, graph)
        asked = by_name.get(names.get(number, ""), target)
        found.append((nodes, asked if place[asked] < place[target] and asked.op != "placeholder" else target))
    return found
