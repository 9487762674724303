"""The two halves of a stage's backward under torch's names: first for its inputs, later for its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from wholestep.pipelining.run.chunk_backward import accumulate
from wholestep.pipelining.run.halves import Group, first_half, second_half
from wholestep.torch_private.autograd import ones_at


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor | GradientEdge],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[torch.Tensor],
) -> tuple[tuple[torch.Tensor | None, ...], list[Group]]:
    """The gradients of the inputs, also left in their `grad`; and what `stage_backward_weight` needs.

    Outputs and inputs may be edges of autograd (`get_gradient_edge`) instead of tensors: what was freed early.
    """
    roots: list[torch.Tensor | GradientEdge] = []
    gradients: list[torch.Tensor] = []
    for place, output in enumerate(stage_outputs_or_loss):
        if not _takes_part(output):
            continue
        gradient = _ones(output) if output_grads is None else output_grads[place]
        if gradient is not None:
            roots.append(output)
            gradients.append(gradient)
    inputs = [value for value in input_values if _takes_part(value)]
    results, groups = first_half(roots, gradients, inputs, list(weights))
    pairs = list(zip(inputs, results, strict=True))
    accumulate([(value, result) for value, result in pairs if isinstance(value, torch.Tensor)])
    found = {id(value): result for value, result in pairs}
    return tuple(found.get(id(value)) for value in input_values), groups


def _takes_part(value: Any) -> bool:
    """Whether autograd knows a value."""
    return isinstance(value, GradientEdge) or (isinstance(value, torch.Tensor) and value.requires_grad)


def _ones(value: torch.Tensor | GradientEdge) -> torch.Tensor:
    return torch.ones_like(value) if isinstance(value, torch.Tensor) else ones_at(value)


def stage_backward_weight(
    weights: Iterable[torch.Tensor], param_groups: Sequence[Group], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Add the gradients of the parameters; returned in their order. The graph goes when nothing refers to it."""
    accumulate(second_half(param_groups))
    return tuple(weight.grad for weight in weights)
