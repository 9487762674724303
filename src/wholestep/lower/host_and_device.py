"""A lowered graph as two: what runs on the host first, and what only launches work on the GPU.

    host      step counts on the CPU, numbers computed from them and from lr; the numbers of each region as one list;
              copies of CPU tensors to the GPU (`batch.to("cuda")` inside of the step)
    device    everything else: it sees tensors, and numbers that are constants as long as they do not change

Only the second can be recorded. What would need the host in the middle is named instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import communicates, is_communication
from wholestep.ir.graphs import tensors_in
from wholestep.ir.rng import SIDE_EFFECTS
from wholestep.lower.scalars import pack_numbers
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.operators import OpOverload, op_name

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
    """Why a graph cannot be recorded, and the node that is in the way."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True, eq=False)
class Split:
    """The two graphs and how values go from one to the other."""

    host: fx.GraphModule
    """Takes `host_inputs`; returns (packs as lists of numbers, numbers, what it copied to the GPU, its part of the
    step's outputs)."""
    device: fx.GraphModule
    """Takes `device_inputs`, what the host copied, one tensor per pack, then the numbers; returns its outputs."""
    host_inputs: tuple[int, ...]
    device_inputs: tuple[int, ...]
    packs: tuple[tuple[torch.dtype, torch.device, int], ...]
    """dtype, device and length of each."""
    uploads: int
    """How many tensors the host copies to the GPU."""
    numbers: tuple[str, ...]
    """Names of the numbers that a recording has as constants."""
    outputs: tuple[tuple[str, Any], ...]
    """Of each output of the step: ("host", i), ("device", i), ("input", place) or ("value", constant)."""


def split_host_and_device(gm: fx.GraphModule) -> Split:
    """Cut a graph in two; raises NotRecordableError where that cannot be."""
    _read_lr_from_tensors(gm.graph)
    return _Splitter(gm).run()


def _read_lr_from_tensors(graph: fx.Graph) -> None:
    """A schedule then needs no new recording."""
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
            pack = graph.call_function(pack_numbers, ([lr], torch.float32, device))
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
        """Copies of host tensors to the GPU: made on the host, inputs of the device part."""

    def run(self) -> Split:
        for node in self._nodes:
            if node.target is pack_numbers:
                self._packs.append(node)
            elif self._is_upload(node):
                self._uploads.append(node)
            elif node.op != "output" and self._is_device(node):
                self._on_device.add(node)
        if not self._on_device:
            raise NotRecordableError("the step does nothing on a CUDA device")
        numbers = self._check_edges()
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        results = self._nodes[-1].args[0]
        assert isinstance(results, tuple | list)
        outputs, from_host, from_device = self._sort_outputs(results, inputs)
        host = self._host_graph(inputs, numbers, from_host)
        device = self._device_graph(inputs, numbers, from_device)
        return Split(
            lazy_graph_module(self._gm, host, "WholeStepHost"),
            lazy_graph_module(self._gm, device, "WholeStepDevice"),
            tuple(i for i, node in enumerate(inputs) if node not in self._on_device),
            tuple(i for i, node in enumerate(inputs) if node in self._on_device),
            tuple((n.args[1], n.args[2], len(n.args[0])) for n in self._packs),  # type: ignore[arg-type, misc]
            len(self._uploads),
            tuple(node.name for node in numbers),
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
        """The numbers that the device part takes as constants; raises where more than numbers would cross."""
        numbers: dict[fx.Node, None] = {}
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
                    numbers[source] = None
            elif any(source in self._on_device or source in self._uploads for source in node.all_input_nodes):
                raise NotRecordableError(f"{node.name} is computed on the host from a value on the GPU", node)
        return list(numbers)

    def _sort_outputs(
        self, results: Iterable[Any], inputs: list[fx.Node]
    ) -> tuple[list[tuple[str, Any]], list[fx.Node], list[fx.Node]]:
        place = {node: i for i, node in enumerate(inputs)}
        outputs: list[tuple[str, Any]] = []
        from_host: list[fx.Node] = []
        from_device: list[fx.Node] = []
        for value in results:
            if not isinstance(value, fx.Node):
                outputs.append(("value", value))
            elif value in place:
                outputs.append(("input", place[value]))
            elif value in self._on_device or value in self._uploads:
                outputs.append(("device", len(from_device)))
                from_device.append(value)
            else:
                outputs.append(("host", len(from_host)))
                from_host.append(value)
        return outputs, from_host, from_device

    def _host_graph(self, inputs: list[fx.Node], numbers: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._nodes:
            if node.op != "output" and node not in self._on_device and node not in self._packs:
                env[node] = _copied(graph, node, env)
        lists = [[env.get(n, n) if isinstance(n, fx.Node) else n for n in p.args[0]] for p in self._packs]  # type: ignore[union-attr]
        parts = (numbers, self._uploads, results)
        graph.output((tuple(lists), *(tuple(env[n] for n in part) for part in parts)))
        return graph

    def _device_graph(self, inputs: list[fx.Node], numbers: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            if node in self._on_device:
                env[node] = _copied(graph, node, env)
        for node in self._uploads:
            env[node] = graph.placeholder(node.name)
        for number, node in enumerate(self._packs):
            env[node] = graph.placeholder(f"numbers_{number}")
        for node in numbers:
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
        raise NotRecordableError(f"{node.name} handles the state of a random generator", node)
    if is_communication(node.target) or communicates(node):
        raise NotRecordableError(f"{node.name} communicates between ranks", node)
    if node.op == "call_function" and any(val.device.type == "cpu" for val in tensors_in(node.meta.get("val"))):
        raise NotRecordableError(f"{node.name} brings a value of the GPU to the CPU", node)
    if isinstance(node.target, OpOverload) and torch.Tag.dynamic_output_shape in node.target.tags:
        raise NotRecordableError(f"the shape of {node.name} depends on data", node)
    if node.op == "call_function" and not _holds_tensors(node) and _is_read(node):
        raise NotRecordableError(f"{node.name} reads a number from the GPU", node)


def _holds_tensors(node: fx.Node) -> bool:
    return next(tensors_in(node.meta.get("val")), None) is not None


def _on_gpu(node: fx.Node) -> bool:
    return any(val.is_cuda for val in tensors_in(node.meta.get("val")))


def _is_read(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and op_name(node.target) in ("aten::_local_scalar_dense", "aten::item")
