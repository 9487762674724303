"""The two rewrites of a step under a budget.

`recompute` lets the backward recompute values:

    before    h = gelu(u); ..; g = gelu_backward(d, u); w = mm(h, d)
    after     h = gelu(u); ..; g = gelu_backward(d, u); h_again = gelu(u); w = mm(h_again, d)

Numerics: exact. A node is recomputed from the same values by the same operator, and no random op runs twice. A new part
of the step (`NodeMeta.begins`) begins with the backward and wherever much is recomputed: a compiler that saw all of it
at once would recompute everything at the start.

`decompose_norms` replaces norms and softmax, which save more than they need, by their parts:

    before    y, mean, rstd = native_layer_norm(x, ..)
    after     mean = ..; rstd = ..; y = (x - mean) * rstd * w + b

Inductor does the same later. Done before planning, the backward can recompute `y` from the few bytes of `mean` and
`rstd`, without the sums over rows. For compiled steps only: numerics are those of Inductor's decompositions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.graphs import tensors_in
from wholestep.ir.meta import node_meta, set_node_meta, update_node_meta
from wholestep.remat.peak import order_of
from wholestep.remat.problem import Plan, RematProblem
from wholestep.simulate.cost_model import is_counted
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.inductor import decomposed

_PARTS = 16
"""On the CPU a part ends when more than one in so many bytes of the forward's values has been recomputed in it."""
_LEAST = 32
"""Nodes of a part, without views: fewer are not worth a compiled call of their own."""


def recompute(graph: fx.Graph, problem: RematProblem, plan: Plan) -> int:
    """Rewrite the graph of a problem, or a copy of it; returns how many nodes were added."""
    return _Recompute(graph, problem, plan).run()


class _Recompute:
    def __init__(self, graph: fx.Graph, problem: RematProblem, plan: Plan) -> None:
        self._graph = graph
        self._problem = problem
        self._nodes = list(graph.nodes)
        self._again = problem.recomputed(plan)
        self._made: dict[fx.Node, fx.Node] = {}
        total = sum(
            problem.saved_bytes(i) for i, needed in enumerate(problem.needed) if needed and not problem.is_view(i)
        )
        # Only on the CPU does Inductor fuse unrelated loops.
        on_cpu = all(tensor.device.type == "cpu" for node in self._nodes for tensor in tensors_in(node.meta.get("val")))
        self._most = total / _PARTS if on_cpu else float("inf")
        self._since = 0.0
        """Bytes recomputed since the last part began."""
        self._length = 0
        """Nodes since then."""

    def run(self) -> int:
        chosen = {self._nodes[i] for i in self._again}
        waiting: list[int] = []
        is_first = True
        for entry in order_of(self._problem, self._again):
            if entry < 0:
                waiting.append(~entry)
            elif self._problem.backward[entry]:
                node = self._nodes[entry]
                first = self._insert(waiting, node) or node
                if is_first or (self._length >= _LEAST and self._is_large(waiting)):
                    update_node_meta(first, begins=True)
                    is_first, self._since, self._length = False, 0.0, 0
                self._since += self._bytes(waiting)
                self._length += sum(1 for i in (*waiting, entry) if not self._problem.is_view(i))
                waiting = []
                if not chosen.isdisjoint(node.all_input_nodes):
                    node.args = fx.map_arg(node.args, self._recomputed)
                    node.kwargs = fx.map_arg(node.kwargs, self._recomputed)
        return len(self._made)

    def _insert(self, waiting: list[int], before: fx.Node) -> fx.Node | None:
        with self._graph.inserting_before(before):
            for i in waiting:
                self._made[self._nodes[i]] = _copy(self._graph, self._nodes[i], self._recomputed)
        return self._made[self._nodes[waiting[0]]] if waiting else None

    def _recomputed(self, node: fx.Node) -> fx.Node:
        return self._made.get(node, node)

    def _is_large(self, waiting: list[int]) -> bool:
        return any(is_counted(self._nodes[i].target) for i in waiting) or (bool(waiting) and self._since > self._most)

    def _bytes(self, waiting: list[int]) -> int:
        return sum(self._problem.saved_bytes(i) for i in waiting if not self._problem.is_view(i))


def _copy(graph: fx.Graph, node: fx.Node, second: Callable[[fx.Node], fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, second)
    copy.name = f"{node.name}_again"
    copy.meta = dict(node.meta)
    set_node_meta(copy, replace(node_meta(node), phase="backward", recompute=True, in_place=None))
    return copy


aten = torch.ops.aten
_DECOMPOSED = frozenset(
    {
        aten._log_softmax.default,
        aten._softmax.default,
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._fused_rms_norm.default,
    }
)


def decompose_norms(graph: fx.Graph) -> int:
    """Replace norms and softmax of a graph by their parts; returns how many."""
    found = [n for n in graph.nodes if n.op == "call_function" and n.target in _DECOMPOSED and _can_decompose(n)]
    for node in found:
        _decompose(graph, node)
    return len(found)


def _can_decompose(node: fx.Node) -> bool:
    """True if the metadata has fake tensors, and results are taken one by one."""
    several = isinstance(node.meta.get("val"), list | tuple)
    parts = all(user.target is operator.getitem for user in node.users) if several else True
    return parts and any(isinstance(t, FakeTensor) for t in tensors_in(node.meta.get("val")))


def _decompose(graph: fx.Graph, node: fx.Node) -> None:
    sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    values = [source.meta["val"] for source in sources]
    mode = next(t.fake_mode for t in tensors_in(node.meta["val"]) if isinstance(t, FakeTensor))

    def run(*tensors: Any) -> tuple[Any, ...]:
        env = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: env.get(n, n.meta.get("val")))
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(result) if isinstance(result, list | tuple) else (result,)

    parts = decomposed(run, values, mode, settings={}, functionalize=False)
    env: dict[fx.Node, fx.Node] = dict(zip(parts.graph.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "call_function":
                env[part] = graph.node_copy(part, env.__getitem__)
                env[part].meta = {"val": part.meta.get("val")}
                set_node_meta(env[part], node_meta(node))
    results = [env[value] for value in parts.graph.output_node().args[0]]  # type: ignore[index, union-attr]
    _replace(graph, node, results)


def _replace(graph: fx.Graph, node: fx.Node, results: list[fx.Node]) -> None:
    if not isinstance(node.meta.get("val"), list | tuple):
        _take_over(graph, node, results[0])
        return
    for user in list(node.users):
        index: Any = user.args[1]
        _take_over(graph, user, results[index])
    graph.erase_node(node)


def _take_over(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    """Replace a node by a new one of the same name: write-backs are found by name."""
    node.replace_all_uses_with(by)
    name = node.name
    graph.erase_node(node)
    if by.op == "call_function":
        by.name = name
