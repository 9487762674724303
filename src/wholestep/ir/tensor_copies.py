"""Copies of tensors that keep strides, and share memory where the originals do.

    x = base[:, ::2]; y = base[0]        copy_values([x, y])  ->  two views of one copy of what both span

A bare `clone` packs the elements of a slice or an expanded tensor, which hides what depends on strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.torch_private.fake_tensors import storage_key

_SPARSE = 64
"""How many times their elements tensors may span; of what spans more, strides and sharing are not kept."""


def extent_of(tensor: Tensor) -> int:
    """How many elements of memory a strided tensor spans."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def spanned(tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
    """A flat copy of the memory that views of one storage and dtype span, and where it starts in the storage."""
    first = min(int(tensor.storage_offset()) for tensor in tensors)
    last = max(int(tensor.storage_offset()) + extent_of(tensor) for tensor in tensors)
    return tensors[0].detach().as_strided((max(0, last - first),), (1,), first).clone(), first


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor is what its memory, sizes and strides say, and nothing else."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested or _is_lazy(tensor))


def _is_lazy(tensor: Tensor) -> bool:
    """Whether elements stand for their conjugates or negatives."""
    return bool(tensor.is_conj() or tensor.is_neg())


def copy_tensor(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return _with_grad(_copied(tensor), tensor)


def copy_values(values: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among values; those that share memory do so after, and one given twice is one."""
    made: dict[int, Tensor] = {}
    for places in shared(values):
        group = [values[i] for i in places]
        memory, first = spanned(group)
        for tensor in group:
            view = memory.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()) - first)
            made.setdefault(id(tensor), _with_grad(view, tensor))
    found = []
    for value in values:
        if isinstance(value, Tensor) and id(value) not in made:
            made[id(value)] = copy_tensor(value)
        found.append(made[id(value)] if isinstance(value, Tensor) else value)
    return found


def shared(values: Sequence[Any]) -> list[list[int]]:
    """Places of tensors among values that lie in the same memory, in groups of two and more."""
    together: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and has_plain_memory(value) and value.numel():
            together.setdefault((storage_key(value), value.dtype), []).append(i)
    return [group for group in together.values() if len(group) > 1 and _is_dense([values[i] for i in group])]


def _copied(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    dense = tensor.detach().clone(memory_format=torch.preserve_format)
    if not has_plain_memory(tensor) or dense.stride() == tensor.stride() or tensor.numel() == 0:
        return dense
    if not _is_dense([tensor]):
        return dense
    memory, _ = spanned([tensor])
    return memory.as_strided(tensor.shape, tensor.stride())


def _is_dense(tensors: Sequence[Tensor]) -> bool:
    ends = [(int(tensor.storage_offset()), int(tensor.storage_offset()) + extent_of(tensor)) for tensor in tensors]
    span = max(end for _, end in ends) - min(start for start, _ in ends)
    return span <= _SPARSE * max(1, sum(tensor.numel() for tensor in tensors))


def _with_grad(copy: Tensor, tensor: Tensor) -> Tensor:
    return copy.requires_grad_(tensor.requires_grad)
