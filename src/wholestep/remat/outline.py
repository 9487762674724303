"""A step's graph as numbers, for planning: what the backward reads of the forward, and what each value costs.

A plan is a set of forward nodes that the backward computes again. Everything else follows from it: kept is what the
backward, or a node that is computed again, reads and the plan does not have. A node is computed again right before
its first reader in the backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from wholestep.ir.effects import (
    Storages,
    draws,
    find_storages,
    is_arithmetic,
    is_communication,
    is_custom_operator,
    is_data_dependent,
    is_unsafe_split,
    read_by,
    writes,
)
from wholestep.ir.graphs import epilogue
from wholestep.ir.meta import node_meta
from wholestep.ir.slices import reachable
from wholestep.remat.costs import is_fused, time_of
from wholestep.remat.policy import Policy, policy_of
from wholestep.torch_private.operators import OpOverload

Plan = frozenset[int]
"""Places of the nodes that are computed again."""


def in_backward(node: fx.Node) -> bool:
    """Whether a node of a step belongs to a backward."""
    return node_meta(node).phase == "backward"


def in_forward(node: fx.Node) -> bool:
    """Whether a node of a step belongs to a forward."""
    return node.op == "call_function" and node_meta(node).phase == "forward"


@dataclass(eq=False)
class Outline:
    """The nodes of a graph by their places in it."""

    nodes: list[fx.Node]
    inputs: list[tuple[int, ...]]
    pieces: Storages
    forward: list[bool]
    backward: list[bool]
    kept_anyway: set[int]
    """Pieces that live on without the backward: inputs, results, what other phases read."""
    policy: Policy
    fuses: bool
    workspace: Callable[[fx.Node], int]
    """Bytes that a node needs besides its results."""

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        *,
        policy: Policy | None = None,
        fuses: bool = False,
        device: torch.device | None = None,
        workspace: Callable[[fx.Node], int] = lambda node: 0,
        is_forward: Callable[[fx.Node], bool] = in_forward,
        is_backward: Callable[[fx.Node], bool] = in_backward,
    ) -> Outline:
        """Read a graph in normal form."""
        nodes = list(graph.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        inputs = [tuple(place[source] for source in node.all_input_nodes) for node in nodes]
        forward = [node.op == "call_function" and is_forward(node) for node in nodes]
        backward = [node.op == "call_function" and is_backward(node) for node in nodes]
        for i in _inside_of_forward(inputs, forward, backward):
            forward[i], backward[i] = True, False
        pieces = _pieces_when_updated(graph, device)
        kept: set[int] = set()
        for i, node in enumerate(nodes):
            if node.op in ("placeholder", "get_attr"):
                kept.update(pieces.made_by.get(node, ()))
            elif not forward[i] and not backward[i]:
                for source in node.all_input_nodes:
                    kept.update(pieces.seen_by.get(source, ()))
        return cls(nodes, inputs, pieces, forward, backward, kept, policy or policy_of(None), fuses, workspace)

    @cached_property
    def needed(self) -> list[bool]:
        """Forward nodes that something in the backward is computed from."""
        found = [False] * len(self.nodes)
        for i in range(len(self.nodes) - 1, -1, -1):
            if self.backward[i] or found[i]:
                for source in self.inputs[i]:
                    found[source] = found[source] or self.forward[source]
        return found

    @cached_property
    def time(self) -> dict[int, float]:
        """Nanoseconds of the needed forward nodes; views cost nothing."""
        return {
            i: 0.0 if self.is_view(i) else time_of(self.nodes[i], fuses=self.fuses)
            for i, needed in enumerate(self.needed)
            if needed
        }

    def is_view(self, i: int) -> bool:
        """Whether a node has no memory of its own: it is made from another value for nothing."""
        return not self.pieces.made_by.get(self.nodes[i])

    def is_list(self, i: int) -> bool:
        """Whether the value of a node is a list, which is never kept as a whole."""
        return isinstance(self.nodes[i].meta.get("val"), list | tuple)

    def keeping(self, i: int) -> int:
        """Bytes that stay occupied if the value of a node is kept."""
        seen = self.pieces.seen_by.get(self.nodes[i], ())
        return sum(self.pieces.size[p] for p in seen if p not in self.kept_anyway)

    @cached_property
    def never(self) -> set[int]:
        """Nodes that may not be computed again: random numbers, effects, communication, and what the user saves."""
        found = set()
        for i, needed in enumerate(self.needed):
            if needed and (self._has_effect(i) or self.asked.get(i) == "save"):
                found.add(i)
        return found

    @cached_property
    def asked(self) -> dict[int, str]:
        """What the user wants of needed forward nodes."""
        found = {}
        for i, needed in enumerate(self.needed):
            word = self.policy(self.nodes[i]) if needed else None
            if word is not None:
                found[i] = word
        return found

    @cached_property
    def always(self) -> set[int]:
        """Nodes that the user wants to be computed again."""
        return {i for i, word in self.asked.items() if word == "recompute"} - self.never

    def _has_effect(self, i: int) -> bool:
        node = self.nodes[i]
        target = node.target
        if target is operator.getitem:
            return False
        if is_communication(target):
            return self.asked.get(i) != "recompute"
        if is_custom_operator(target):
            return self.asked.get(i) != "recompute"
        if not isinstance(target, OpOverload):
            return not is_arithmetic(target)  # an operator inside (`call_on_copies`) may draw
        if draws(node) or is_data_dependent(target) or is_unsafe_split(target):
            return True
        return writes(node) or node.is_impure()

    def cost(self, plan: Collection[int]) -> float:
        """Nanoseconds that a plan adds."""
        return sum(self.time.get(i, 0.0) for i in self.run_again(plan))

    def run_again(self, plan: Collection[int]) -> set[int]:
        """The nodes of a plan that the backward needs: no reader, no second computation."""
        read = [s for i, back in enumerate(self.backward) if back for s in self.inputs[i] if s in plan]
        return set(reachable(read, lambda i: [s for s in self.inputs[i] if s in plan]))

    def saved(self, plan: Collection[int]) -> list[int]:
        """Places of the forward values that live until the backward under a plan, views left out."""
        again = self.run_again(plan)
        readers = [i for i, back in enumerate(self.backward) if back]
        read = [s for i in (*readers, *again) for s in self.inputs[i] if s not in again and self.forward[s]]
        found = reachable(read, lambda i: [s for s in self.inputs[i] if self.forward[s]] if self.is_view(i) else [])
        return sorted(i for i in found if not self.is_view(i) or self.is_element(i))

    def is_element(self, i: int) -> bool:
        """Whether a node takes one tensor out of a list that an operator made."""
        node = self.nodes[i]
        return node.target is operator.getitem and not self.is_list(i) and bool(self.pieces.seen_by.get(node))

    @cached_property
    def elements(self) -> dict[int, list[int]]:
        """For each list the places of the nodes that take something out of it."""
        found: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.target is operator.getitem and len(self.inputs[i]) == 1 and self.is_list(self.inputs[i][0]):
                found.setdefault(self.inputs[i][0], []).append(i)
        return found

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """Places of the values that each node needs in memory."""
        return [
            inputs if len(read_by(node)) == len(inputs) else ()
            for node, inputs in zip(self.nodes, self.inputs, strict=True)
        ]

    @cached_property
    def seen(self) -> list[tuple[int, ...]]:
        """For each node the pieces that its value is in."""
        return [self.pieces.seen_by.get(node, ()) for node in self.nodes]

    @cached_property
    def besides(self) -> list[int]:
        """Bytes that each node needs besides its results."""
        return [self.workspace(node) for node in self.nodes]

    @cached_property
    def fused(self) -> list[bool]:
        """Nodes that Inductor makes a part of the kernels that read them; views are a part of anything."""
        if not self.fuses:
            return [False] * len(self.nodes)
        return [
            is_fused(node.target) or ((self.forward[i] or self.backward[i]) and self.is_view(i))
            for i, node in enumerate(self.nodes)
        ]

    @cached_property
    def maker(self) -> list[int]:
        """For each piece of memory the place of the node that makes it."""
        place = {node: i for i, node in enumerate(self.nodes)}
        return [place[node] for node in self.pieces.maker]


def _inside_of_forward(inputs: list[tuple[int, ...]], forward: list[bool], backward: list[bool]) -> list[int]:
    """Backward nodes that a forward is computed from, by no update: gradients that are a part of the loss."""
    found = []
    inside = list(forward)
    for i in range(len(inputs) - 1, -1, -1):
        if inside[i]:
            if backward[i]:
                found.append(i)
            for source in inputs[i]:
                inside[source] = inside[source] or backward[source]
    return found


def _pieces_when_updated(graph: fx.Graph, device: torch.device | None) -> Storages:
    """The memory of the values, with updates of state in place, as the runtime will do them."""
    pieces = find_storages(graph, device)
    for node in epilogue(graph):
        for piece in pieces.seen_by.get(node.args[1], ()) if isinstance(node.args[1], fx.Node) else ():
            maker = pieces.maker[piece]
            if node_meta(maker).in_place is not None:
                for each in pieces.made_by.get(maker, ()):
                    pieces.size[each] = 0
    return pieces
