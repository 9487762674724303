"""Roofline cost model: the work of an operator from its shapes, and the time a machine takes for it.

    arithmetic = flops / speed        traffic = bytes read and written / bandwidth

`Machine.seconds` is the larger of the two (a kernel that overlaps them); `seconds_in_turn` is their sum, which still
tells apart two compute-bound operators of which one reads more. Launch overhead (`launch`) is left to the caller.

torch counts the arithmetic of the operators that autograd produces (`flop_registry`: matmul, convolution, attention).
Here the composite operators that decompose into those are counted too; all others have zero flops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import size_hint, tensor_bytes
from wholestep.simulate.machine import Work
from wholestep.torch_private.operators import OpOverload, op_name, packet_of

T = TypeVar("T")


def timed(run: Callable[[], T], device: torch.device | None) -> tuple[float, T]:
    """The seconds that a function takes, with the device synchronised before and after, and its result."""
    _finish(device)
    begin = perf_counter()
    result = run()
    _finish(device)
    return perf_counter() - begin, result


def _finish(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def work_of(node: fx.Node) -> Work:
    """The work of a node with metadata; symbolic sizes take their values in the traced call."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    first = next(tensors_in(values[0]), None)
    moved = sum(tensor_bytes(tensor) for value in values for tensor in tensors_in(value))
    return Work(flops_of(node), moved, half=first is not None and first.dtype.itemsize == 2)


def work_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """The work of a call that has just run; its tensors have concrete sizes."""
    count = flop_registry.get(packet_of(target))
    flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=result))
    moved = sum(tensor.numel() * tensor.element_size() for tensor in _tensors((args, kwargs, result)))
    return Work(flops, moved)


def is_counted(target: Any) -> bool:
    """True for the operators that dominate the time of a step: matmul, convolution, attention."""
    return isinstance(target, OpOverload) and packet_of(target) in flop_registry


def flops_of(node: fx.Node) -> float:
    """Multiplications and additions of matmul, convolution, attention and recurrent layers; 0 for all others."""
    if not isinstance(node.target, OpOverload):
        return 0.0
    count = flop_registry.get(packet_of(node.target))
    if count is not None:
        return _by_torch(count, node)
    name = op_name(node.target).split(".")[0]
    composite = _COMPOSITE_FLOPS.get("aten::conv" if name.startswith("aten::conv") else name)
    return 0.0 if composite is None else composite(node)


def _by_torch(count: Callable[..., Any], node: fx.Node) -> float:
    value = node.meta.get("val")
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: _sized(each.meta.get("val")))
    try:
        return float(count(*args, **kwargs, out_val=_sized(value)))
    except (TypeError, ValueError, AttributeError, IndexError):
        # Not a signature that the counter supports: one operation per output element.
        return float(size_hint(value.numel())) if isinstance(value, Tensor) else 0.0


def _sized(value: Any) -> Any:
    """A value on the meta device, with symbolic sizes replaced by their hints."""
    if isinstance(value, list | tuple):
        return tuple(_sized(item) for item in value)
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, Tensor):
        return value
    return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")


def _matmul(node: fx.Node) -> float:
    row = _shape(node.args[0])
    return 2.0 * math.prod(_shape(node)) * (row[-1] if row else 1)


def _convolution(node: fx.Node) -> float:
    source, weight = _shape(node.args[0]), _shape(node.args[1])
    if not weight:
        return 0.0
    positions = math.prod(source if "transpose" in str(node.target) else _shape(node))
    return 2.0 * positions * math.prod(weight) / weight[0]


def _attention(node: fx.Node) -> float:
    queries, keys = _shape(node.args[0]), _shape(node.args[1])
    return 4.0 * math.prod(queries) * keys[-2] if len(keys) > 1 else 0.0


def _recurrent(node: fx.Node) -> float:
    weights = [math.prod(_shape(arg)) for arg in node.all_input_nodes if arg.op == "get_attr"]
    return 2.0 * math.prod(_shape(node.args[0])[:2]) * sum(weights)


_COMPOSITE_FLOPS: dict[str, Callable[[fx.Node], float]] = {
    "aten::linear": _matmul,
    "aten::matmul": _matmul,
    "aten::conv": _convolution,
    "aten::scaled_dot_product_attention": _attention,
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), _recurrent),
}


def _shape(value: Any) -> list[int]:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return [size_hint(size) for size in found.shape] if isinstance(found, Tensor) else []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif isinstance(value, list | tuple):
        yield from (tensor for item in value for tensor in _tensors(item))
