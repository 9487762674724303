"""Fast checks in C++ that Dynamo's guards use: versions of dicts, metadata of tensors. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards as _TensorGuards
from torch._C._dynamo.guards import dict_version as _dict_version


def generator_key(generator: torch.Generator) -> int:
    """Identity of a generator, of which dispatch creates a new Python object each time (`Generator._cdata`).
    2.11, 2.13."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def cuda_is_initialized() -> bool:
    """Whether CUDA is initialised in this process (`torch.cuda.is_initialized`, which has no types). 2.11, 2.13."""
    initialized: Any = torch.cuda.is_initialized
    return bool(initialized())


class DictWatch:
    """Tells whether some dicts have been written since its creation, by their version (Dynamo's `dict_version`).
    2.11, 2.13.

    About 40 ns a dict of any size. A write of an equal value counts as a change.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._versions = list(map(_dict_version, self._dicts))

    def unchanged(self) -> bool:
        """Whether no dict has been written since the creation of this object."""
        return list(map(_dict_version, self._dicts)) == self._versions


class TensorChecks:
    """Type, dtype, device, sizes, strides and requires_grad of many tensors, compared in one C++ call.

    Dynamo's `TensorGuards`: about 20 ns a tensor; the same in Python costs 300. 2.11, 2.13.
    """

    def __init__(self, tensors: Sequence[Tensor], dynamic_dims: Sequence[frozenset[int]], names: Sequence[str]) -> None:
        sizes = [_static(t.shape, dims) for t, dims in zip(tensors, dynamic_dims, strict=True)]
        strides = [
            [None] * t.dim() if dims else list(t.stride()) for t, dims in zip(tensors, dynamic_dims, strict=True)
        ]
        self._names = list(names)
        guards: Any = _TensorGuards
        self._guards = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all tensors have the same metadata."""
        return bool(self._guards.check(*tensors))

    def explain(self, tensors: Sequence[Tensor]) -> str:
        """Why `hold` is false."""
        return str(self._guards.check_verbose(*tensors, tensor_check_names=self._names))


def _static(sizes: Sequence[int], dynamic: frozenset[int]) -> list[int | None]:
    return [None if dim in dynamic else size for dim, size in enumerate(sizes)]
