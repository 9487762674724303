"""`split_module`: a graph cut into modules that call each other, as torch's function of this name cuts it.

    before   x -> a -> b -> c -> out           callback: a, b in 0; c in 1
    after    x -> submod_0 -> submod_1 -> out  submod_0: x -> a -> b      submod_1: b -> c

Children have the names, inputs, nodes and outputs that torch gives them. What differs is the order in which they are
called (`order.py`): a stable one that keeps writes, random draws and side effects in the order of the graph. The given
module is not touched. Linear in nodes, placeholders and partitions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from wholestep._torch_compat import GraphWriter, keep_calling_convention, light_graph_module, name_of_target
from wholestep.errors import SplitError
from wholestep.partition.assign import Assignment, Attributes, Partition, assign
from wholestep.partition.attributes import FlatNames, install, keep_persistence
from wholestep.partition.children import Style, build_child
from wholestep.partition.dataflow import find_flow, forget_flow, order_pairs
from wholestep.partition.node_effects import EffectReader
from wholestep.partition.order import cycle_error, order_error, stable_order
from wholestep.partition.regions import Leaving, find_regions, plan_leaving
from wholestep.partition.shapes import KEYS


def split_module(
    m: fx.GraphModule,
    root_m: torch.nn.Module | None,
    split_callback: Callable[[fx.Node], int],
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool | None = False,
    keep_original_node_name: bool | None = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
) -> fx.GraphModule:
    """Cut a graph into children, one for each number that the callback returns.

    Args:
        m: the module to split. It is left as it is; parameters and submodules are shared with the result.
        root_m: not used; torch's function has it.
        split_callback: the number of the partition of a node, from 0. Called once for each node that calls something,
            in the order of the graph.
        qualname_map: filled with the new name of each called module ("submod_1.lin") and its old one ("lin").
        keep_original_order: get parameters right before the first child that uses them, not all at the beginning.
            Children are called in the same order either way.
        keep_original_node_name: nodes of children are called as in the graph.
        keep_original_input_name: placeholders of children are called as the nodes they stand for, not `arg_0`, ...
        partition_affix: children are called `submod_<affix>_<number>`.
        tuple_return: a child returns a tuple also if it has a single output.

    Raises:
        SplitError: the callback or the graph cannot be used (WS-SPLIT).
        SplitCycleError: partitions need each other's results (WS-SPLIT-CYCLE).
        SplitOrderError: every order of the partitions would swap writes, draws or effects (WS-SPLIT-ORDER).
    """
    if not isinstance(m, fx.GraphModule):
        raise SplitError(f"split_module takes a GraphModule, not a {type(m).__name__}.", fix="trace the module first.")
    attributes = Attributes(m)
    assignment = assign(m, split_callback, partition_affix, attributes)
    effects = EffectReader(assignment.nodes)
    order = _find_order(assignment, effects)
    regions = find_regions(assignment.nodes) if assignment.has_switches else None
    leaving = {} if regions is None else plan_leaving(assignment, regions, order)
    style = Style(
        keep_node_names=bool(keep_original_node_name),
        keep_input_names=keep_original_input_name,
        tuple_return=tuple_return,
        training=m.training,
        regions=regions,
        effects=effects,
    )
    base = _Base(assignment, attributes, style, qualname_map)
    base.write_inputs(placeholders_only=bool(keep_original_order and order))
    for place in order:
        partition = assignment.partitions[place]
        child, arguments = build_child(partition, attributes, style, leaving.get(place, Leaving()), qualname_map)
        base.write_call(partition, child, arguments)
        # Of many thousands of partitions this would be most of the memory.
        partition.environment, partition.targets, partition.graph = {}, {}, None
    return base.finish(m)


def _find_order(assignment: Assignment, effects: EffectReader) -> list[int]:
    """The places of the partitions in the order of their calls."""
    flow = find_flow(assignment)
    order = stable_order(flow.after)
    if len(order) < len(assignment.partitions) and flow.has_symbols:
        # A size that another partition computes is a help, not a need: the value that has it carries it too.
        forget_flow(assignment)
        flow = find_flow(assignment, computed_sizes=False)
        order = stable_order(flow.after)
    if len(order) < len(assignment.partitions):
        raise cycle_error(assignment, flow, order)
    pairs = order_pairs(assignment, effects)
    if pairs:
        place = assignment.place
        for first, second in pairs:
            flow.add(place[first], place[second])
        order = stable_order(flow.after)
        if len(order) < len(assignment.partitions):
            raise order_error(assignment, flow, order, pairs)
    return order


class _Base:
    """The graph that calls the children."""

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
