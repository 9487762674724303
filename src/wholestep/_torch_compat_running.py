"""Private names of torch that running stages needs. Tried on 2.11 and 2.13."""

from __future__ import annotations

import torch


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd holds a tensor for a view: such a one cannot be detached in place."""
    return bool(tensor._is_view())
