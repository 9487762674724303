"""How long an operator takes, roughly, in nanoseconds: only the order of operators by time per byte matters.

    time = floating point operations / speed + bytes read and written / bandwidth

Operators that Inductor fuses into their readers cost a part of that: they read, and mostly write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from wholestep._torch_compat import OpOverload, packet_of
from wholestep.ir.graphs import tensors_in
from wholestep.memory.stand_in import stand_in
from wholestep.memory.storage import tensor_bytes


@dataclass(frozen=True)
class Machine:
    """Speeds in operations and bytes per nanosecond."""

    flops: float
    half_flops: float
    bandwidth: float


_CPU = Machine(flops=50.0, half_flops=50.0, bandwidth=10.0)
_GPU = Machine(flops=50_000.0, half_flops=500_000.0, bandwidth=3_000.0)
_FUSED = 0.25
_LAUNCH = 100.0


def time_of(node: fx.Node, *, fuses: bool) -> float:
    """Nanoseconds of a node. `fuses`: what is elementwise will be a part of other kernels."""
    value = node.meta.get("val")
    first = next(tensors_in(value), None)
    if first is None:
        return 1.0
    machine = _CPU if first.device.type == "cpu" else _GPU
    moved = sum(map(tensor_bytes, tensors_in(value)))
    moved += sum(tensor_bytes(t) for source in node.all_input_nodes for t in tensors_in(source.meta.get("val")))
    flops = _flops(node, value)
    if flops:
        speed = machine.half_flops if first.dtype.itemsize == 2 else machine.flops
        return _LAUNCH + flops / speed + moved / machine.bandwidth
    if fuses and is_elementwise(node.target):
        return 1.0 + _FUSED * moved / machine.bandwidth
    return _LAUNCH + moved / machine.bandwidth


def is_elementwise(target: Any) -> bool:
    """Whether an operator computes each element by itself, so that it is fused with its readers."""
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or str(target) in _ALSO_ELEMENTWISE)


def is_fused(target: Any) -> bool:
    """Whether Inductor writes an operator as loops of its own, which it joins with those around."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or computes(target):
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


def computes(target: Any) -> bool:
    """Whether an operator is one of those that take most of the time: matrices, convolutions, attention."""
    return isinstance(target, OpOverload) and packet_of(target) in flop_registry


_META = torch.device("meta")


def _form(node: fx.Node) -> Any:
    return stand_in(node, _META)


def _flops(node: fx.Node, value: Any) -> float:
    if not isinstance(node.target, OpOverload):
        return 0.0
    count = flop_registry.get(packet_of(node.target))
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _form)
    try:
        return float(count(*args, **kwargs, out_val=stand_in(value, _META)))
    except (TypeError, ValueError, AttributeError, IndexError):
        # Not the form that the counter knows: as much as reading everything once for each element of a row.
        return float(value.numel() if isinstance(value, Tensor) else 0)
