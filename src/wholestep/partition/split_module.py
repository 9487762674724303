"""`split_module`: a graph cut into modules that call each other, as torch's function of this name cuts it.

    before   x -> a -> b -> c -> out           callback: a, b in 0; c in 1
    after    x -> submod_0 -> submod_1 -> out  submod_0: x -> a -> b      submod_1: b -> c

Children have the names, inputs, nodes and outputs that torch gives them. Only the order of their calls differs
(`call_order.py`): a stable one that keeps writes, random ops and side effects in graph order. The given module is not
changed. Linear in nodes, placeholders and partitions.

Each partition becomes one GraphModule, and a parent graph calls them.

    child     placeholders for the values it needs, its nodes, the values that others need as its output
    parent    the inputs of the original graph, one call per partition, the same output

Names of modules and tensors in the split module are unique:

    call_module "layers.0.linear"     child: "layers_0_linear", or "layers_0_linear_1" if the graph also has that name
    get_attr "layers.0.weight"        parent: "layers.0.weight", unless it collides with a child ("submod_0.weight")
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from wholestep.errors import SplitError, called
from wholestep.ir.effects import GraphEffects, is_needed
from wholestep.ir.graph_walks import collector_paused
from wholestep.partition.assignment import Assignment, ModuleAttributes, assign
from wholestep.partition.assignment import Partition as Partition  # where torch's module of this name has it
from wholestep.partition.autocast_and_grad import GradModeAtEnd, ModeRegions, ModeWriter, find_regions, plan_leaving
from wholestep.partition.call_order import (
    VALUE_KEYS,
    cycle_error,
    find_flow,
    forget_flow,
    order_error,
    order_pairs,
    stable_order,
)
from wholestep.torch_private.fx_graphs import (
    GraphWriter,
    is_marked_impure,
    keep_calling_convention,
    light_graph_module,
    mark_impure,
    name_of_target,
)
from wholestep.torch_private.modules_and_optimizers import is_non_persistent


@dataclass(frozen=True)
class ChildOptions:
    """Options of the children, and caches shared by all of them."""

    keep_node_names: bool
    keep_input_names: bool
    tuple_return: bool
    training: bool
    regions: ModeRegions | None
    effects: GraphEffects
    names: dict[Any, str] = field(default_factory=dict)
    needed: dict[Any, bool] = field(default_factory=dict)

    def name_for(self, target: Any) -> str:
        """The name that torch.fx would give a node with this target (cached)."""
        name = self.names.get(target)
        if name is None:
            name = self.names[target] = name_of_target(target)
        return name

    def has_effects(self, partition: Partition, attributes: ModuleAttributes) -> bool:
        """True if a partition must run even if its results have no users."""
        written, tokens, known = self.effects.written, self.effects.tokens, self.needed
        for node in partition.nodes:
            if node in written or node in tokens:
                return True
            if node.op == "call_module":
                needed: bool | None = is_marked_impure(attributes[str(node.target)])
            elif node.op != "call_function":
                needed = False
            elif (needed := known.get(node.target)) is None:
                needed = known[node.target] = is_needed(node)
            if needed:
                return True
        return False


def build_child(
    partition: Partition,
    attributes: ModuleAttributes,
    options: ChildOptions,
    leaving: GradModeAtEnd,
    qualname_map: dict[str, str] | None,
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The module of a partition, and the nodes whose values it must be called with."""
    writer = GraphWriter()
    partition.graph = writer.graph
    env, arguments = partition.environment, [node for node in partition.needs if not _is_body(node, attributes)]
    for i, node in enumerate(arguments):
        target = node.name if options.keep_input_names else f"arg_{i}"
        name = name_of_target(target)
        env[node] = writer.add("placeholder", target, (), {}, name, node.type, node.meta.copy())
    if len(arguments) < len(partition.needs):
        _write_modules(partition, attributes, writer, options)
    modes = None if options.regions is None else ModeWriter(options.regions, leaving, writer, env)
    _write_nodes(partition, attributes, options, writer, modes, qualname_map)
    if modes is not None:
        modes.finish()
    values = tuple(env[node] for node in partition.gives)
    result = values[0] if len(values) == 1 and not options.tuple_return else values
    writer.add("output", "output", (result,), {}, "output", None, None)
    child = light_graph_module(writer.graph, options.training)
    if partition.targets:
        install(child, partition.targets)
    if options.has_effects(partition, attributes):
        mark_impure(child)
    return child, arguments


def _is_body(node: fx.Node, attributes: ModuleAttributes) -> bool:
    # The bodies of cond and while_loop are modules, not values: a child owns a copy and reads it by get_attr.
    return node.op == "get_attr" and attributes.is_module(node.target)


def _write_modules(
    partition: Partition, attributes: ModuleAttributes, writer: GraphWriter, options: ChildOptions
) -> None:
    for node in partition.needs:
        if _is_body(node, attributes):
            target = str(node.target)
            partition.targets[target] = attributes[target]
            name = options.name_for(target)
            partition.environment[node] = writer.add("get_attr", target, (), {}, name, None, node.meta.copy())


def _write_nodes(
    partition: Partition,
    attributes: ModuleAttributes,
    options: ChildOptions,
    writer: GraphWriter,
    modes: ModeWriter | None,
    qualname_map: dict[str, str] | None,
) -> None:
    env = partition.environment
    lookup: Callable[[fx.Node], fx.Node] = env.__getitem__
    flat: FlatNames | None = None
    for node in partition.nodes:
        if modes is not None:
            modes.before(node)
        op, target, kwargs = node.op, node.target, node.kwargs
        if op == "call_module":
            if flat is None:
                flat = FlatNames(taken.partition(".")[0] for taken in partition.targets)
            original = str(target)
            target = flat.name_of(original)
            partition.targets[target] = attributes[original]
            if qualname_map is not None:
                qualname_map[f"{partition.submod_name}.{target}"] = original
        name = node.name if options.keep_node_names else options.name_for(target)
        copied = map_arg(kwargs, lookup) if kwargs else kwargs
        env[node] = writer.add(op, target, map_arg(node.args, lookup), copied, name, node.type, node.meta.copy())
        if modes is not None:
            modes.after(node)


class FlatNames:
    """Unique names without dots for qualified names."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken: dict[str, str] = {name: name for name in reserved}
        self._names: dict[str, str] = {}

    def name_of(self, target: str) -> str:
        """The name for a target; the same at each call."""
        name = self._names.get(target)
        if name is None:
            flat = name = target.replace(".", "_")
            count = 0
            while self._taken.get(name, target) != target:
                count += 1
                name = f"{flat}_{count}"
            self._taken[name] = target
            self._names[target] = name
        return name


def install(owner: nn.Module, values: dict[str, Any]) -> None:
    """Set attributes by qualified name, shallow ones first, creating empty modules for missing prefixes."""
    for target in sorted(values, key=lambda name: name.count(".")):
        _install(owner, target, values[target])


def keep_persistence(owner: nn.Module, target: str, source: ModuleAttributes, original: str) -> None:
    """Make a buffer non-persistent if it was so in the original module."""
    holder = source.owner_of(original)
    if holder is None or not is_non_persistent(holder, original.rpartition(".")[2]):
        return
    prefix, _, name = target.rpartition(".")
    new = owner.get_submodule(prefix)
    if new is not holder:
        new.register_buffer(name, new.get_buffer(name), persistent=False)


def _install(owner: nn.Module, target: str, value: Any) -> None:
    *prefix, name = target.split(".")
    for atom in prefix:
        inner = getattr(owner, atom, None)
        if inner is None:
            inner = nn.Module()
            setattr(owner, atom, inner)
        owner = inner
    if getattr(owner, name, None) is value and value is not None:
        return  # already there, as part of an installed module
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(name, value)
    else:
        setattr(owner, name, value)


class ParentWriter:
    """Writes the parent graph and creates its module."""

    def __init__(
        self,
        assignment: Assignment,
        attributes: ModuleAttributes,
        options: ChildOptions,
        qualname_map: dict[str, str] | None,
    ) -> None:
        self._assignment, self._attributes, self._options = assignment, attributes, options
        self._qualname_map = qualname_map
        self._writer = GraphWriter()
        self._env: dict[fx.Node, fx.Node] = {}
        self._values: dict[str, Any] = {}
        self._children = {partition.submod_name for partition in assignment.partitions}
        self._flat = FlatNames(self._children)
        self._moved: dict[str, str] = {}

    def write_inputs(self, placeholders_only: bool) -> None:
        """Copy the placeholders and, unless `placeholders_only`, the get_attr nodes, in graph order."""
        for node in self._assignment.nodes:
            if node.op == "placeholder":
                self._write_placeholder(node)
            elif node.op == "get_attr" and not placeholders_only:
                self._write_attribute(node)

    def write_call(self, partition: Partition, child: fx.GraphModule, arguments: list[fx.Node]) -> None:
        """Add the call of a child and a `getitem` for each of its results."""
        self._write_attributes(arguments)
        name = partition.submod_name
        self._values[name] = child
        env, add, outputs = self._env, self._writer.add, list(partition.gives)
        single = len(outputs) == 1 and not self._options.tuple_return
        args = tuple([env[node] for node in arguments])
        call = add("call_module", name, args, {}, name_of_target(name), None, _metadata_of(outputs, single))
        if single:
            env[outputs[0]] = call
            return
        for i, node in enumerate(outputs):
            env[node] = add("call_function", operator.getitem, (call, i), {}, "getitem", None, node.meta.copy())

    def finish(self, m: fx.GraphModule) -> fx.GraphModule:
        """The parent module, with the calling convention of `m`."""
        output = self._assignment.output
        if output is not None:
            self._write_attributes(output.all_input_nodes)
            args = map_arg(output.args, self._env.__getitem__)
            self._writer.add("output", "output", args, {}, "output", None, output.meta.copy())
        parent = light_graph_module(self._writer.graph, self._options.training)
        install(parent, self._values)
        for target, original in self._moved.items():
            keep_persistence(parent, target, self._attributes, original)
        keep_calling_convention(m, parent)
        parent.meta["partition_names"] = self._children
        return parent

    def _write_placeholder(self, node: fx.Node) -> None:
        target = str(node.target)
        if self._options.keep_node_names and not target.startswith("*"):
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


def _metadata_of(outputs: list[fx.Node], single: bool) -> dict[str, Any]:
    """The metadata of a child's result, from that of its output nodes."""
    found: dict[str, Any] = {}
    for key in VALUE_KEYS:
        if outputs and all(key in node.meta for node in outputs):
            values = tuple(node.meta[key] for node in outputs)
            found[key] = values[0] if single else values
    return found


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
    """Split a graph into children, one for each number that the callback returns.

    Args:
        m: the module to split. It is not changed; parameters and submodules are shared with the result.
        root_m: unused; kept for torch's signature.
        split_callback: returns the partition number of a node, from 0. Called once per call node, in graph order.
        qualname_map: filled with the new name of each called module ("submod_1.lin") and its old one ("lin").
        keep_original_order: read parameters right before the first child that uses them, not all at the beginning.
            Children are called in the same order either way.
        keep_original_node_name: nodes of children keep their names.
        keep_original_input_name: placeholders of children are named after the nodes they stand for, not `arg_0`, ...
        partition_affix: children are named `submod_<affix>_<number>`.
        tuple_return: a child with a single output returns a tuple too.

    Raises:
        SplitError: the callback or the graph is invalid (WS-SPLIT).
        SplitCycleError: partitions need each other's results (WS-SPLIT-CYCLE).
        SplitOrderError: every order of the partitions would reorder writes, random ops or effects (WS-SPLIT-ORDER).
    """
    if not isinstance(m, fx.GraphModule):
        raise SplitError(f"split_module takes a GraphModule, not {called(m)}.", fix="trace the module first.")
    attributes = ModuleAttributes(m)
    with collector_paused():
        assignment = assign(m, split_callback, partition_affix, attributes)
        effects = GraphEffects(assignment.nodes, m)
        order = _find_order(assignment, effects)
        regions = find_regions(assignment.nodes) if assignment.has_switches else None
        leaving = {} if regions is None else plan_leaving(assignment, regions, order)
        options = ChildOptions(
            keep_node_names=bool(keep_original_node_name),
            keep_input_names=keep_original_input_name,
            tuple_return=tuple_return,
            training=m.training,
            regions=regions,
            effects=effects,
        )
        parent = ParentWriter(assignment, attributes, options, qualname_map)
        parent.write_inputs(placeholders_only=bool(keep_original_order and order))
        for place in order:
            partition = assignment.partitions[place]
            child, arguments = build_child(
                partition, attributes, options, leaving.get(place, GradModeAtEnd()), qualname_map
            )
            parent.write_call(partition, child, arguments)
            # With many thousands of partitions this would be most of the memory.
            partition.environment, partition.targets, partition.graph = {}, {}, None
        return parent.finish(m)


def split_module_simple(
    m: fx.GraphModule, node_to_partition: Mapping[fx.Node, int], *, partition_affix: str | None = None
) -> fx.GraphModule:
    """`split_module` by a mapping from nodes to partitions, as in torch; not restricted to simple graphs."""

    def number(node: fx.Node) -> int:
        if node not in node_to_partition:
            raise SplitError(f"node_to_partition has no partition for {node.name}.", fix="map each call node.")
        return node_to_partition[node]

    return split_module(m, None, number, partition_affix=partition_affix, tuple_return=True)


def _find_order(assignment: Assignment, effects: GraphEffects) -> list[int]:
    """The indices of the partitions in the order of their calls."""
    complete, pairs = len(assignment.partitions), order_pairs(assignment, effects)
    for computed_sizes in (True, False):
        flow = find_flow(assignment, computed_sizes)
        order = stable_order(flow.after)
        values_allow_it = len(order) == complete
        if values_allow_it and pairs:
            for first, second in pairs:
                flow.add(assignment.place[first], assignment.place[second])
            order = stable_order(flow.after)
        if len(order) == complete:
            break
        # A size that another partition computes is optional: the tensor that has it carries it too.
        if not flow.has_symbols:
            if values_allow_it:
                raise order_error(assignment, flow, order, pairs)
            raise cycle_error(assignment, flow, order)
        forget_flow(assignment)
    return order
