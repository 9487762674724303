"""The graph module of one partition: placeholders for what it needs, its nodes, and what others need as its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from wholestep.ir.effects import is_needed
from wholestep.partition.assign import Attributes, Partition
from wholestep.partition.attributes import FlatNames, install
from wholestep.partition.node_effects import EffectReader
from wholestep.partition.regions import Leaving, ModeWriter, Regions
from wholestep.torch_private.fx_graphs import (
    GraphWriter,
    is_marked_impure,
    light_graph_module,
    mark_impure,
    name_of_target,
)


@dataclass(frozen=True)
class Style:
    """How children are written."""

    keep_node_names: bool
    keep_input_names: bool
    tuple_return: bool
    training: bool
    regions: Regions | None
    effects: EffectReader
    names: dict[Any, str] = field(default_factory=dict)
    needed: dict[Any, bool] = field(default_factory=dict)

    def name_for(self, target: Any) -> str:
        """What torch.fx would call a node with this target, remembered."""
        name = self.names.get(target)
        if name is None:
            name = self.names[target] = name_of_target(target)
        return name

    def has_effects(self, partition: Partition, attributes: Attributes) -> bool:
        """Whether a partition must run even if nobody uses its results."""
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
    attributes: Attributes,
    style: Style,
    leaving: Leaving,
    qualname_map: dict[str, str] | None,
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The module of a partition, and the nodes whose values it must be called with."""
    writer = GraphWriter()
    partition.graph = writer.graph
    env, arguments = partition.environment, [node for node in partition.needs if not _is_taken_along(node, attributes)]
    for i, node in enumerate(arguments):
        target = node.name if style.keep_input_names else f"arg_{i}"
        name = name_of_target(target)
        env[node] = writer.add("placeholder", target, (), {}, name, node.type, node.meta.copy())
    if len(arguments) < len(partition.needs):
        _write_modules(partition, attributes, writer, style)
    modes = None if style.regions is None else ModeWriter(style.regions, leaving, writer, env)
    _write_nodes(partition, attributes, style, writer, modes, qualname_map)
    if modes is not None:
        modes.finish()
    values = tuple(env[node] for node in partition.gives)
    result = values[0] if len(values) == 1 and not style.tuple_return else values
    writer.add("output", "output", (result,), {}, "output", None, None)
    child = light_graph_module(writer.graph, style.training)
    if partition.targets:
        install(child, partition.targets)
    if style.has_effects(partition, attributes):
        mark_impure(child)
    return child, arguments


def _is_taken_along(node: fx.Node, attributes: Attributes) -> bool:
    # Bodies of cond and the like are no values: a child has them itself, and calls them by get_attr.
    return node.op == "get_attr" and attributes.is_module(node.target)


def _write_modules(partition: Partition, attributes: Attributes, writer: GraphWriter, style: Style) -> None:
    for node in partition.needs:
        if _is_taken_along(node, attributes):
            target = str(node.target)
            partition.targets[target] = attributes[target]
            name = style.name_for(target)
            partition.environment[node] = writer.add("get_attr", target, (), {}, name, None, node.meta.copy())


def _write_nodes(
    partition: Partition,
    attributes: Attributes,
    style: Style,
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
        name = node.name if style.keep_node_names else style.name_for(target)
        copied = map_arg(kwargs, lookup) if kwargs else kwargs
        env[node] = writer.add(op, target, map_arg(node.args, lookup), copied, name, node.type, node.meta.copy())
        if modes is not None:
            modes.after(node)
