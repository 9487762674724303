"""Fast checks that Dynamo's guards are made of, and switches of the process. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards as _TensorGuards
from torch._C._dynamo.guards import dict_version as _dict_version
from torch.utils import _pytree as _pytree


def generator_key(generator: torch.Generator) -> int:
    """Identity of a generator; dispatch hands out a new Python object each time (`Generator._cdata`). 2.11, 2.13."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def cuda_is_initialized() -> bool:
    """Whether this process uses CUDA (`torch.cuda.is_initialized`, which has no types). 2.11, 2.13."""
    initialized: Any = torch.cuda.is_initialized
    return bool(initialized())


class DictWatch:
    """Whether some dicts were written since, by their version (Dynamo's `dict_version`). 2.11, 2.13.

    About 40 ns a dict, whatever it holds; a write of the same value counts as a change.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._versions = list(map(_dict_version, self._dicts))

    def unchanged(self) -> bool:
        """Whether no dict was written since the watch began."""
        return list(map(_dict_version, self._dicts)) == self._versions


class TensorChecks:
    """Type, dtype, device, sizes, strides and requires_grad of many tensors, compared in one C++ call.

    Dynamo's `TensorGuards`: about 20 ns a tensor, where the same in Python costs 300. 2.11, 2.13.
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
        """Whether all tensors still look as they did."""
        return bool(self._guards.check(*tensors))

    def explain(self, tensors: Sequence[Tensor]) -> str:
        """Why `hold` is false."""
        return str(self._guards.check_verbose(*tensors, tensor_check_names=self._names))


def _static(sizes: Sequence[int], dynamic: frozenset[int]) -> list[int | None]:
    return [None if dim in dynamic else size for dim, size in enumerate(sizes)]


SWITCHES: tuple[Any, ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._len_torch_function_stack,
)
"""Which attention kernels are allowed, and how many function modes (a default device is one) are on. 2.11, 2.13."""
