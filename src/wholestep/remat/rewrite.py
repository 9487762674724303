"""Let the backward of a step compute values again.

    before    h = gelu(u); ..; g = gelu_backward(d, u); w = mm(h, d)
    after     h = gelu(u); ..; g = gelu_backward(d, u); h_again = gelu(u); w = mm(h_again, d)

Numerics: exact; a node is computed again from the same values by the same operator; nothing is drawn twice.
A new part of the step begins with the backward, and wherever much is computed again: a compiler that saw all of it at
once would compute it all in the beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from wholestep.ir.graphs import tensors_in
from wholestep.ir.meta import node_meta, set_node_meta, update_node_meta
from wholestep.remat.outline import Outline, Plan
from wholestep.remat.play import order_of
from wholestep.simulate.cost_model import is_counted

_PARTS = 16
"""On the CPU a part ends when more than this fraction of the forward's values has been computed again in it."""
_LEAST = 32
"""Nodes of a part, views not counted: fewer are not worth a compiled call of their own."""


def recompute(graph: fx.Graph, outline: Outline, plan: Plan) -> int:
    """Rewrite the graph that an outline was made of, or a copy; returns how many nodes were added."""
    return _Rewriting(graph, outline, plan).run()


class _Rewriting:
    def __init__(self, graph: fx.Graph, outline: Outline, plan: Plan) -> None:
        self._graph = graph
        self._outline = outline
        self._nodes = list(graph.nodes)
        self._again = outline.run_again(plan)
        self._made: dict[fx.Node, fx.Node] = {}
        total = sum(outline.keeping(i) for i, needed in enumerate(outline.needed) if needed and not outline.is_view(i))
        # Inductor joins unrelated loops only on the CPU.
        on_cpu = all(tensor.device.type == "cpu" for node in self._nodes for tensor in tensors_in(node.meta.get("val")))
        self._most = total / _PARTS if on_cpu else float("inf")
        self._since = 0.0
        """Bytes computed again since the last part began."""
        self._length = 0
        """Nodes since then."""

    def run(self) -> int:
        chosen = {self._nodes[i] for i in self._again}
        waiting: list[int] = []
        is_first = True
        for entry in order_of(self._outline, self._again):
            if entry < 0:
                waiting.append(~entry)
            elif self._outline.backward[entry]:
                node = self._nodes[entry]
                first = self._insert(waiting, node) or node
                if is_first or (self._length >= _LEAST and self._is_much(waiting)):
                    update_node_meta(first, begins=True)
                    is_first, self._since, self._length = False, 0.0, 0
                self._since += self._bytes(waiting)
                self._length += sum(1 for i in (*waiting, entry) if not self._outline.is_view(i))
                waiting = []
                if not chosen.isdisjoint(node.all_input_nodes):
                    node.args = fx.map_arg(node.args, self._second)
                    node.kwargs = fx.map_arg(node.kwargs, self._second)
        return len(self._made)

    def _insert(self, waiting: list[int], before: fx.Node) -> fx.Node | None:
        with self._graph.inserting_before(before):
            for i in waiting:
                self._made[self._nodes[i]] = _copy(self._graph, self._nodes[i], self._second)
        return self._made[self._nodes[waiting[0]]] if waiting else None

    def _second(self, node: fx.Node) -> fx.Node:
        return self._made.get(node, node)

    def _is_much(self, waiting: list[int]) -> bool:
        return any(is_counted(self._nodes[i].target) for i in waiting) or (bool(waiting) and self._since > self._most)

    def _bytes(self, waiting: list[int]) -> int:
        return sum(self._outline.keeping(i) for i in waiting if not self._outline.is_view(i))


def _copy(graph: fx.Graph, node: fx.Node, second: Callable[[fx.Node], fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, second)
    copy.name = f"{node.name}_again"
    copy.meta = dict(node.meta)
    set_node_meta(copy, replace(node_meta(node), phase="backward", recompute=True, in_place=None))
    return copy
