"""`split_module`: a graph cut into modules that call each other, as torch's function of this name cuts it.

    before   x -> a -> b -> c -> out           callback: a, b in 0; c in 1
    after    x -> submod_0 -> submod_1 -> out  submod_0: x -> a -> b      submod_1: b -> c

Children have the names, inputs, nodes and outputs that torch gives them. Only the order of their calls differs
(`call_order.py`): a stable one that keeps writes, random ops and side effects in graph order. The given module is not
changed. Linear in nodes, placeholders and partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from wholestep.errors import SplitError
from wholestep.ir.effects import GraphEffects
from wholestep.ir.graph_walks import collector_paused
from wholestep.partition.assignment import Assignment, ModuleAttributes, assign
from wholestep.partition.assignment import Partition as Partition  # where torch's module of this name has it
from wholestep.partition.autocast_and_grad import GradModeAtEnd, find_regions, plan_leaving
from wholestep.partition.call_order import cycle_error, find_flow, forget_flow, order_error, order_pairs, stable_order
from wholestep.partition.submodules import ChildOptions, ParentWriter, build_child


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
        raise SplitError(f"split_module takes a GraphModule, not a {type(m).__name__}.", fix="trace the module first.")
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
