"""Graphs as a whole: a copy of one, the write-backs at its end, the tensors that a value holds.

Python's cyclic garbage collector stands still while a graph is walked.

Copying the arguments of 50,000 nodes makes enough tuples to start full collections, each of which looks at every
object of the process: they cost several times what the walk itself does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

_COPY = torch.ops.aten.copy_.default


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same nodes under the same names, each with metadata of its own (the entries are not copied)."""
    with collector_paused():
        return _copy(graph)


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        # Arguments that are set afterwards are not searched for sizes by torch, which takes longer than all the rest.
        made = new.create_node(node.op, node.target, None, None, node.name, node.type)
        if node.args:
            made.args = fx.map_arg(node.args, env.__getitem__)
        if node.kwargs:
            made.kwargs = fx.map_arg(node.kwargs, env.__getitem__)
        made.meta = dict(node.meta)
        env[node] = made
    for old, made in env.items():
        if made.name != old.name:
            made.name = old.name
    return new


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module of the same attributes with a graph of its own, which may be changed; metadata is shared."""
    return fx.GraphModule(gm, copy_graph(gm.graph), type(gm).__name__)


def epilogue(graph: fx.Graph) -> list[fx.Node]:
    """The `copy_` nodes into inputs right before the output, in order: nothing reads what they write."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        target = node.args[0] if node.target is _COPY and len(node.args) > 1 else None
        if not isinstance(target, fx.Node) or target.op != "placeholder":
            break
        found.append(node)
    return found[::-1]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a node's value, which may be a list of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection inside; where it was off already it stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
