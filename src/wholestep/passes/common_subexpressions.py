"""Compute once what a step computes twice.

    before                                     after
    a = t(w)                                   a = t(w)
    y = mm(x, a)                               y = mm(x, a)
    b = t(w)                                   g = mm(d, a)
    g = mm(d, b)

Needs: nothing; what a graph writes outside of its epilogue, and everything that shares memory with it, is left alone.
Numerics: exact.  Legal where operator and arguments are the same and the operator only computes: it draws no random
numbers, does not communicate (`remove_duplicate_collectives` merges those), has no effect, its shapes do not depend on
data, and nothing is written between the two.  Nodes that are recomputed on purpose (`NodeMeta.recompute`) merge only
within the same recomputation, and nodes that run in the next iteration (`move`) only with each other. Two results that
leave the graph stay two tensors. Nodes that write-backs name keep their names.  Cost: one walk over the graph; a merged
value lives until its last use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.errors import GraphFormatError
from wholestep.ir.effects import (
    communicates,
    is_collective,
    is_data_dependent,
    is_wait,
    may_draw,
    shared_inputs,
    sharing_with_outputs,
    writes,
)
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.graph_walks import epilogue, reachable
from wholestep.ir.io.arguments import PYTHON_FUNCTIONS, ArgumentWriter, target_name
from wholestep.ir.meta import node_meta, update_node_meta
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.torch_private.operators import OpOverload, op_name

_COPY = torch.ops.aten.copy_.default
_NAMESPACES = frozenset({"aten", "prims"})
"""Operators of other packages may do more than their schema says."""
_PYTHON = frozenset(function for name, function in PYTHON_FUNCTIONS.items() if not name.startswith("wholestep."))
_UNINITIALISED = ("aten::empty", "aten::new_empty")


@dataclass(frozen=True)
class EqualNodes:
    """`node` is the same value as the earlier node `by`."""

    node: fx.Node
    by: fx.Node


@graph_optimization_pass(prerequisites=[], apply_after=[], numerics="exact", allow_rerun=True)
def merge_common_subexpressions(gm: fx.GraphModule) -> None:
    """Replace every node that repeats an earlier one by that one."""
    apply_merges(gm.graph, plan_merges(gm.graph))


def plan_merges(graph: fx.Graph) -> list[EqualNodes]:
    """Nodes that repeat earlier ones, in graph order; of three equal nodes the second and third name the first."""
    return _Planner(graph).plan()


class _Planner:
    """Numbers values: equal numbers are the same value in the same memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._epilogue = set(epilogue(graph))
        self._written = _written_memory(graph, self._epilogue)
        self._named = {node.args[1] for node in self._epilogue}
        self._leaving = sharing_with_outputs(graph)
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[str, list[fx.Node]] = {}
        """By key, those that are not merged with each other."""
        self._arguments = ArgumentWriter(self._number)
        self._pending: set[fx.Node] = set()
        self._run = 0
        """The recomputation that the walk is in, or was in last."""
        self._recomputing = False
        self._merges: list[EqualNodes] = []

    def plan(self) -> list[EqualNodes]:
        if any(not isinstance(node.target, OpOverload) and writes(node) for node in self._graph.nodes):
            return []  # the result of a Python method or function may be a view of anything
        for node in self._graph.nodes:
            if node.op == "get_attr" and node not in self._written:
                self._meet(node)
            if node.op != "call_function":
                continue
            again = node_meta(node).recompute
            self._run += again and not self._recomputing
            self._recomputing = again
            if node not in self._epilogue and writes(node):
                self._known.clear()
            elif is_collective(node.target) or self._pending.intersection(node.all_input_nodes):
                if not is_wait(node.target):
                    self._pending.add(node)
            elif node not in self._written and is_pure(node):
                self._meet(node)
        return self._merges

    def _meet(self, node: fx.Node) -> None:
        key = self._key(node)
        if key is None:
            return
        others = self._known.setdefault(key, [])
        for first in others:
            if not self._are_two(node, first):
                self._numbers[node] = self._number(first)
                self._merges.append(EqualNodes(node, first))
                for kind in (self._named, self._leaving):
                    if node in kind:
                        kind.add(first)
                return
        others.append(node)

    def _are_two(self, node: fx.Node, first: fx.Node) -> bool:
        """Whether two equal values must stay two nodes: both leave the graph, or both are named by the signature."""
        return any(node in kind and first in kind for kind in (self._named, self._leaving))

    def _number(self, node: fx.Node) -> int:
        return self._numbers.setdefault(node, len(self._numbers))

    def _key(self, node: fx.Node) -> str | None:
        """Equal for equal values; None if it cannot be compared."""
        if node.op == "get_attr":
            return json.dumps(["get_attr", str(node.target)])
        write = self._arguments.write
        try:
            written = [write(list(node.args)), {name: write(value) for name, value in sorted(node.kwargs.items())}]
            meta = node_meta(node)
            when = [self._run if self._recomputing else 0, meta.generation, meta.move]
            return json.dumps([target_name(node.target), when, written])
        except GraphFormatError:
            return None


def apply_merges(graph: fx.Graph, plan: list[EqualNodes]) -> None:
    """Replace later nodes by the earlier ones. One that a write-back names replaces its equal instead."""
    named = {node.args[1] for node in epilogue(graph)}
    stands_for: dict[fx.Node, fx.Node] = {}
    for merge in plan:
        node, by = merge.node, stands_for.get(merge.by, merge.by)
        in_place = node_meta(by).in_place or node_meta(node).in_place
        if node in named and by not in named:
            by.prepend(node)
            node.args, node.kwargs, node.meta = by.args, by.kwargs, dict(by.meta)
            stands_for[merge.by] = node
            node, by = by, node
        if in_place is not None:
            update_node_meta(by, in_place=in_place)  # `reinplace` decides whether that is legal
        node.replace_all_uses_with(by)
        graph.erase_node(node)


def is_pure(node: fx.Node) -> bool:
    """Whether a node only computes: the same arguments give the same value at any time."""
    target = node.target
    if communicates(node) or is_wait(target) or writes(node) or target is call_on_copies or node.is_impure():
        return False
    if not isinstance(target, OpOverload):
        return target in _PYTHON
    if target.namespace not in _NAMESPACES or may_draw(target):
        return False
    return not op_name(target).startswith(_UNINITIALISED) and not is_data_dependent(target)


def _written_memory(graph: fx.Graph, epilogue: set[fx.Node]) -> set[fx.Node]:
    """All nodes that share memory with a tensor that is written before the epilogue."""
    writers = [node for node in graph.nodes if node not in epilogue and writes(node)]
    if not writers:
        return set()
    touched = [each for node in writers for each in (node, *node.all_input_nodes)]
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for source in shared_inputs(node):
            views.setdefault(source, []).append(node)
    return set(reachable(touched, lambda node: [*views.get(node, ()), *shared_inputs(node)]))
