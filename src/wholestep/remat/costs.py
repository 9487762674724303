"""How long an operator takes, roughly, in nanoseconds: only the order of operators by time per byte matters.

Operators that Inductor fuses into their readers cost a part of what they would alone: they read, and mostly write
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.ir.graphs import tensors_in
from wholestep.simulate.cost_model import is_counted, machine_of, work_of
from wholestep.torch_private.operators import OpOverload, packet_of

_FUSED = 0.25
_NANO = 1e9


def time_of(node: fx.Node, *, fuses: bool) -> float:
    """Nanoseconds of a node. `fuses`: what is elementwise will be a part of other kernels."""
    first = next(tensors_in(node.meta.get("val")), None)
    if first is None:
        return 1.0
    machine, work = machine_of(first.device), work_of(node)
    time = _NANO * machine.seconds_in_turn(work)
    if fuses and not work.flops and is_elementwise(node.target):
        return 1.0 + _FUSED * time
    return _NANO * machine.launch + time


def is_elementwise(target: Any) -> bool:
    """Whether an operator computes each element by itself, so that it is fused with its readers."""
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or str(target) in _ALSO_ELEMENTWISE)


def is_fused(target: Any) -> bool:
    """Whether Inductor writes an operator as loops of its own, which it joins with those around."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or is_counted(target):
        return False
    return packet_of(target) not in _CALLED


_CALLED = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "sort topk cumsum cumprod index_put _unsafe_index_put scatter scatter_add scatter_reduce "
        "embedding_dense_backward native_batch_norm_backward bernoulli nonzero unique histc bincount"
    ).split()
    if hasattr(torch.ops.aten, name)
)
"""Kernels that Inductor calls: their inputs and results are whole tensors."""

_ALSO_ELEMENTWISE = frozenset(
    {"aten._to_copy.default", "prims.convert_element_type.default", "aten.gelu.default", "aten.silu.default"}
)
