"""Private names of torch that repros and the debugging bench need."""

from __future__ import annotations

from typing import Any

import torch


def operator_namespace(value: object) -> str | None:
    """`aten` of `torch.ops.aten`; None of anything else (`torch._ops._OpNamespace`). 2.11, 2.13."""
    return str(value.name) if isinstance(value, torch._ops._OpNamespace) else None


def shape_env_of_trace() -> Any:
    """The symbols of the trace that runs now, None where sizes are plain numbers (`detect_fake_mode`). 2.11, 2.13."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode()
    return None if mode is None else mode.shape_env


def symbols_by_value(env: Any) -> dict[int, Any]:
    """The symbol that stands for each size: equal sizes have one (`ShapeEnv.val_to_var`). 2.11, 2.13."""
    return {int(value): symbol for value, symbol in env.val_to_var.items()}
