"""What the backward of one microbatch through a stage begins from, and what autograd need not do.

stage returns (b, h), took (a, h)     h is passed on: its gradient goes back as it came, past autograd
                                      b: autograd begins here
                                      a value whose gradient is None, or that wants none: nothing begins there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Beginning:
    """Where autograd begins, with which gradients, and what goes past it."""

    roots: list[torch.Tensor]
    gradients: list[torch.Tensor]
    passed: dict[int, torch.Tensor]
    """Gradients of values that the stage passes on, by their place among its inputs."""
    held: list[tuple[torch.Tensor, torch.Tensor]]
    """Parameters that are themselves values, and their gradients: a parameter that is sent to a later stage."""


def begin(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> Beginning:
    """Sort the outputs of a stage by what their gradients are for."""
    places = {id(given): place for place, given in enumerate(inputs) if given.requires_grad}
    found = Beginning([], [], {}, [])
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
    """The leaf that an output is only another name of, or the output itself."""
    function = output.grad_fn
    if function is None or not function.name().startswith("AliasBackward"):
        return output
    leaf = getattr(function.next_functions[0][0], "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else output


def add_passed(
    gradients: Sequence[torch.Tensor | None], passed: dict[int, torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs: what autograd found and what went past it."""
    result = list(gradients)
    for place, gradient in passed.items():
        found = result[place]
        result[place] = gradient if found is None else found + gradient
    return tuple(result)


def accumulate(held: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Add gradients to their parameters, as the end of a backward does."""
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
