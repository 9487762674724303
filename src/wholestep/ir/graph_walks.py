"""Walks over graphs: slices (what can be reached from some nodes, in which order it can run), copies, epilogues.

The cyclic garbage collector is paused while a whole graph is walked (`collector_paused`). Copying the arguments of
50,000 nodes makes enough tuples to start full collections, each of which visits every object of the process: they cost
several times what the walk itself does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

_COPY = torch.ops.aten.copy_.default


def erase_unread(graph: fx.Graph, candidates: Iterable[fx.Node], removable: Callable[[fx.Node], bool]) -> None:
    """Erase the candidates that nothing uses, then inputs of theirs that nothing uses any more, where `removable`."""
    remaining = list(candidates)
    erased: set[fx.Node] = set()
    while remaining:
        node = remaining.pop()
        if node in erased or node.users or not removable(node):
            continue
        sources = node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)
        remaining.extend(source for source in sources if not source.users)


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


def written_back(node: fx.Node) -> fx.Node | None:
    """The input that a `copy_` node writes back to; None for other nodes."""
    target = node.args[0] if node.target is _COPY and node.args else None
    return target if isinstance(target, fx.Node) and target.op == "placeholder" else None


def epilogue(graph: fx.Graph) -> list[fx.Node]:
    """The `copy_` nodes into inputs right before the output, in order: nothing reads what they write."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if written_back(node) is None:
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


Item = TypeVar("Item", bound=Hashable)


def reachable(starts: Iterable[Item], following: Callable[[Item], Iterable[Item]]) -> dict[Item, None]:
    """`starts` and all that follows them, transitively, in the order in which they are found (depth first).

    The followers of each item are asked for once; `following` decides where the slice ends.
    """
    found: dict[Item, None] = {}
    stack = list(starts)
    while stack:
        item = stack.pop()
        if item not in found:
            found[item] = None
            stack.extend(following(item))
    return found


def postorder(starts: Iterable[Item], needed: Callable[[Item], Iterable[Item]]) -> list[Item]:
    """`starts` and all that they need, transitively, each after everything that it needs itself."""
    order: dict[Item, None] = {}
    for start in starts:
        stack = [(start, False)]
        while stack:
            item, is_ready = stack.pop()
            if item in order:
                continue
            if is_ready:
                order[item] = None
            else:
                stack.append((item, True))
                stack.extend((each, False) for each in needed(item) if each not in order)
    return list(order)


def ancestors(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """`nodes` and everything that they are computed from."""
    return reachable(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """`nodes` and everything that is computed from them."""
    return reachable(nodes, lambda node: node.users)
