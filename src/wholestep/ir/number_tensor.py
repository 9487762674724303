"""A tensor of Python numbers some of which are inputs of the graph: `torch.tensor([lr, 0.5, k])`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def number_tensor(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor of nested lists of numbers, made at each run."""
    return torch.tensor(numbers, dtype=dtype, device=device)
