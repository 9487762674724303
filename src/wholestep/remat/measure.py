"""How much memory a call really had: the CUDA allocator's own count, or what the CPU allocator handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholestep.torch_private.allocator import cpu_bytes_at_most
from wholestep.torch_private.autograd import is_profiling


def bytes_at_most(function: Callable[[], Any], device: torch.device) -> tuple[Any, int | None]:
    """What a call returns, and the most bytes on `device` during it, above those before it.

    None while a profiler runs, which counts for somebody else. On CUDA this resets the allocator's peak.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if is_profiling():
        return function(), None
    return cpu_bytes_at_most(function)


def held_bytes(inputs: list[Any], device: torch.device) -> int:
    """What the inputs of a step take on `device`; memory that two of them share counts once."""
    found: dict[int, int] = {}
    for value in inputs:
        if isinstance(value, Tensor) and value.device == device:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(found.values())
