"""Graphs with collectives, made by hand: torch.distributed need not be there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor  # registers what collectives do to meta tensors
from torch import fx

from ir.step_graphs import aten
from wholestep.errors import Location
from wholestep.ir import (
    InputKind,
    InputSpec,
    NodeMeta,
    OutputKind,
    OutputSpec,
    Signature,
    StepGraph,
    WriteBack,
    set_node_meta,
    tensor_spec,
)

comm = torch.ops._c10d_functional


class Build:
    """A graph that grows by calls; every value is a meta tensor."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[InputSpec] = []
        self.write_backs: list[WriteBack] = []

    def input(self, name: str, *shape: int, path: str = "", dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        spec = tensor_spec(node.meta["val"])
        self.inputs.append(InputSpec(name, InputKind.PARAMETER, path or f"model.{name}", spec))
        return node

    def call(self, target: Any, *args: Any, parameter: str = "", recompute: bool = False, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = _value(target, args, kwargs)
        line = len(self.graph.nodes)
        where = Location("train.py", line, "step")
        set_node_meta(node, NodeMeta("model", where, parameter=parameter, recompute=recompute))
        return node

    def gather(self, operand: fx.Node, group: str = "0", size: int = 2, **meta: Any) -> fx.Node:
        return self.call(comm.all_gather_into_tensor.default, operand, size, group, **meta)

    def scatter(self, operand: fx.Node, how: str = "sum", group: str = "0", size: int = 2, **meta: Any) -> fx.Node:
        return self.call(comm.reduce_scatter_tensor.default, operand, how, size, group, **meta)

    def reduce(self, operand: fx.Node, how: str = "sum", group: str = "0", **meta: Any) -> fx.Node:
        return self.call(comm.all_reduce.default, operand, how, group, **meta)

    def wait(self, started: fx.Node) -> fx.Node:
        return self.call(comm.wait_tensor.default, started)

    def write_back(self, target: fx.Node, value: fx.Node) -> fx.Node:
        self.write_backs.append(WriteBack(target.name, value.name))
        node = self.graph.call_function(aten.copy_.default, (target, value))
        node.meta["val"] = target.meta["val"]
        set_node_meta(node, NodeMeta(phase="epilogue"))
        return node

    def finish(self, *results: fx.Node) -> StepGraph:
        self.graph.output(tuple(results))
        outputs = tuple(OutputSpec(OutputKind.RESULT, "", tensor_spec(node.meta["val"])) for node in results)
        signature = Signature(tuple(self.inputs), outputs, tuple(self.write_backs))
        return StepGraph(fx.GraphModule({}, self.graph), signature)


def _value(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch's own kernels for meta tensors give."""
    values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    return target(*values[0], **values[1])
