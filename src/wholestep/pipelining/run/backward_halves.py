"""The two halves of a stage's backward under torch's names: first for its inputs, later for its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from wholestep.pipelining.run.chunk_backward import accumulate
from wholestep.pipelining.run.halves import Group, first_half, second_half


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[torch.Tensor],
) -> tuple[tuple[torch.Tensor | None, ...], list[Group]]:
    """The gradients of the inputs, also left in their `grad`; and what `stage_backward_weight` needs."""
    given = [torch.ones_like(each) for each in stage_outputs_or_loss] if output_grads is None else output_grads
    roots: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for output, gradient in zip(stage_outputs_or_loss, given, strict=True):
        if output.requires_grad and gradient is not None:
            roots.append(output)
            gradients.append(gradient)
    inputs = [value for value in input_values if isinstance(value, torch.Tensor) and value.requires_grad]
    results, groups = first_half(roots, gradients, inputs, list(weights))
    accumulate(list(zip(inputs, results, strict=True)))
    found = {id(value): result for value, result in zip(inputs, results, strict=True)}
    return tuple(found.get(id(value)) for value in input_values), groups


def stage_backward_weight(
    weights: Iterable[torch.Tensor], param_groups: Sequence[Group], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Add the gradients of the parameters; returned in their order. The graph goes when nothing refers to it."""
    accumulate(second_half(param_groups))
    return tuple(weight.grad for weight in weights)
