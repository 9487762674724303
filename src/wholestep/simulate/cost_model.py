"""How long each node of a step takes: a roofline of the work of its operator, and which operators are fused.

    arithmetic = flops / speed        traffic = bytes read and written / bandwidth

`Machine.seconds` is the larger of the two (a kernel that overlaps them); `seconds_in_turn` is their sum, which still
tells apart two compute-bound operators of which one reads more. Launch overhead (`launch`) is left to the caller.

torch counts the arithmetic of the operators that autograd produces (`flop_registry`: matmul, convolution, attention).
Here the composite operators that decompose into those are counted too; all others have zero flops.

Times of a step, in microseconds:

    matrix products, attention      the longer of arithmetic and traffic
    pointwise, reductions, copies   fused where one feeds another, as Inductor does: a read is paid only if what is read
                                    was not made by such an operator, a write only if something else reads it
    gathers of rows (embedding)     the rows that are taken, not the table
    collectives                     the machine's table, or its fit
    views, sizes, waits             nothing

Fusion follows the flow of data, never the order of nodes: reordering a graph does not change its total computation, a
rewrite that adds copies pays for them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from wholestep.ir.call_arguments import argument, arguments_by_name
from wholestep.ir.effects import may_write, stored_in, written_inputs
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import size_hint, tensor_bytes
from wholestep.simulate.machine import GroupSpread, Machine, Work, plain_kind
from wholestep.simulate.step_index import COMPUTE, FREE, ISSUE, READ, StepIndex, plain
from wholestep.torch_private.distributed import process_group_ranks
from wholestep.torch_private.operators import OpOverload, op_name, packet_of, plain_name

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


_MICRO = 1e6
_FUSED_NAMES = frozenset(
    "convert_element_type _to_copy copy copy_ clone cat stack full full_like zeros zeros_like ones ones_like new_zeros "
    "new_full new_ones scalar_tensor arange iota where constant_pad_nd slice_scatter select_scatter sum mean amax amin "
    "prod var var_mean _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward fill fill_ zero_ nll_loss_forward "
    "nll_loss_backward repeat flip roll".split()
)
_ROW_READS = frozenset("index embedding gather index_select".split())
_ROW_WRITES = frozenset("index_put index_put_ scatter_add scatter scatter_add_ embedding_dense_backward".split())

FUSED, ROWS_READ, ROWS_WRITTEN, COUNTED, OTHER = range(5)


@lru_cache(maxsize=4096)
def class_of(target: Any) -> int:
    """What limits an operator that computes."""
    if not isinstance(target, OpOverload):
        return OTHER
    name = plain_name(target).split("::")[-1]
    if is_counted(target):
        return COUNTED
    if torch.Tag.pointwise in target.tags or name in _FUSED_NAMES or name.startswith(("_foreach_", "_fused_adam")):
        return FUSED
    if name in _ROW_READS:
        return ROWS_READ
    return ROWS_WRITTEN if name in _ROW_WRITES else OTHER


COMPUTED, ATTENTION, ATTENTION_BACKWARD, COLLECTIVE, HOST = (
    "computed",
    "attention",
    "attention backward",
    "collective",
    "host",
)


@dataclass(frozen=True)
class NodeWork:
    """What a node has to do, on whatever machine."""

    what: str
    """One of the names above."""
    operator: str
    """The operator, or the kind of a collective."""
    moved: int = 0
    """Bytes read and written; of a collective, the bytes that a rank puts in."""
    flops: float = 0.0
    half: bool = False
    launches: bool = True
    """False for a pointwise operator that is computed inside of the kernels of its readers."""
    spread: GroupSpread | None = None
    """Of a collective, how its group lies on nodes."""

    def seconds(self, machine: Machine) -> float:
        """The time that a machine takes, without corrections."""
        if self.what == COLLECTIVE:
            assert self.spread is not None
            return machine.collectives.seconds(self.operator, self.spread, self.moved)
        if self.what == HOST:
            return machine.host_read
        rate = machine.rate(self.half)
        if self.half and self.what == ATTENTION:
            rate = machine.attention or rate
        elif self.half and self.what == ATTENTION_BACKWARD:
            rate = machine.attention_backward or rate
        return max(self.flops / rate, self.moved / machine.memory, machine.launch if self.launches else 0.0)


def node_costs(index: StepIndex, machine: Machine, spreads: Mapping[str, GroupSpread] | None = None) -> list[float]:
    """Microseconds of every node. `spreads`: how groups lie on nodes, where torch.distributed does not know."""
    factors = machine.correction
    found: list[float] = []
    for node, work in zip(index.nodes, node_works(index, machine, spreads), strict=True):
        if work is None:
            found.append(0.0)
            continue
        seconds = work.seconds(machine)
        if factors:
            seconds *= factors.get(key_of(node), factors.get(work.operator, 1.0))
        found.append(seconds * _MICRO)
    return found


def node_works(
    index: StepIndex, machine: Machine, spreads: Mapping[str, GroupSpread] | None = None
) -> list[NodeWork | None]:
    """The work of every node; None where nothing runs. Of the machine only the size of its nodes is asked."""
    return _Works(index, machine, dict(spreads or {})).all()


def key_of(node: fx.Node) -> str:
    """An operator with the shapes and dtypes that its time depends on; measured times are kept by it."""
    shown = []
    for source in node.all_input_nodes:
        for tensor in tensors_in(source.meta.get("val")):
            sizes: list[Any] = list(tensor.shape)
            shown.append(f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(str(size_hint(s)) for s in sizes)}]")
    return f"{operator_key(node)}({', '.join(shown)})"


def operator_key(node: fx.Node) -> str:
    """The operator alone."""
    return op_name(node.target) if isinstance(node.target, OpOverload) else plain(node.target)


def spread_of(name: str, ranks: int, machine: Machine, spreads: Mapping[str, GroupSpread] | None = None) -> GroupSpread:
    """How a process group lies on nodes: as told, as torch.distributed knows, or side by side."""
    known = (spreads or {}).get(name)
    return known or machine.spread(process_group_ranks(name) or ranks)


def sent_bytes(node: fx.Node) -> int:
    """The bytes that a rank puts into a collective."""
    given = {key: value for key, value in arguments_by_name(node).items() if key != "out"}
    sources: dict[fx.Node, None] = {}
    fx.map_arg(given, sources.setdefault)
    return sum(element_bytes(t) for source in sources for t in tensors_in(source.meta.get("val")))


def element_bytes(tensor: Tensor) -> int:
    """The bytes of the elements of a tensor: of an expanded one each only once, of a slice not what lies between."""
    count = tensor.element_size()
    for size in tensor.shape:
        count *= size if type(size) is int else size_hint(size)
    return min(count, tensor_bytes(tensor))


class _Works:
    def __init__(self, index: StepIndex, machine: Machine, spreads: dict[str, GroupSpread]) -> None:
        self._index = index
        self._spread = [
            spread_of(name, ranks, machine, spreads)
            for name, ranks in zip(index.groups, index.group_ranks, strict=True)
        ]
        self._bytes = [sum(map(element_bytes, tensors_in(node.meta.get("val")))) for node in index.nodes]
        self._fused = [
            kind == COMPUTE and class_of(node.target) == FUSED
            for kind, node in zip(index.kind, index.nodes, strict=True)
        ]
        self._base = self._bases()
        self._read_elsewhere = self._reads()
        self._flops: dict[Any, float] = {}

    def all(self) -> list[NodeWork | None]:
        index = self._index
        return [self._one(i) if kind in (COMPUTE, ISSUE, READ) else None for i, kind in enumerate(index.kind)]

    def _bases(self) -> list[int]:
        """The node that made what each node shows, behind views."""
        index = self._index
        base = list(range(len(index)))
        for i, kind in enumerate(index.kind):
            if kind != FREE or not index.sources[i]:
                continue
            node = index.nodes[i]
            shown = [index.nodes[index.sources[i][0]]] if node.target is operator.getitem else stored_in(node)
            if shown:
                base[i] = base[index.number[shown[0]]]
        return base

    def _reads(self) -> list[bool]:
        """Whether something that is not fused reads a node, directly or through views."""
        index, fused = self._index, self._fused
        found = [False] * len(index)
        for i, kind in enumerate(index.kind):
            if fused[i] or kind == FREE:
                continue
            for source in index.sources[i]:
                found[source] = True
        for i in range(len(index) - 1, -1, -1):
            if index.kind[i] == FREE and found[i]:
                for source in index.sources[i]:
                    found[source] = True
        return found

    def _one(self, i: int) -> NodeWork:
        index = self._index
        node = index.nodes[i]
        if index.kind[i] == ISSUE:
            spread = self._spread[index.group[i]]
            return NodeWork(COLLECTIVE, plain_kind(plain(node.target)), sent_bytes(node), spread=spread)
        if index.kind[i] == READ:
            return NodeWork(HOST, operator_key(node))
        kind = class_of(node.target)
        if kind == FUSED:
            return self._fused_work(i, node)
        size, sources, out = self._bytes, index.sources[i], self._bytes[i]
        if kind == ROWS_READ and sources:
            moved = 2 * out + sum(size[source] for source in sources[1:])
        elif kind == ROWS_WRITTEN and sources:
            moved = size[sources[0]] + out + 2 * sum(size[source] for source in sources[1:])
        else:
            moved = sum(size[source] for source in sources) + out
        if kind != COUNTED:
            return NodeWork(COMPUTED, operator_key(node), moved)
        return self._counted(node, moved)

    def _fused_work(self, i: int, node: fx.Node) -> NodeWork:
        index, size = self._index, self._bytes
        overwritten: set[int] = set()
        writes = self._read_elsewhere[i] or not index.users[i]
        if may_write(node.target):
            writes = True
            if plain(node.target) == "copy_":  # does not read what it overwrites
                overwritten = {index.number[source] for source in written_inputs(node)}
        read = [s for s in index.sources[i] if s not in overwritten and not self._fused[self._base[s]]]
        moved = sum(size[s] for s in read) + (size[i] if writes else 0)
        return NodeWork(COMPUTED, operator_key(node), moved, launches=writes)

    def _counted(self, node: fx.Node, moved: int) -> NodeWork:
        """By operator and shapes: torch's counter runs once for equal calls."""
        key = (node.target, _layout(node.args), _layout(tuple(node.kwargs.values())))
        if key not in self._flops:
            causal = argument(node, "is_causal") is True
            self._flops[key] = flops_of(node) / (2 if causal else 1)
        first = next((t for source in node.all_input_nodes for t in tensors_in(source.meta.get("val"))), None)
        half = first is not None and first.dtype.itemsize <= 2
        what, name = COMPUTED, plain(node.target)
        if "attention" in name:
            what = ATTENTION_BACKWARD if "backward" in name else ATTENTION
        return NodeWork(what, operator_key(node), moved, self._flops[key], half)


def _layout(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):
        return (value.dtype, tuple(map(size_hint, value.shape)))
    if isinstance(value, list | tuple):
        return tuple(map(_layout, value))
    return value if isinstance(value, bool | int | str | None) else str(value)
