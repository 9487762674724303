"""What operators give for tensors without data, where torch has no rule or a wrong one. Geometry only.

Each rule gets the arguments of the operator and runs on fake tensors. None: torch's own rule has an error to raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_EXPERT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor | None:
    """Matrices of experts: float32 and float16 too, rows padded to 16 bytes on every device. torch's rule refuses the
    first and knows the second only where torch is built for CUDA."""
    ragged = a.dim() == 2 or b.dim() == 2
    if a.dtype not in _EXPERT_DTYPES or bias is not None or ragged == (offs is None):
        return None
    groups = offs.size(0) if ragged else a.size(0)
    rows, columns = a.size(-2), b.size(-1)
    whole = 16 // (out_dtype or a.dtype).itemsize
    padded = (columns + whole - 1) // whole * whole
    size: tuple[int, ...] = (rows, columns)
    stride: tuple[int, ...] = (padded, 1)
    if a.dim() == b.dim():
        size, stride = (groups, *size), (rows * padded, *stride)
    return torch.empty_strided(size, stride, dtype=out_dtype or a.dtype, device=a.device)


def _cudnn_rnn_backward(input: Tensor, weight: list[Tensor], stride: int, packed: Tensor, *rest: Any) -> Any:
    """Gradients of the input, of both hidden states and of every weight look like what they are gradients of."""
    hx, cx = rest[0], rest[1]
    grad_cx = torch.empty_like(cx) if cx is not None else torch.empty(0, dtype=input.dtype, device=input.device)
    return torch.empty_like(input), torch.empty_like(hx), grad_cx, [torch.empty_like(w) for w in weight]


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int], *rest: Any
) -> tuple[Tensor, Tensor] | None:
    """Lengths that are numbers say all sizes: one loss per sequence, and a table over the states of the longest."""
    if log_probs.dim() != 3 or len(target_lengths) != log_probs.size(1):
        return None
    frames, batch, _ = log_probs.shape
    states = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, states)


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


RULES: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
}
