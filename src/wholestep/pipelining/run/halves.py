"""The backward of a microbatch in two halves: first as far as the stage's inputs need it, the rest when there is time.

Schedules without bubbles send the gradients of inputs early and compute those of parameters in what would be idle time.

    roots ─ u ─ w ─ a        a: an input of the stage. u, w lead to it: the first half runs them, for `a` only.
            │   │            Their other sides lead to parameters only. What came in at u and w is kept, and the
            p   p, q         second half starts from there.

u and w, which lead to the same parameter p, are one group and are run together. While they are, each of them takes what
was kept instead of what comes in: what flows from u to w once more was already counted in the first half. Groups have
no parameter in common, so that autograd runs nothing of the other groups again.

torch's own halves lose parameters that no input meets, cannot begin at views, and in 2.11 count some twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from wholestep.ir.slices import postorder


@dataclass
class Group:
    """Parameters whose gradients are found together, and where their backward begins."""

    nodes: list[Node] = field(default_factory=list)
    """Nodes that also lead to an input."""
    kept: dict[Node, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    """What came in at each of them."""
    begun: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    """Roots that lead to no input, with their gradients."""
    parameters: list[torch.Tensor] = field(default_factory=list)


def first_half(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | GradientEdge],
    parameters: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor | None], list[Group]]:
    """The gradients of the inputs, and what `second_half` needs for those of the parameters."""
    groups = plan_groups(roots, gradients, inputs, parameters)
    begins, ends = [_edge(root) for root in roots], [_edge(value) for value in inputs]
    handles = []
    for group in groups:
        for node in group.nodes:
            handles.append(node.register_prehook(_keeper(group, node)))
    try:
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if begins and ends:
            found = torch.autograd.grad(begins, ends, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, groups


def second_half(groups: Sequence[Group]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The gradients of the parameters."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for group in groups:
        edges = [edge for edge, _ in group.begun]
        gradients = [gradient for _, gradient in group.begun]
        for node, came in group.kept.items():
            for number, gradient in enumerate(came):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        if not edges:
            continue
        handles = [node.register_prehook(_giver(came)) for node, came in group.kept.items()]
        try:
            # Only the second half of this group uses its part of the graph, which goes when nothing refers to it.
            results = torch.autograd.grad(edges, group.parameters, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        found += zip(group.parameters, results, strict=True)
    return found


def _keeper(group: Group, node: Node) -> Any:
    def keep(came: tuple[torch.Tensor | None, ...]) -> None:
        group.kept[node] = came

    return keep


def _giver(came: tuple[torch.Tensor | None, ...]) -> Any:
    return lambda _: came


def plan_groups(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | GradientEdge],
    parameters: Sequence[torch.Tensor],
) -> list[Group]:
    """Which parameters are found together, from which nodes. Walks the graph of autograd once."""
    begins = [_edge(root) for root in roots]
    ends = {_edge(value).node for value in inputs}
    sought = {get_gradient_edge(p).node: p for p in parameters if p.requires_grad}
    order = _children_first([edge.node for edge in begins])
    to_input: set[Node] = set()
    to_parameter: set[Node] = set()
    same = _Same()
    split: list[Node] = []
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if node in ends or any(child in to_input for child in children):
            to_input.add(node)
        aside = [child for child in children if child not in to_input and child in to_parameter]
        for child in aside:
            same.join(node, child)
        if node in to_input:
            if aside:
                split.append(node)
        elif aside or node in sought:
            to_parameter.add(node)
    groups: dict[Node, Group] = {}
    for node in split:
        groups.setdefault(same.name(node), Group()).nodes.append(node)
    for edge, gradient in zip(begins, gradients, strict=True):
        if edge.node in to_parameter:
            groups.setdefault(same.name(edge.node), Group()).begun.append((edge, gradient))
    for node, parameter in sought.items():
        if node in to_parameter and same.name(node) in groups:
            groups[same.name(node)].parameters.append(parameter)
    return [group for group in groups.values() if group.parameters]


def _edge(value: torch.Tensor | GradientEdge) -> GradientEdge:
    return value if isinstance(value, GradientEdge) else get_gradient_edge(value)


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes below the roots, each after those that it hands gradients to."""
    return postorder(roots, lambda node: [child for child, _ in node.next_functions if child is not None])


class _Same:
    """Which nodes belong together."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def name(self, node: Node) -> Node:
        """The one node that stands for all that belong together with this."""
        path = []
        while (above := self._above.get(node)) is not None:
            path.append(node)
            node = above
        for each in path:
            self._above[each] = node
        return node

    def join(self, one: Node, other: Node) -> None:
        """They belong together."""
        first, second = self.name(one), self.name(other)
        if first is not second:
            self._above[first] = second
