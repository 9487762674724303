"""Private names of torch that repros and the debugging bench need."""

from __future__ import annotations

import torch


def operator_namespace(value: object) -> str | None:
    """`aten` of `torch.ops.aten`; None of anything else (`torch._ops._OpNamespace`). 2.11, 2.13."""
    return str(value.name) if isinstance(value, torch._ops._OpNamespace) else None
