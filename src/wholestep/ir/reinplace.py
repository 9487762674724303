"""Turn functional updates back into the in-place operators that eager ran, so that a step needs eager's memory.

    before                                      after
    m1 = lerp(m, g, 0.1)                        lerp_(m, g, 0.1)
    p1 = addcdiv(p, m1, d)                      addcdiv_(p, m, d)
    x1 = select_scatter(x, y, 0, 2)             copy_(select(x, 0, 2), y)
    copy_(m, m1); copy_(p, p1); output(..)      output(..)

Needs: the normal form.  Numerics: exact.  Legal where nothing reads the old contents afterwards: no later node uses the
written tensor or anything that shares its memory, and an input is written only if the epilogue writes it anyway.
Capture noted on each node the operator that eager ran there (`NodeMeta.in_place`), so the result is eager's own kernel.
Epilogue copies that remain move up to the last read of what they overwrite.  Cost: one walk over the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from wholestep.ir.call_arguments import nodes_in
from wholestep.ir.collectives import collective_of, comm_block
from wholestep.ir.effects import (
    declares_writes,
    fresh_results,
    is_collective,
    is_needed,
    is_wait,
    shared_inputs,
    writes,
    written_positions,
)
from wholestep.ir.graph_functions import CHECKS, call_on_copies
from wholestep.ir.graph_walks import copy_graph, reachable
from wholestep.ir.meta import node_meta
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.operators import OpOverload, bound_argument, schema_of

aten = torch.ops.aten

_SCATTERS: dict[Any, Any] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

_SPLITS = frozenset({aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int})
"""Cut a tensor into parts that share no element."""


def reinplaced(step_graph: StepGraph) -> fx.GraphModule:
    """A copy of the graph that updates in place; the StepGraph stays in normal form."""
    graph = copy_graph(step_graph.gm.graph)
    reinplace(graph)
    return lazy_graph_module(step_graph.gm, graph, "WholeStepInPlace")


def reinplace(graph: fx.Graph) -> int:
    """Rewrite a graph in normal form; returns how many updates became in-place."""
    return _Reinplace(graph).run()


class _Reinplace:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.root: dict[fx.Node, fx.Node] = {}
        self.exact: dict[fx.Node, fx.Node] = {}
        """For a node that is an input updated in place: the input."""
        self.last_read: dict[fx.Node, int] = {}
        self.last_write: dict[fx.Node, int] = {}
        self.last_copied: dict[fx.Node, int] = {}
        """By root, the last copy of the epilogue that reads it."""
        self.written_back: dict[fx.Node, fx.Node] = {}
        self._index()

    def run(self) -> int:
        count = 0
        for node in self.nodes:
            if node.op != "call_function":
                continue
            if node.target in _SCATTERS:
                count += self._scatter(node)
            elif node_meta(node).in_place is not None:
                count += self._update(node)
        self._finish_epilogue()
        self.graph.eliminate_dead_code(_is_needed)
        self.graph.lint()
        return count

    def _index(self) -> None:
        for node in self.nodes:
            self.root[node] = self._find_root(node)
        epilogue = {n for n in self.nodes if n.op == "call_function" and n.target is aten.copy_.default}
        last_check = -1
        for i, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                if node in epilogue and source is node.args[0]:
                    self.written_back[source] = node
                    if source is not node.args[1]:
                        continue
                if node.op == "output" and source.op == "placeholder":
                    continue  # the input itself is returned, updated
                root = self.root[source]
                self.last_read[root] = max(self.last_read.get(root, -1), i)
                if node in epilogue:
                    self.last_copied[root] = i
            if node.target in CHECKS:
                last_check = i
            if is_wait(node.target):
                for source in collective_of(node).all_input_nodes:  # a collective reads until it is waited on
                    self.last_read[self.root[source]] = max(self.last_read.get(self.root[source], -1), i)
            elif is_collective(node.target) and not comm_block(node).waits:
                for source in node.all_input_nodes:  # the next iteration waits for it
                    self.last_read[self.root[source]] = len(self.nodes)
        if last_check >= 0:  # what raises is to leave all inputs as they were
            for node in self.nodes:
                if node.op == "placeholder":
                    self.last_read[node] = max(self.last_read.get(node, -1), last_check)

    def _find_root(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function":
            return node
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return self.root[source] if _is_view(source) else node
        if _is_view(node) and isinstance(node.args[0], fx.Node):
            return self.root[node.args[0]]
        return node

    def _free_to_write(self, target: fx.Node, at: fx.Node) -> bool:
        root = self.root[target]
        if root.op == "get_attr" or (root.op == "placeholder" and root not in self.written_back):
            return False
        return self.last_read.get(root, -1) <= self.order[at]

    def _is_copied_later(self, value: fx.Node, root: fx.Node) -> bool:
        """Whether a value is copied into another input (`p.data, q.data = q.data, p.data`) after the epilogue has
        overwritten the input whose memory it would be in."""
        last = self.last_copied.get(self.root[value], -1)
        return root in self.written_back and last > self.order[self.written_back[root]]

    def _merge(self, result: fx.Node, target: fx.Node) -> None:
        """Note that `result` now aliases `target`."""
        old, new = self.root[result], self.root[target]
        self.last_write[new] = max(self.last_write.get(new, -1), self.order[result])
        self.last_read[new] = max(self.last_read.get(new, -1), self.last_read.get(old, -1))
        self.last_copied[new] = max(self.last_copied.get(new, -1), self.last_copied.get(old, -1))
        self._aliases_of(old, new)
        base = self.exact.get(target, target)
        if base.op == "placeholder":
            self.exact[result] = base

    def _aliases_of(self, old: fx.Node, new: fx.Node) -> None:
        def with_old_root(nodes: Iterable[fx.Node]) -> list[fx.Node]:
            return [node for node in nodes if self.root.get(node) is old]

        for node in reachable(with_old_root([old]), lambda node: with_old_root(node.users)):
            self.root[node] = new

    def _update(self, node: fx.Node) -> bool:
        op = node_meta(node).in_place
        assert op is not None
        positions, args = _written_positions(node, op)
        targets: list[fx.Node] = []
        for position in positions:
            targets += nodes_in(bound_argument(op, position, args, node.kwargs))
        roots = [self.root[t] for t in targets]
        if not targets or not self._are_disjoint(targets):
            return False
        others = [n for n in nodes_in([a for i, a in enumerate(args) if i not in positions]) if n not in targets]
        others += [n for n in nodes_in(list(node.kwargs.values())) if n not in targets]
        if any(self.root[n] in roots for n in others) or _reads_a_target(args, positions, targets):
            return False
        if not all(self._free_to_write(t, node) and _same_dtype_and_shape(t, node, op) for t in targets):
            return False
        written = list(_written_values(node, op, positions, args, targets))
        if any(self._is_copied_later(value, self.root[target]) for value, target in written):
            return False
        self._rewrite(node, op, args, written)
        return True

    def _are_disjoint(self, targets: list[fx.Node]) -> bool:
        """True if no two targets share memory: they have different roots, or are different parts of one split."""
        parts: dict[fx.Node, set[tuple[fx.Node, int] | None]] = {}
        for target in targets:
            parts.setdefault(self.root[target], set()).add(_part_of(target))
        if sum(map(len, parts.values())) != len(targets):
            return False
        several = [found for found in parts.values() if len(found) > 1]
        return all(None not in found and len({part[0] for part in found if part}) == 1 for found in several)

    def _rewrite(
        self, node: fx.Node, op: OpOverload, args: tuple[Any, ...], written: list[tuple[fx.Node, fx.Node]]
    ) -> None:
        schema = schema_of(op)
        fresh = fresh_results(op)
        pieces = [] if written and written[0][0] is node else list(node.users)
        node.target = op
        node.args = args
        if not schema.returns:
            node.meta = {**node.meta, "val": None}  # graphs that were copied share metadata
        for piece in pieces:
            if fresh == 1 and piece.args[1] == 0:
                piece.replace_all_uses_with(node)
                self.root[node] = self.root[piece]
        for value, target in written:
            if value is node:
                self._merge(node, target)
            else:
                self._replace(value, target)

    def _replace(self, piece: fx.Node, target: fx.Node) -> None:
        self._merge(piece, target)
        base = self.exact.get(target)
        if base is not None:
            self.exact[piece] = base
        piece.replace_all_uses_with(target)

    def _scatter(self, node: fx.Node) -> bool:
        """`x1 = select_scatter(x, y, ..)` where x is not read afterwards: write y into the view of x."""
        target, source = node.args[0], node.args[1]
        assert isinstance(target, fx.Node)
        shared = isinstance(source, fx.Node) and self.root[source] is self.root[target]
        if shared or not self._free_to_write(target, node) or not _dense_like(target, node):
            return False
        with self.graph.inserting_before(node):
            view = self.graph.call_function(_SCATTERS[node.target], (target, *node.args[2:]), node.kwargs)
            copy = self.graph.call_function(aten.copy_.default, (view, source))
        for made in (view, copy):
            made.meta = dict(node.meta)
            self.order[made] = self.order[node]
            self.root[made] = self.root[target]
        self._merge(node, target)
        node.replace_all_uses_with(target)
        base = self.exact.get(target, target)
        if base.op == "placeholder":
            self.exact[target] = base
        return True

    def _finish_epilogue(self) -> None:
        copies = set(self.written_back.values())
        for target, copy in self.written_back.items():
            value = copy.args[1]
            assert isinstance(value, fx.Node)
            if value is target or self.exact.get(value) is target:
                self.graph.erase_node(copy)
                continue
            point = max(self.order[value], self.last_read.get(target, -1), self.last_write.get(self.root[value], -1))
            may_move = self.nodes[point].op == "call_function" and self.nodes[point] not in copies  # those move, too
            if self.order[copy] > point + 1 and may_move:
                self.nodes[point].append(copy)


def _written_values(
    node: fx.Node, op: OpOverload, positions: tuple[int, ...], args: tuple[Any, ...], targets: list[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes of the values that an update gives, each with what it is written to in place."""
    fresh = fresh_results(op)
    flat = node.target is call_on_copies
    single = len(positions) == 1 and fresh == 0 and not flat
    if single and not _is_list(node):
        yield node, targets[0]
        return
    if not node.users:
        yield node, targets[0]
        return
    for piece in node.users:
        index = piece.args[1]
        assert isinstance(index, int)
        if index < fresh:
            continue
        if flat:
            yield piece, targets[index - fresh]
        elif single:
            yield piece, targets[index]
        else:
            value = args[positions[index - fresh]]
            if isinstance(value, fx.Node):
                yield piece, value
            else:
                for item in piece.users:
                    yield item, value[item.args[1]]


def _part_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """For a part of a split, or a view of one: the split and the number of the part."""
    while _is_view(node) or node.target is operator.getitem:
        source, index = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(source, fx.Node):
            return None
        if node.target is operator.getitem and source.target in _SPLITS and isinstance(index, int):
            whole = source.args[0]
            value = whole.meta.get("val") if isinstance(whole, fx.Node) else None
            # Parts of an expanded tensor may share memory.
            return (source, index) if isinstance(value, torch.Tensor) and value.is_contiguous() else None
        node = source
    return None


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return not declares_writes(node.target) and bool(shared_inputs(node))


def _written_positions(node: fx.Node, op: OpOverload) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    if node.target is call_on_copies:
        return tuple(node.args[1]), tuple(node.args[2:])  # type: ignore[arg-type]
    return written_positions(op), node.args


def _reads_a_target(args: tuple[Any, ...], positions: tuple[int, ...], targets: list[fx.Node]) -> bool:
    return any(n in targets for i, a in enumerate(args) if i not in positions for n in nodes_in(a))


def _is_list(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _same_dtype_and_shape(target: fx.Node, node: fx.Node, op: OpOverload) -> bool:
    """True if a result has the dtype and shape of its target; otherwise a copy that follows converts it."""
    val = node.meta.get("val")
    have = target.meta.get("val")
    if isinstance(val, torch.Tensor) and isinstance(have, torch.Tensor):
        return val.dtype == have.dtype and val.shape == have.shape
    return True


def _dense_like(target: fx.Node, node: fx.Node) -> bool:
    have, want = target.meta["val"], node.meta["val"]
    return bool(have.shape == want.shape and have.stride() == want.stride() and have.dtype == want.dtype)


def _is_needed(node: fx.Node) -> bool:
    updates = isinstance(node.target, OpOverload) and node_meta(node).in_place is node.target
    return updates or writes(node) or is_needed(node)
