"""The graph that calls the children: inputs as the split graph has them, a call for each partition, the same output."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from wholestep.partition.assign import Assignment, Attributes, Partition
from wholestep.partition.attributes import FlatNames, install, keep_persistence
from wholestep.partition.children import Style
from wholestep.partition.shapes import KEYS
from wholestep.torch_private.fx_graphs import GraphWriter, keep_calling_convention, light_graph_module, name_of_target


class BaseWriter:
    """Writes that graph and makes its module."""

    def __init__(
        self, assignment: Assignment, attributes: Attributes, style: Style, qualname_map: dict[str, str] | None
    ) -> None:
        self._assignment, self._attributes, self._style = assignment, attributes, style
        self._qualname_map = qualname_map
        self._writer = GraphWriter()
        self._env: dict[fx.Node, fx.Node] = {}
        self._values: dict[str, Any] = {}
        self._children = {partition.submod_name for partition in assignment.partitions}
        self._flat = FlatNames(self._children)
        self._moved: dict[str, str] = {}

    def write_inputs(self, placeholders_only: bool) -> None:
        """Placeholders, and attributes where the graph has them."""
        for node in self._assignment.nodes:
            if node.op == "placeholder":
                self._write_placeholder(node)
            elif node.op == "get_attr" and not placeholders_only:
                self._write_attribute(node)

    def write_call(self, partition: Partition, child: fx.GraphModule, arguments: list[fx.Node]) -> None:
        """The call of a child, and its results one by one."""
        self._write_attributes(arguments)
        name = partition.submod_name
        self._values[name] = child
        env, add, outputs = self._env, self._writer.add, list(partition.gives)
        single = len(outputs) == 1 and not self._style.tuple_return
        args = tuple([env[node] for node in arguments])
        call = add("call_module", name, args, {}, name_of_target(name), None, _values_of(outputs, single))
        if single:
            env[outputs[0]] = call
            return
        for i, node in enumerate(outputs):
            env[node] = add("call_function", operator.getitem, (call, i), {}, "getitem", None, node.meta.copy())

    def finish(self, m: fx.GraphModule) -> fx.GraphModule:
        """The module, which takes and returns what `m` does."""
        output = self._assignment.output
        if output is not None:
            self._write_attributes(output.all_input_nodes)
            args = map_arg(output.args, self._env.__getitem__)
            self._writer.add("output", "output", args, {}, "output", None, output.meta.copy())
        base = light_graph_module(self._writer.graph, self._style.training)
        install(base, self._values)
        for target, original in self._moved.items():
            keep_persistence(base, target, self._attributes, original)
        keep_calling_convention(m, base)
        base.meta["partition_names"] = self._children
        return base

    def _write_placeholder(self, node: fx.Node) -> None:
        target = str(node.target)
        if self._style.keep_node_names and not target.startswith("*"):
            target = node.name
        name = name_of_target(target)
        self._env[node] = self._writer.add("placeholder", target, node.args, {}, name, node.type, node.meta.copy())

    def _write_attributes(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node.op == "get_attr" and node not in self._env:
                self._write_attribute(node)

    def _write_attribute(self, node: fx.Node) -> None:
        target = original = str(node.target)
        if target.partition(".")[0] in self._children:
            target = self._flat.name_of(original + "_") if "." not in original else self._flat.name_of(original)
            if self._qualname_map is not None:
                self._qualname_map[target] = original
        self._values[target] = self._attributes[original]
        if isinstance(self._values[target], torch.Tensor):
            self._moved[target] = original
        self._env[node] = self._writer.add("get_attr", target, (), {}, name_of_target(target), None, node.meta.copy())


def _values_of(outputs: list[fx.Node], single: bool) -> dict[str, Any]:
    """What is known of the result of a child, from what is known of its nodes."""
    found: dict[str, Any] = {}
    for key in KEYS:
        if outputs and all(key in node.meta for node in outputs):
            values = tuple(node.meta[key] for node in outputs)
            found[key] = values[0] if single else values
    return found
