"""The backward of one microbatch through a stage, in one piece or split into input and weight backward.

    stage returns (b, h), took (a, h)     h is relayed: its gradient is sent back without autograd
                                          b: autograd starts here
                                          values without a gradient, or that require none: nothing starts there

Zero-bubble schedules send the gradients of inputs early and compute those of parameters in otherwise idle time.

    roots ─ u ─ w ─ a        a: an input of the stage. u, w lead to it: the input backward runs them, for `a` only.
            │   │            Their other branches lead to parameters only. The gradients that reach u and w are saved,
            p   p, q         and the weight backward starts from there.

u and w, which lead to the same parameter p, are one group and run together. Meanwhile each of them takes the saved
gradient instead of the incoming one: what flows from u to w again was already counted in the input backward. Groups
share no parameter, so that autograd runs nothing of another group again.

torch's own split backward loses parameters that no input reaches, cannot start at views, and in 2.11 counts some twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from wholestep.ir.graph_walks import postorder
from wholestep.torch_private.autograd import ones_at


@dataclass
class BackwardStart:
    """The roots of a backward with their gradients, and the gradients that bypass autograd."""

    roots: list[torch.Tensor]
    gradients: list[torch.Tensor]
    passed: dict[int, torch.Tensor]
    """Gradients of relayed values, by the index of the input."""
    held: list[tuple[torch.Tensor, torch.Tensor]]
    """Parameters that are themselves outputs (sent to a later stage), with their gradients."""


def backward_start(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> BackwardStart:
    """Classify the outputs of a stage: roots of autograd, relayed inputs, parameters."""
    places = {id(given): place for place, given in enumerate(inputs) if given.requires_grad}
    found = BackwardStart([], [], {}, [])
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is None or not output.requires_grad:
            continue
        place = places.get(id(_source(output)))
        if place is not None:
            before = found.passed.get(place)
            found.passed[place] = gradient if before is None else before + gradient
        elif output.is_leaf:
            found.held.append((output, gradient))
        else:
            found.roots.append(output)
            found.gradients.append(gradient)
    return found


def _source(output: torch.Tensor) -> torch.Tensor:
    """The leaf that an output aliases, or the output itself."""
    function = output.grad_fn
    if function is None or not function.name().startswith("AliasBackward"):
        return output
    leaf = getattr(function.next_functions[0][0], "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else output


def add_passed(
    gradients: Sequence[torch.Tensor | None], passed: dict[int, torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs: those of autograd plus those of relayed values."""
    result = list(gradients)
    for place, gradient in passed.items():
        found = result[place]
        result[place] = gradient if found is None else found + gradient
    return tuple(result)


def accumulate(held: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Accumulate gradients into their parameters, as a backward does."""
    if not held:
        return
    with torch.no_grad():
        for parameter, gradient in held:
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.clone(memory_format=torch.preserve_format)
            else:
                parameter.grad += gradient


@dataclass
class WeightGroup:
    """Parameters whose gradients are computed together, and the nodes at which their backward starts."""

    nodes: list[Node] = field(default_factory=list)
    """Nodes that also lead to an input."""
    saved: dict[Node, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    """The gradients that reached each of them."""
    roots: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    """Roots that do not lead to an input, with their gradients."""
    parameters: list[torch.Tensor] = field(default_factory=list)


def input_backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | GradientEdge],
    parameters: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor | None], list[WeightGroup]]:
    """The gradients of the inputs, and the groups from which `weight_backward` computes those of the parameters."""
    groups = plan_groups(roots, gradients, inputs, parameters)
    begins, ends = [_edge(root) for root in roots], [_edge(value) for value in inputs]
    handles = []
    for group in groups:
        for node in group.nodes:
            handles.append(node.register_prehook(_save_hook(group, node)))
    try:
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if begins and ends:
            found = torch.autograd.grad(begins, ends, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, groups


def weight_backward(groups: Sequence[WeightGroup]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The gradients of the parameters."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for group in groups:
        edges = [edge for edge, _ in group.roots]
        gradients = [gradient for _, gradient in group.roots]
        for node, came in group.saved.items():
            for number, gradient in enumerate(came):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        if not edges:
            continue
        handles = [node.register_prehook(_replace_hook(came)) for node, came in group.saved.items()]
        try:
            # No other group uses this part of the graph: it is freed with its last reference.
            results = torch.autograd.grad(edges, group.parameters, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        found += zip(group.parameters, results, strict=True)
    return found


def _save_hook(group: WeightGroup, node: Node) -> Any:
    def save(came: tuple[torch.Tensor | None, ...]) -> None:
        group.saved[node] = came

    return save


def _replace_hook(came: tuple[torch.Tensor | None, ...]) -> Any:
    return lambda _: came


def plan_groups(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | GradientEdge],
    parameters: Sequence[torch.Tensor],
) -> list[WeightGroup]:
    """Group the parameters by the nodes from which their backward starts. Walks the autograd graph once."""
    begins = [_edge(root) for root in roots]
    ends = {_edge(value).node for value in inputs}
    sought = {get_gradient_edge(p).node: p for p in parameters if p.requires_grad}
    order = _children_first([edge.node for edge in begins])
    to_input: set[Node] = set()
    to_parameter: set[Node] = set()
    same = _UnionFind()
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
    groups: dict[Node, WeightGroup] = {}
    for node in split:
        groups.setdefault(same.name(node), WeightGroup()).nodes.append(node)
    for edge, gradient in zip(begins, gradients, strict=True):
        if edge.node in to_parameter:
            groups.setdefault(same.name(edge.node), WeightGroup()).roots.append((edge, gradient))
    for node, parameter in sought.items():
        if node in to_parameter and same.name(node) in groups:
            groups[same.name(node)].parameters.append(parameter)
    return [group for group in groups.values() if group.parameters]


def _edge(value: torch.Tensor | GradientEdge) -> GradientEdge:
    return value if isinstance(value, GradientEdge) else get_gradient_edge(value)


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes reachable from the roots, in post-order: each after the nodes that it passes gradients to."""
    return postorder(roots, lambda node: [child for child, _ in node.next_functions if child is not None])


class _UnionFind:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def name(self, node: Node) -> Node:
        """The representative of a node's set."""
        path = []
        while (above := self._above.get(node)) is not None:
            path.append(node)
            node = above
        for each in path:
            self._above[each] = node
        return node

    def join(self, one: Node, other: Node) -> None:
        """Merge the sets of two nodes."""
        first, second = self.name(one), self.name(other)
        if first is not second:
            self._above[first] = second


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor | GradientEdge],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[torch.Tensor],
) -> tuple[tuple[torch.Tensor | None, ...], list[WeightGroup]]:
    """The gradients of the inputs, also accumulated in their `grad`; and the groups for `stage_backward_weight`.

    Outputs and inputs may be gradient edges (`get_gradient_edge`) of tensors that were freed early.
    """
    roots: list[torch.Tensor | GradientEdge] = []
    gradients: list[torch.Tensor] = []
    for place, output in enumerate(stage_outputs_or_loss):
        if not _is_in_autograd_graph(output):
            continue
        gradient = _ones(output) if output_grads is None else output_grads[place]
        if gradient is not None:
            roots.append(output)
            gradients.append(gradient)
    inputs = [value for value in input_values if _is_in_autograd_graph(value)]
    results, groups = input_backward(roots, gradients, inputs, list(weights))
    pairs = list(zip(inputs, results, strict=True))
    accumulate([(value, result) for value, result in pairs if isinstance(value, torch.Tensor)])
    found = {id(value): result for value, result in pairs}
    return tuple(found.get(id(value)) for value in input_values), groups


def _is_in_autograd_graph(value: Any) -> bool:
    return isinstance(value, GradientEdge) or (isinstance(value, torch.Tensor) and value.requires_grad)


def _ones(value: torch.Tensor | GradientEdge) -> torch.Tensor:
    return torch.ones_like(value) if isinstance(value, torch.Tensor) else ones_at(value)


def stage_backward_weight(
    weights: Iterable[torch.Tensor], param_groups: Sequence[WeightGroup], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Accumulate the gradients of the parameters and return them. The graph is freed with its last reference."""
    accumulate(weight_backward(param_groups))
    return tuple(weight.grad for weight in weights)
