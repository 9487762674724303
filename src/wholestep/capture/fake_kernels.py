"""Shapes of operators for which torch has no fake kernel, and which eager runs in ordinary models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _cudnn_rnn_backward(input: Tensor, weight: list[Tensor], stride: int, packed: Tensor, *rest: Any) -> Any:
    """Gradients of the input, of both hidden states and of every weight look like what they are gradients of."""
    hx, cx = rest[0], rest[1]
    grad_cx = torch.empty_like(cx) if cx is not None else torch.empty(0, dtype=input.dtype, device=input.device)
    return torch.empty_like(input), torch.empty_like(hx), grad_cx, [torch.empty_like(w) for w in weight]


FAKE_KERNELS: dict[Any, Callable[..., Any]] = {torch.ops.aten._cudnn_rnn_backward.default: _cudnn_rnn_backward}
