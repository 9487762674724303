"""`ctc_loss` with its mean written out: torch's own makes a tensor of the lengths in C++, which has no data in a trace.

Only for lengths that are numbers. They are part of what the graph was made for; lengths in tensors are data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

CTC_LOSSES = (F.ctc_loss, torch.ctc_loss)
_NAMES = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")


def ctc_loss(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What `F.ctc_loss` or `torch.ctc_loss` gives."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    none, mean, default = ("none", "mean", "mean") if function is F.ctc_loss else (0, 1, 0)
    lengths = given.get("target_lengths")
    if given.get("reduction", default) != mean or not _are_numbers(lengths):
        return function(*args, **kwargs)
    losses: Tensor = function(**(given | {"reduction": none}))
    counts = torch.tensor(list(lengths), dtype=losses.dtype, device=losses.device)
    return (losses / counts.clamp_min(1)).mean()


def _are_numbers(lengths: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(lengths, Sequence) and all(isinstance(length, int) for length in lengths)
