"""A lowered step as one CUDA graph: the graph is split into a host part and a device part, which is recorded.

    host      step counts on the CPU, scalars computed from them and from lr; the scalars of each region as one list;
              copies of CPU tensors to the GPU (`batch.to("cuda")` inside of the step)
    device    everything else: it reads tensors, and scalars that are constants of a recording

    call 1    runs the device part operator by operator, which loads and tunes kernels; the step is a real one
    call 2    records it (nothing runs), then replays the recording
    call 3..  runs the host part, copies batch and scalars into their buffers, replays

What would need the host in the middle of the device part is named in the error. Parameters and state are updated in
position: a recording is valid while their addresses stay the same. A scalar that is a constant of a recording (a weight
decay) has one recording per value, up to a few. Results are copied out, because the next replay overwrites them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import CudaGraphError, CudaGraphWarning
from wholestep.ir.effects import communicates, is_communication
from wholestep.ir.graph_functions import SIDE_EFFECTS
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.meta import node_meta
from wholestep.lower.scalar_inputs import pack_scalars
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.operators import OpOverload, op_name

log = logging.getLogger("wholestep.lower")

_MOST_RECORDINGS = 8
Program = Callable[..., Any]
MakeProgram = Callable[[fx.GraphModule], Program]


class GraphPool:
    """A memory pool that all recordings of a step share: only one of them runs at a time."""

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


@dataclass(eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    """Addresses of the inputs that are not copied."""
    outputs: tuple[Any, ...]
    is_new: list[bool]
    """For each output: True if it is in the memory of the recording; others are parameters, or views of them."""


def cuda_graph_step(
    gm: fx.GraphModule,
    batch: Sequence[int],
    pool: GraphPool,
    make_program: MakeProgram,
    *,
    must: bool,
) -> Program | None:
    """A function that runs a lowered graph by replaying its device part; None, with a warning, if that is not possible.

    `batch`: positions of the inputs that are new tensors at each call. `must`: raise instead of a warning.
    """
    try:
        split = split_host_and_device(gm)
    except NotRecordableError as problem:
        if must:
            raise _error(problem) from None
        if any(_is_on_cuda(node) for node in gm.graph.find_nodes(op="placeholder")):
            warnings.warn(CudaGraphWarning(f"this step runs without a CUDA graph: {problem}."), stacklevel=2)
        return None
    return CudaGraphStep(split, frozenset(batch), pool, make_program, must=must)


def _is_on_cuda(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_cuda


def _error(problem: NotRecordableError) -> CudaGraphError:
    node = problem.node
    return CudaGraphError(
        f"this step cannot be one CUDA graph: {problem}.",
        fix='use cuda_graph="auto" to run it without, or move that out of the step.',
        node="" if node is None else str(node.format_node()),
        location=None if node is None else node_meta(node).location,
    )


def _buffer_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class CudaGraphStep:
    """A step that replays its device part."""

    def __init__(
        self,
        split: HostDeviceSplit,
        batch: frozenset[int],
        pool: GraphPool,
        make_program: MakeProgram,
        *,
        must: bool,
    ) -> None:
        self._split = split
        self._host = make_program(split.host)
        self._device = make_program(split.device)
        self._pool = pool
        self._must = must
        self._copied = [i for i, position in enumerate(split.device_inputs) if position in batch]
        """Positions among the device inputs of the tensors that are copied into buffers."""
        self._in_place = [i for i, position in enumerate(split.device_inputs) if position not in batch]
        self._copied += range(len(split.device_inputs), len(split.device_inputs) + split.uploads)
        self._buffers: dict[Any, list[Tensor]] = {}
        """By the shapes of the batch: a step with dynamic sizes has one recording for each."""
        self._packs: list[Tensor] = []
        self._recordings: dict[tuple[Any, Any], _Recording] = {}
        """By the scalars that are constants of a recording, and the shapes of the batch."""
        self._warmed = False
        self._given_up = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        split = self._split
        lists, scalars, uploads, from_host = self._host(*map(inputs.__getitem__, split.host_inputs))
        tensors = [*map(inputs.__getitem__, split.device_inputs), *uploads]
        from_device = self._run(tensors, lists, scalars)
        found: dict[str, Sequence[Any]] = {"host": from_host, "device": from_device, "input": inputs}
        return tuple(value if kind == "value" else found[kind][value] for kind, value in split.outputs)

    def _run(self, tensors: list[Any], lists: Sequence[list[float]], scalars: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._given_up or not self._warmed:
            self._warmed = True
            packs = [
                torch.tensor(values, dtype=dtype).to(device)
                for values, (dtype, device, _) in zip(lists, self._split.packs, strict=True)
            ]
            found: tuple[Any, ...] = self._device(*tensors, *packs, *scalars)
            return found
        shapes = tuple((tensors[i].shape, tensors[i].stride()) for i in self._copied)
        buffers = self._fill(tensors, shapes, lists)
        addresses = list(map(Tensor.data_ptr, map(tensors.__getitem__, self._in_place)))
        key = (scalars, shapes)
        recording = self._recordings.get(key)
        if recording is None or recording.addresses != addresses:
            made = self._record(tensors, buffers, key, addresses)
            if made is None:
                return self._run(tensors, lists, scalars)
            recording = made
        recording.graph.replay()
        return tuple(
            value.clone() if is_new else value
            for value, is_new in zip(recording.outputs, recording.is_new, strict=True)
        )

    def _fill(self, tensors: list[Any], shapes: tuple[Any, ...], lists: Sequence[list[float]]) -> list[Tensor]:
        """Copy the batch and the scalars to where the recording reads them; returns the buffers of the batch."""
        buffers = self._buffers.get(shapes)
        if buffers is None:
            buffers = self._buffers[shapes] = [_buffer_like(tensors[i]) for i in self._copied]
        for buffer, i in zip(buffers, self._copied, strict=True):
            buffer.copy_(tensors[i], non_blocking=True)
        if not self._packs and self._split.packs:
            self._packs = [torch.empty(n, dtype=dtype, device=device) for dtype, device, n in self._split.packs]
        for pack, values in zip(self._packs, lists, strict=True):
            # Pageable memory: CUDA stages a few bytes of it at once, so it may be freed while the copy is pending.
            pack.copy_(torch.tensor(values, dtype=pack.dtype), non_blocking=True)
        return buffers

    def _record(
        self, tensors: list[Any], buffers: list[Tensor], key: tuple[Any, Any], addresses: list[int]
    ) -> _Recording | None:
        scalars = key[0]
        if len(self._recordings) >= _MOST_RECORDINGS and key not in self._recordings:
            names = ", ".join(self._split.scalars)
            what = f"one of its scalars ({names})" if names else "the shape of its batch"
            self._give_up(f"{what} changes again and again")
            return None
        inputs = list(tensors)
        for buffer, i in zip(buffers, self._copied, strict=True):
            inputs[i] = buffer
        graph = torch.cuda.CUDAGraph()
        self._recordings.pop(key, None)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="thread_local"):
                outputs = self._device(*inputs, *self._packs, *scalars)
        except RuntimeError as error:
            self._give_up(str(error).strip().splitlines()[0])
            return None
        state = {tensors[i].untyped_storage().data_ptr() for i in self._in_place}
        is_new = [isinstance(v, Tensor) and v.untyped_storage().data_ptr() not in state for v in outputs]
        recording = _Recording(graph, addresses, outputs, is_new)
        self._recordings[key] = recording
        log.info("recorded a CUDA graph (%d so far)", len(self._recordings))
        return recording

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._recordings.clear()
        self._buffers.clear()
        if self._must:
            raise _error(NotRecordableError(reason))
        warnings.warn(CudaGraphWarning(f"this step continues without a CUDA graph: {reason}."), stacklevel=2)


_TENSOR_LR = {
    "aten::_fused_adam_",
    "aten::_fused_adamw_",
    "aten::_fused_sgd_",
    "aten::_fused_adam",
    "aten::_fused_adamw",
    "aten::_fused_sgd",
}
"""Fused optimizers with an overload that reads the learning rate from a tensor."""


class NotRecordableError(Exception):
    """Why a graph cannot be recorded, and the node that prevents it."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True, eq=False)
class HostDeviceSplit:
    """The two graphs, and how values go from one to the other."""

    host: fx.GraphModule
    """Takes `host_inputs`; returns (packs as lists of scalars, scalars, tensors copied to the GPU, its part of the
    step's outputs)."""
    device: fx.GraphModule
    """Takes `device_inputs`, the copied tensors, one tensor per pack, then the scalars; returns its outputs."""
    host_inputs: tuple[int, ...]
    device_inputs: tuple[int, ...]
    packs: tuple[tuple[torch.dtype, torch.device, int], ...]
    """dtype, device and length of each pack."""
    uploads: int
    """How many tensors the host copies to the GPU."""
    scalars: tuple[str, ...]
    """Names of the scalars that are constants of a recording."""
    outputs: tuple[tuple[str, Any], ...]
    """For each output of the step: ("host", i), ("device", i), ("input", position) or ("value", constant)."""


def split_host_and_device(gm: fx.GraphModule) -> HostDeviceSplit:
    """Split a graph in two; raises NotRecordableError if that is not possible."""
    _read_lr_from_tensors(gm.graph)
    return _Splitter(gm).run()


def _read_lr_from_tensors(graph: fx.Graph) -> None:
    """Let fused optimizers read the learning rate from a tensor, so that a schedule needs no new recording."""
    for node in list(graph.nodes):
        lr = node.kwargs.get("lr")
        if not isinstance(lr, fx.Node) or not isinstance(node.target, OpOverload):
            continue
        name = op_name(node.target)
        device = _cuda_device(node.all_input_nodes)
        if name not in _TENSOR_LR or isinstance(lr.meta.get("val"), Tensor) or device is None:
            continue
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        with graph.inserting_before(node):
            pack = graph.call_function(pack_scalars, ([lr], torch.float32, device))
        node.target = packet.tensor_lr
        node.kwargs = {**node.kwargs, "lr": pack}


def _cuda_device(nodes: Iterable[fx.Node]) -> torch.device | None:
    return next((val.device for node in nodes for val in tensors_in(node.meta.get("val")) if val.is_cuda), None)


class _Splitter:
    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._nodes = list(gm.graph.nodes)
        self._on_device: set[fx.Node] = set()
        self._packs: list[fx.Node] = []
        self._uploads: list[fx.Node] = []
        """Copies of host tensors to the GPU: run by the host part, inputs of the device part."""

    def run(self) -> HostDeviceSplit:
        for node in self._nodes:
            if node.target is pack_scalars:
                self._packs.append(node)
            elif self._is_upload(node):
                self._uploads.append(node)
            elif node.op != "output" and self._is_device(node):
                self._on_device.add(node)
        if not self._on_device:
            raise NotRecordableError("the step does nothing on a CUDA device")
        scalars = self._check_edges()
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        results = self._nodes[-1].args[0]
        assert isinstance(results, tuple | list)
        outputs, from_host, from_device = self._sort_outputs(results, inputs)
        host = self._host_graph(inputs, scalars, from_host)
        device = self._device_graph(inputs, scalars, from_device)
        return HostDeviceSplit(
            lazy_graph_module(self._gm, host, "WholeStepHost"),
            lazy_graph_module(self._gm, device, "WholeStepDevice"),
            tuple(i for i, node in enumerate(inputs) if node not in self._on_device),
            tuple(i for i, node in enumerate(inputs) if node in self._on_device),
            tuple((n.args[1], n.args[2], len(n.args[0])) for n in self._packs),  # type: ignore[arg-type, misc]
            len(self._uploads),
            tuple(node.name for node in scalars),
            tuple(outputs),
        )

    def _is_upload(self, node: fx.Node) -> bool:
        if node.target is not torch.ops.aten._to_copy.default or not _on_gpu(node):
            return False
        return not any(source in self._on_device or _on_gpu(source) for source in node.all_input_nodes)

    def _is_device(self, node: fx.Node) -> bool:
        if any(source in self._on_device or self._is_handed_over(source) for source in node.all_input_nodes):
            return True
        return _on_gpu(node)

    def _is_handed_over(self, node: fx.Node) -> bool:
        return node in self._packs or node in self._uploads

    def _check_edges(self) -> list[fx.Node]:
        """The scalars that the device part takes as constants; raises if a tensor would cross."""
        scalars: dict[fx.Node, None] = {}
        for node in self._nodes:
            if node.op == "output":
                continue
            if node in self._on_device:
                _check_device(node)
                for source in node.all_input_nodes:
                    if source in self._on_device or self._is_handed_over(source):
                        continue
                    if _holds_tensors(source):
                        raise NotRecordableError(f"{node.name} reads {source.name}, which is on the CPU", node)
                    scalars[source] = None
            elif any(source in self._on_device or source in self._uploads for source in node.all_input_nodes):
                raise NotRecordableError(f"{node.name} is computed on the host from a value on the GPU", node)
        return list(scalars)

    def _sort_outputs(
        self, results: Iterable[Any], inputs: list[fx.Node]
    ) -> tuple[list[tuple[str, Any]], list[fx.Node], list[fx.Node]]:
        position = {node: i for i, node in enumerate(inputs)}
        outputs: list[tuple[str, Any]] = []
        from_host: list[fx.Node] = []
        from_device: list[fx.Node] = []
        for value in results:
            if not isinstance(value, fx.Node):
                outputs.append(("value", value))
            elif value in position:
                outputs.append(("input", position[value]))
            elif value in self._on_device or value in self._uploads:
                outputs.append(("device", len(from_device)))
                from_device.append(value)
            else:
                outputs.append(("host", len(from_host)))
                from_host.append(value)
        return outputs, from_host, from_device

    def _host_graph(self, inputs: list[fx.Node], scalars: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._nodes:
            if node.op != "output" and node not in self._on_device and node not in self._packs:
                env[node] = _copied(graph, node, env)
        lists = [[env.get(n, n) if isinstance(n, fx.Node) else n for n in p.args[0]] for p in self._packs]  # type: ignore[union-attr]
        parts = (scalars, self._uploads, results)
        graph.output((tuple(lists), *(tuple(env[n] for n in part) for part in parts)))
        return graph

    def _device_graph(self, inputs: list[fx.Node], scalars: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            if node in self._on_device:
                env[node] = _copied(graph, node, env)
        for node in self._uploads:
            env[node] = graph.placeholder(node.name)
        for number, node in enumerate(self._packs):
            env[node] = graph.placeholder(f"scalars_{number}")
        for node in scalars:
            env[node] = graph.placeholder(node.name)
        for node in self._nodes:
            if node in self._on_device and node.op != "placeholder":
                env[node] = _copied(graph, node, env)
        graph.output(tuple(env[node] for node in results))
        return graph


def _copied(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    new = graph.node_copy(node, env.__getitem__)
    new.meta = node.meta
    return new


def _check_device(node: fx.Node) -> None:
    if node.target in SIDE_EFFECTS:
        raise NotRecordableError(f"{node.name} reads or sets the state of a random generator", node)
    if is_communication(node.target) or communicates(node):
        raise NotRecordableError(f"{node.name} communicates between ranks", node)
    if node.op == "call_function" and any(val.device.type == "cpu" for val in tensors_in(node.meta.get("val"))):
        raise NotRecordableError(f"{node.name} copies a value from the GPU to the CPU", node)
    if isinstance(node.target, OpOverload) and torch.Tag.dynamic_output_shape in node.target.tags:
        raise NotRecordableError(f"the shape of {node.name} depends on data", node)
    if node.op == "call_function" and not _holds_tensors(node) and _is_read(node):
        raise NotRecordableError(f"{node.name} reads a scalar from the GPU", node)


def _holds_tensors(node: fx.Node) -> bool:
    return next(tensors_in(node.meta.get("val")), None) is not None


def _on_gpu(node: fx.Node) -> bool:
    return any(val.is_cuda for val in tensors_in(node.meta.get("val")))


def _is_read(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and op_name(node.target) in ("aten::_local_scalar_dense", "aten::item")
