"""Slices of a graph: what can be reached from some nodes along the edges, and in which order it can run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from torch import fx

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
