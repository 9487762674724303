"""Tensors that look like the values of a graph and mean nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from wholestep._torch_compat_memory import size_hint


def stand_in(value: Any, device: torch.device | None = None) -> Any:
    """A tensor of zeros (which are good as indices too) for a node or a fake tensor, or a list of them."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, list | tuple):
        return type(value)(stand_in(item, device) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, Tensor):
        return value
    shape, stride = [size_hint(n) for n in value.shape], [size_hint(n) for n in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=device or value.device)
    return made if made.is_meta else made.zero_()
