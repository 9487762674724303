"""Eager again with other numbers: moved by one rounding error, and in float64.

Both change the tensors of the user's in place (`tensor.data = ...`), run the function, and leave it to the snapshot to
put everything back. A float64 run keeps autocast out by itself: autocast leaves float64 alone. Where the code asks for
a dtype by name, it gets float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholestep.debug.check.observation import Observation
from wholestep.debug.check.reachable import Part, Reached
from wholestep.debug.check.tensor_memory import can_be_saved
from wholestep.ir.memory import has_plain_memory
from wholestep.passes.engine.example_inputs import nudged
from wholestep.torch_private.fake_tensors import DispatchMode, storage_key
from wholestep.torch_private.pytrees import pytree

_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64} | {
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_SANE = 1e-2
"""How far eager may be from float64, relative to the largest element, for the two to be the same computation."""


class NoReference(Exception):  # noqa: N818 (it says why there is none)
    """No float64 run of this step can be made."""


def move_by_rounding(reached: Reached) -> None:
    """Change every float that the step reads by a rounding error. Counts and loss scales stay what they are."""
    for seen in reached.tensors:
        tensor = seen.obj
        counts = seen.part is Part.SCHEDULE or (seen.part is Part.OPTIMIZER and tensor.dim() == 0)
        if counts or not has_plain_memory(tensor) or not _is_rounded(tensor) or _overlaps(tensor):
            continue
        [moved] = nudged([tensor.detach().cpu()])
        tensor.data.copy_(moved)


def in_float64(reached: Reached, call: Callable[[], Any]) -> Any:
    """Run a call with every float tensor that it reads in float64. Raises NoReference where that is not possible."""
    storages: set[int] = set()
    tensors = [seen.obj for seen in reached.tensors if can_be_saved(seen.obj) and seen.obj.dtype in _WIDE]
    for tensor in tensors:
        key = storage_key(tensor)
        if key in storages and tensor.numel():
            raise NoReference("tensors share memory")
        storages.add(key)
    grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor, _ in grads:
        tensor.grad = None
    for tensor in tensors:
        tensor.data = tensor.data.to(_WIDE[tensor.dtype])
    for tensor, grad in grads:
        tensor.grad = grad
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            return call()
    except NoReference:
        raise
    except Exception as error:
        raise NoReference(f"in float64 the step raises {type(error).__name__}") from error


def usable_reference(eager: Observation, wide: Observation) -> str:
    """Why a float64 run is not the same computation as eager's; "" if it is."""
    for path, (part, value) in eager.values.items():
        other = wide.at(path)
        if part is Part.RNG and isinstance(value, Tensor) and not torch.equal(value, other):
            return "in float64 the step draws other random numbers"
        if part is Part.RESULT and isinstance(value, Tensor) and value.is_floating_point():
            if not isinstance(other, Tensor) or other.shape != value.shape:
                return "in float64 the step returns something else"
            largest = max(float(value.abs().max()) if value.numel() else 0.0, 1e-30)
            apart = (value.double() - other.to(value.device).double()).abs()
            if value.numel() and float(apart.nan_to_num(0.0).max()) > _SANE * largest:
                return "in float64 the step computes something else"
    return ""


class _InFloat64(DispatchMode):
    """Replaces dtypes that operators are asked for, and refuses results that are still narrower."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_widened, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype in _WIDE:
                raise NoReference(f"the step computes in {str(leaf.dtype).removeprefix('torch.')}")
        return result


def _widened(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
