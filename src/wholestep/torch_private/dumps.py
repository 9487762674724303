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


def module_that_registers(op: Any) -> str | None:
    """The module whose import makes an operator known; "" if torch's own does, None if nobody can tell.

    `OpOverload._defined_in_python` and the table of `torch.library.custom_op`. 2.11, 2.13.
    """
    from torch._library.custom_ops import OPDEFS

    if not op._defined_in_python or op.namespace in ("aten", "prims", "rngprims", "prim"):
        return ""
    made = OPDEFS.get(str(op._schema.name))
    module = None if made is None else str(made._init_fn.__module__)
    return None if module == "__main__" else module


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Give a tensor whose contents were put back the version that autograd knows it by. 2.11, 2.13.

    `torch._C._autograd._unsafe_set_version_counter`; a version that is right needs no call.
    """
    if tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
