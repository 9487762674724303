"""Clipping by the norm of all gradients, where ranks have parts of them.

Each rank takes the norm of what it has; one all-reduce per axis makes that the norm of the whole. Gradients are grouped
by placement, so that what several ranks have in common counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from wholestep.parallel.axes import Axis, axes_of
from wholestep.parallel.collectives import Collectives
from wholestep.torch_private.dtensor import is_dtensor, local_of, spec_of

Norm = Callable[..., Tensor]


def total_norm(
    emit: Collectives, original: Norm, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any
) -> Tensor:
    """Stands in for the norm inside of `clip_grad_norm_`."""
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not any(is_dtensor(g) for g in grads):
        return original(grads, norm_type, *args, **kwargs)
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        whole = _reduced(grad) if is_unreduced(grad) else grad
        groups.setdefault(_sharding(whole), []).append(local_of(whole))
    totals = []
    for key, members in groups.items():
        mesh, sharded = key or (None, ())
        axes = [a for a, is_sharded in zip(axes_of(mesh) if mesh else (), sharded, strict=True) if is_sharded]
        axes = [axis for axis in axes if axis.size > 1]
        if axes and norm_type == 0:
            totals.append(_nonzero_tensors(emit, members, axes))
            continue
        norm = _norm_here(original, members, norm_type, *args, **kwargs)
        for axis in axes:
            norm = _over_axis(emit, norm, norm_type, axis)
        totals.append(norm)
    if len(totals) == 1:
        return totals[0]
    together = torch.stack(totals)
    total: Tensor = together.sum() if norm_type == 0 else torch.linalg.vector_norm(together, norm_type)
    return total


def scale_by_norm(original: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for the second half of `clip_grad_norm_`: scales the local parts."""
    params: Sequence[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params]
    original([SimpleNamespace(grad=None if g is None else local_of(g)) for g in grads], *args, **kwargs)


def _norm_here(original: Norm, members: list[Tensor], norm_type: float, *args: Any, **kwargs: Any) -> Tensor:
    """The norm of what this rank has. A rank without rows of any parameter has nothing to compare."""
    if not math.isinf(norm_type):
        return original(members, norm_type, *args, **kwargs)
    some = [m for m in members if m.numel()]
    return (
        original(some, norm_type, *args, **kwargs)
        if some
        else members[0].new_full((), 0 if norm_type > 0 else math.inf)
    )


def _nonzero_tensors(emit: Collectives, members: list[Tensor], axes: list[Axis]) -> Tensor:
    """torch's norm of order 0 of all gradients: how many of them have an element that is not 0."""
    counts = torch.stack([torch.linalg.vector_norm(m, 0) for m in members])
    for axis in axes:
        counts = emit.all_reduce(counts, axis, "sum")
    found: Tensor = torch.linalg.vector_norm(counts, 0)
    return found


def _over_axis(emit: Collectives, norm: Tensor, norm_type: float, axis: Axis) -> Tensor:
    if math.isinf(norm_type):
        return emit.all_reduce(norm, axis, "max" if norm_type > 0 else "min")
    found: Tensor = emit.all_reduce(norm**norm_type, axis, "sum") ** (1.0 / norm_type)
    return found


def is_unreduced(grad: Tensor) -> bool:
    """Whether each rank has a gradient of its own, still to be summed up."""
    return is_dtensor(grad) and any(isinstance(p, Partial) for p in spec_of(grad).placements)


def _sharding(grad: Tensor) -> Any:
    """The mesh of a gradient and along which of its axes it is sharded; None for a plain tensor."""
    if not is_dtensor(grad):
        return None
    spec = spec_of(grad)
    return spec.mesh, tuple(not (p.is_replicate() or p.is_partial()) for p in spec.placements)


def _reduced(grad: Any) -> Any:
    from torch.distributed.tensor import Replicate

    spec = spec_of(grad)
    return grad.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in spec.placements])
