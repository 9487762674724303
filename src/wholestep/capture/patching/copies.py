"""`copy.deepcopy`, `copy.copy` and pickling of tensors while they are traced.

copy.deepcopy(p.data)     a recorded clone with the same strides (optimizers begin their state with it)
copy.copy(t)              another tensor over the same memory, as in eager
pickle, torch.save        refused: there are no values to write
"""

from __future__ import annotations

import copy
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.errors import ItemError, UnsupportedError
from wholestep.ir.user_location import user_location
from wholestep.torch_private.fake_tensors import mark_parameter, storage_key

_COPY = copy.copy.__code__
_NEAR = 12


def deep_copy(func: Any, tensor: Tensor, memo: dict[Any, Any]) -> Any:
    """What `Tensor.__deepcopy__` gives, as operators of the graph."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    is_parameter = isinstance(tensor, nn.Parameter)
    if not is_parameter and not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    if not is_parameter:
        _refuse_shared_memory(tensor, memo)
    with torch.no_grad():
        new = _clone(tensor.detach())
    if is_parameter:
        mark_parameter(new)
    elif tensor.grad is not None:
        new.grad = copy.deepcopy(tensor.grad, memo)
    new.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = new
    return new


def _clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides, whatever they are."""
    new = tensor.clone()
    if new.stride() == tensor.stride():
        return new
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _refuse_shared_memory(tensor: Tensor, memo: dict[Any, Any]) -> None:
    """Eager copies memory once per deepcopy, so that copies of two views of one tensor share theirs too."""
    key = ("wholestep", storage_key(tensor))
    if key in memo:
        raise UnsupportedError(
            "copy.deepcopy copies two tensors that share memory, and the copies would share theirs.",
            fix="clone() each tensor.",
            location=user_location(),
        )
    memo[key] = tensor


def reduce_traced(tensor: Tensor) -> tuple[Any, ...]:
    """What `Tensor.__reduce_ex__` gives to `copy.copy`; whoever else asks wants to write the tensor to a file."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            break
        if frame.f_code is _COPY:
            return _same_memory, (tensor,)
        frame = frame.f_back
    raise ItemError(
        f"pickling (torch.save, multiprocessing) takes the value of a tensor of shape {tuple(tensor.shape)} out of the "
        "graph.",
        fix="save checkpoints outside of the step.",
        location=user_location(),
    )


def _same_memory(tensor: Tensor) -> Tensor:
    new = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        mark_parameter(new)
    return new.requires_grad_(tensor.requires_grad)
