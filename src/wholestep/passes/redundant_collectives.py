"""Communicate once what a step communicates twice: a weight that is read in two places, a norm that is reduced again.

    before                                       after
    a = all_gather_into_tensor(w, 2, '0')        a = all_gather_into_tensor(w, 2, '0')
    x = mm(h, wait_tensor(a))                    done = wait_tensor(a)
    b = all_gather_into_tensor(w, 2, '0')        x = mm(h, done)
    y = mm(x, wait_tensor(b))                    y = mm(x, done)

Needs: the normal form; a graph that writes outside of its epilogue is left alone.  Numerics: exact.
Legal where operator, scalars, group and operands are the same, operands also where they are the same views, casts or
padding of the same value, and no write-back stands between the two: the result of a collective is a fresh tensor that
nothing writes.  Gathers that are repeated on purpose (`NodeMeta.recompute`, `generation`) only merge with each other.
The first wait in graph order stays, so no wait is later than before.  Two results that leave the graph stay two
tensors: the second becomes a copy of the first.  Nodes that write-backs name keep their names.  All ranks have the same
graph and so remove the same collectives.  Cost: one walk over the graph; a merged result lives until its last use.

Communicate nothing that no node reads: capture keeps a collective and its wait even if their result was dropped.

    before                                           after
    g = mul(x, 2)                                    loss = sum(x)
    r = all_reduce(g, 'avg', '0')                    output(loss)
    done = wait_tensor(r)
    loss = sum(x)
    output(loss)

Needs: nothing.  Numerics: exact.  Legal where no wait of the collective has a user: its result is a fresh tensor.
In-place collectives, and sends and receives between two ranks, stay.  Other nodes without users are removed too, unless
they are random ops.  All ranks have the same graph and so drop the same ones.  Cost: one walk over the graph.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.errors import GraphFormatError
from wholestep.ir.collectives import comm_block, is_part
from wholestep.ir.effects import (
    communicates,
    is_collective,
    is_wait,
    keeps_elements,
    may_draw,
    sharing_with_outputs,
    writes,
)
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.graph_walks import erase_unread, written_back
from wholestep.ir.groups import group_of, replace_group
from wholestep.ir.io.arguments import ArgumentWriter, target_name
from wholestep.ir.meta import node_meta
from wholestep.passes.engine.contract import graph_optimization_pass

aten = torch.ops.aten


@dataclass(frozen=True)
class Merge:
    """`node` is the same value as the earlier node `by`."""

    node: fx.Node
    by: fx.Node


@graph_optimization_pass(numerics="exact", allow_rerun=True)
def remove_duplicate_collectives(gm: fx.GraphModule) -> int:
    """Merge equal collectives; returns how many were removed."""
    plan = plan_merges(gm.graph)
    if not plan:
        return 0
    removed = sum(1 for merge in plan if communicates(merge.node))
    apply_merges(gm.graph, plan)
    gm.recompile()
    return removed


dedup_collectives = remove_duplicate_collectives
"""The same pass by a shorter name."""


def plan_merges(graph: fx.Graph) -> list[Merge]:
    """Collectives, their parts and their waits that repeat earlier ones, in graph order."""
    if sum(1 for node in graph.nodes if communicates(node)) < 2:
        return []
    if any(writes(node) and written_back(node) is None for node in graph.nodes):
        return []
    return _MergePlanner().plan(graph)


class _MergePlanner:
    """Numbers values: equal numbers are equal values."""

    def __init__(self) -> None:
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[str, fx.Node] = {}
        """Collectives and what they read, since the last write-back."""
        self._results: dict[str, fx.Node] = {}
        """Parts and waits. Write-backs do not touch the memory of results."""
        self._pending: set[fx.Node] = set()
        self._arguments = ArgumentWriter(self._number)
        self._merges: list[Merge] = []

    def plan(self, graph: fx.Graph) -> list[Merge]:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if written_back(node) is not None:
                self._known.clear()
            elif communicates(node) and node.target is not call_on_copies:
                if is_collective(node.target):
                    self._pending.add(node)
                self._meet(node, self._known, merge=True)
            elif (is_wait(node.target) or is_part(node)) and node.all_input_nodes[0] in self._pending:
                if not is_wait(node.target):
                    self._pending.add(node)
                self._meet(node, self._results, merge=True)
            elif keeps_elements(node):
                self._meet(node, self._known, merge=False)
        return self._merges

    def _meet(self, node: fx.Node, table: dict[str, fx.Node], *, merge: bool) -> None:
        key = self._key(node)
        first = table.setdefault(key, node) if key is not None else node
        if first is not node:
            self._numbers[node] = self._number(first)
            if merge:
                self._merges.append(Merge(node, first))

    def _number(self, node: fx.Node) -> int:
        return self._numbers.setdefault(node, len(self._numbers))

    def _key(self, node: fx.Node) -> str | None:
        """Equal for equal values; None if it cannot be compared."""
        args, kwargs = replace_group(node, group_of(node))
        write = self._arguments.write
        try:
            written = [write(args), {name: write(value) for name, value in sorted(kwargs.items())}]
            meta = node_meta(node)
            again = communicates(node) and (meta.recompute, meta.generation)
            return json.dumps([target_name(node.target), again, written])
        except GraphFormatError:
            return None


def apply_merges(graph: fx.Graph, plan: list[Merge]) -> None:
    """Let later nodes use the earlier ones; the later ones are erased, with views and casts that only they read."""
    written, leaving = _written_back(graph), sharing_with_outputs(graph)
    stands_for: dict[fx.Node, fx.Node] = {}
    orphans: list[fx.Node] = []
    for merge in plan:
        node, by = merge.node, stands_for.get(merge.by, merge.by)
        orphans += node.all_input_nodes
        if (node in written and by in written) or (node in leaving and by in leaving):
            node.target, node.args, node.kwargs = aten.clone.default, (by,), {}
            continue
        if node in leaving or by in leaving:
            leaving |= {node, by}
        if node in written:
            _take_the_place(node, by)
            stands_for[merge.by] = node
            node, by = by, node
        node.replace_all_uses_with(by)
        graph.erase_node(node)
    erase_unread(graph, orphans, keeps_elements)


def _take_the_place(node: fx.Node, of: fx.Node) -> None:
    """Move a node to the place of its equal, so that it replaces that node under its own name."""
    of.prepend(node)
    node.args, node.kwargs = of.args, of.kwargs
    node.meta = dict(of.meta)


def _written_back(graph: fx.Graph) -> set[fx.Node]:
    """Values that write-backs of a signature name."""
    return {value for node in graph.nodes if written_back(node) is not None for value in node.all_input_nodes[1:]}


@graph_optimization_pass(numerics="exact", allow_rerun=True)
def remove_dead_collectives(gm: fx.GraphModule) -> int:
    """Erase collectives whose results no node reads; returns how many."""
    graph, dropped = gm.graph, 0
    for node in reversed(list(graph.nodes)):
        if _is_droppable(node):
            block = comm_block(node)
            if block.is_dead:
                for behind in (*block.waits, *reversed(block.parts)):
                    graph.erase_node(behind)
                dropped += 1
            else:
                continue
        elif node.users or not _is_pure(node):
            continue
        graph.erase_node(node)
    if dropped:
        gm.recompile()
    return dropped


drop_dead_collectives = remove_dead_collectives
"""The same pass by a shorter name."""


def _is_droppable(node: fx.Node) -> bool:
    return communicates(node) and node.target is not call_on_copies and not writes(node)


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or communicates(node) or is_wait(node.target) or writes(node):
        return False
    return not may_draw(node.target) and not node.is_impure()
