"""`split_module`: a graph cut into modules that call each other, as torch's function of this name cuts it.

    before   x -> a -> b -> c -> out           callback: a, b in 0; c in 1
    after    x -> submod_0 -> submod_1 -> out  submod_0: x -> a -> b      submod_1: b -> c

Children have the names, inputs, nodes and outputs that torch gives them. What differs is the order in which they are
called (`order.py`): a stable one that keeps writes, random draws and side effects in the order of the graph. The given
module is not touched. Linear in nodes, placeholders and partitions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from wholestep.errors import SplitError
from wholestep.ir.garbage import collector_paused
from wholestep.partition.assign import Assignment, Attributes, assign
from wholestep.partition.assign import Partition as Partition  # where torch's module of this name has it
from wholestep.partition.base import BaseWriter
from wholestep.partition.children import Style, build_child
from wholestep.partition.dataflow import find_flow, forget_flow, order_pairs
from wholestep.partition.node_effects import EffectReader
from wholestep.partition.order import cycle_error, order_error, stable_order
from wholestep.partition.regions import Leaving, find_regions, plan_leaving


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
    with collector_paused():
        assignment = assign(m, split_callback, partition_affix, attributes)
        effects = EffectReader(assignment.nodes, m)
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
        base = BaseWriter(assignment, attributes, style, qualname_map)
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
        # A size that another partition computes is a help, not a need: the value that has it carries it too.
        if not flow.has_symbols:
            if values_allow_it:
                raise order_error(assignment, flow, order, pairs)
            raise cycle_error(assignment, flow, order)
        forget_flow(assignment)
    return order
