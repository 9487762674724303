"""Open operators that keep more than they need: norms and softmax become their parts.

    before    y, mean, rstd = native_layer_norm(x, ..)
    after     mean = ..; rstd = ..; y = (x - mean) * rstd * w + b

Inductor does the same with them later. Done before, the backward can compute `y` again from the few bytes of `mean` and
`rstd`, without the sums over rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.graphs import tensors_in
from wholestep.ir.meta import node_meta, set_node_meta
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.inductor import decomposed

aten = torch.ops.aten
_OPENED = frozenset(
    {
        aten._log_softmax.default,
        aten._softmax.default,
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._fused_rms_norm.default,
    }
)


def expand(graph: fx.Graph) -> int:
    """Open such operators of a graph; returns how many."""
    found = [n for n in graph.nodes if n.op == "call_function" and n.target in _OPENED and _is_plain(n)]
    for node in found:
        _open(graph, node)
    return len(found)


def _is_plain(node: fx.Node) -> bool:
    """Whether all tensors are known, and results are taken one by one."""
    several = isinstance(node.meta.get("val"), list | tuple)
    parts = all(user.target is operator.getitem for user in node.users) if several else True
    return parts and any(isinstance(t, FakeTensor) for t in tensors_in(node.meta.get("val")))


def _open(graph: fx.Graph, node: fx.Node) -> None:
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
    """Put a new node in the place of an old one, name and all: write-backs go by names."""
    node.replace_all_uses_with(by)
    name = node.name
    graph.erase_node(node)
    if by.op == "call_function":
        by.name = name
