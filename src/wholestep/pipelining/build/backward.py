"""The backward of a pipe as nodes of its graph.

    before                                    after
    a = submod_0(x)                           a = submod_0(x)
    loss = submod_1(a)                        loss = submod_1(a)
    return loss                               seed = ones_like(loss)
                                              g1 = stage_backward((loss,), (seed,), [a], [0])
                                              g0 = stage_backward((a,), (g1[0],), [x], [0])
                                              pass_to_inputs([x], [g0[0]])
                                              return loss

A value that several stages use gets the sum of their gradients. The graph runs in a `DetachExecutor`: there the inputs
of each stage are leaves of autograd, so that each `stage_backward` ends where its stage begins.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge

from wholestep.pipelining.run.backward_halves import stage_backward_input as stage_backward_input
from wholestep.pipelining.run.backward_halves import stage_backward_weight as stage_backward_weight
from wholestep.torch_private.pytrees import pytree, pytree_children


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
    stage_info: str | None = None,
) -> tuple[Any, ...]:
    """Run the backward of one stage: parameters get their gradients, those of the inputs are returned.

    Outputs and inputs may be nested. An output without gradient takes no part; if none has one, each is a loss.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = None if output_grads is None else [output_grads[i] for i in outputs_with_grads_idxs]
    pairs = _with_gradients(stage_output, output_grads)
    if any(gradient is not None for _, gradient in pairs):
        pairs = [(output, gradient) for output, gradient in pairs if gradient is not None]
    if pairs:
        try:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        except RuntimeError as error:
            error.add_note(f"in the backward of {stage_info or 'a stage'}")
            raise
    return tuple(pytree.tree_map(_take_gradient, value) for value in input_values)


def null_coalesce_accumulate(lhs: Any, rhs: Any) -> Any:
    """The sum of two gradients, either of which may be missing. Nested ones are summed value by value."""
    if lhs is None:
        return rhs
    if rhs is None:
        return lhs
    if isinstance(lhs, torch.Tensor):
        return torch.add(lhs, rhs)
    leaves, spec = pytree.tree_flatten(lhs)
    others = pytree.tree_flatten(rhs)[0]
    return pytree.tree_unflatten([null_coalesce_accumulate(a, b) for a, b in zip(leaves, others, strict=True)], spec)


_null_coalesce_accumulate = null_coalesce_accumulate  # PiPPy's name


def pass_to_inputs(input_values: Sequence[Any], grads: Sequence[Any]) -> None:
    """Hand gradients to the arguments of the pipe, as backward would: leaves keep them, others pass them on."""
    pairs = [pair for value, grad in zip(input_values, grads, strict=True) for pair in _with_gradients(value, grad)]
    pairs = [(value, gradient) for value, gradient in pairs if gradient is not None]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])


for _function in (stage_backward, pass_to_inputs):
    fx.node.has_side_effect(_function)


def insert_backward(graph: fx.Graph, loss: fx.Node) -> None:
    """Add the backward of `loss` to a graph of stages: placeholders, calls of modules and `getitem`."""
    live = _ancestors(loss)
    results = _results(graph)
    stages = [node for node in graph.nodes if node.op == "call_module" and node in live]
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node in live]
    gradients: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(graph.output_node()):
        gradients[loss] = graph.call_function(torch.ones_like, (loss,))
        for stage in reversed(stages):
            outputs = results.get(stage, (stage,))
            found = tuple(gradients.get(output) if output is not None else None for output in outputs)
            arguments: dict[str, Any] = {
                "stage_output": outputs,
                "output_grads": found,
                "input_values": list(stage.all_input_nodes),
                "outputs_with_grads_idxs": [i for i, gradient in enumerate(found) if gradient is not None],
                "stage_info": str(stage.target),
            }
            call = graph.call_function(stage_backward, kwargs=arguments)
            for place, value in enumerate(stage.all_input_nodes):
                gradient = graph.call_function(operator.getitem, (call, place))
                if value in gradients:
                    gradient = graph.call_function(null_coalesce_accumulate, (gradients[value], gradient))
                gradients[value] = gradient
        graph.call_function(pass_to_inputs, (inputs, [gradients[value] for value in inputs]))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for value in waiting.pop().all_input_nodes:
            if value not in found:
                found.add(value)
                waiting.append(value)
    return found


def _results(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node | None, ...]]:
    """For each stage that returns a tuple, the nodes that pick from it, in order; None where nobody does."""
    picked: dict[fx.Node, dict[int, fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem:
            picked.setdefault(node.args[0], {})[node.args[1]] = node
    return {stage: tuple(of.get(i) for i in range(max(of) + 1)) for stage, of in picked.items()}


def _with_gradients(values: Any, gradients: Any) -> list[tuple[Any, Any]]:
    """The tensors (or edges of autograd) of a nested value that have a backward, each with its gradient or None."""
    if isinstance(values, GradientEdge):
        return [(values, gradients)]
    if isinstance(values, torch.Tensor):
        return [(values, gradients)] if values.requires_grad else []
    children = pytree_children(values) or []
    given = [None] * len(children) if gradients is None else pytree_children(gradients)
    assert given is not None, f"{gradients!r} is no gradient of {type(values).__name__}"
    return [pair for value, gradient in zip(children, given, strict=True) for pair in _with_gradients(value, gradient)]


def _take_gradient(value: Any) -> Any:
    """The gradient that a stage's backward left at an input; it is not kept there."""
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None
    gradient, value.grad = value.grad, None
    return gradient
