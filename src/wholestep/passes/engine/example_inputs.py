"""Inputs for a graph of which only shapes and dtypes are known, in several draws from the likeliest to the safest.

A draw that an operator refuses (an index out of range, a matrix that is not positive definite), or that gives numbers
which are none (the logarithm of a negative one), is followed by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.passes.plain_collectives import known_or_noted

SEED = 20261115

Draw = Callable[[list[int], torch.Generator], Tensor]


def _near_one(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).add_(0.1)


def _normal(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _large(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).mul_(10).add_(6)


def _like_identity(shape: list[int], generator: torch.Generator) -> Tensor:
    """Symmetric, positive definite and not the identity where that is possible."""
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return _near_one(shape, generator)
    noise = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.1
    return (noise + noise.mT) / 2 + torch.eye(shape[-1], dtype=torch.float64) * (1 + 0.2 * shape[-1])


def _zeros(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _zero_or_one(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float64)


_DRAWS: tuple[tuple[str, Draw, Draw], ...] = (
    ("near 1, whole numbers 0 and 1", _near_one, _zero_or_one),
    ("near 1, whole numbers 0", _near_one, _zeros),
    ("normal", _normal, _zeros),
    ("between 6 and 16", _large, _zeros),
    ("symmetric and positive definite", _like_identity, _zeros),
    ("zero", _zeros, _zeros),
)


def draws(graph: fx.Graph) -> Iterator[tuple[str, list[Any]]]:
    """Values of the placeholders, with what they are called."""
    values = [known_or_noted(node) for node in graph.find_nodes(op="placeholder")]
    for name, floats, integers in _DRAWS:
        generator = torch.Generator().manual_seed(SEED)
        yield name, [_made_up(value, floats, integers, generator) for value in values]


def nudged(inputs: list[Any]) -> list[Any]:
    """The same inputs with every float changed by a rounding error: what that changes is not told apart."""
    generator = torch.Generator().manual_seed(SEED)
    return [_nudged(value, generator) if isinstance(value, Tensor) else value for value in inputs]


def _nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    size = 2 * torch.finfo(tensor.dtype).eps
    signs = (torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(tensor.device)
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(wide * (1 + size * signs))


def _made_up(value: Any, floats: Draw, integers: Draw, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor):
        shape = [_size(s) for s in value.shape]
        if value.is_complex():
            data = torch.complex(floats(shape, generator), floats(shape, generator))
        elif value.is_floating_point():
            data = floats(shape, generator)
        elif value.dtype is torch.bool:
            data = _mask(shape, generator)
        else:
            data = integers(shape, generator)
        made = torch.empty_strided(shape, [_size(s) for s in value.stride()], dtype=value.dtype)
        return made.copy_(data)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value if value is not None else 0.5


def _mask(shape: list[int], generator: torch.Generator) -> Tensor:
    """Mostly true, and never false along a whole row: a softmax over nothing is no number. A flag alone is false."""
    if not shape:
        return torch.zeros(shape)
    mask = torch.rand(shape, generator=generator) < 0.75
    mask[..., :1] = True
    return mask


def _size(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)
