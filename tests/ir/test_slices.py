from __future__ import annotations

import torch
from torch import fx

from wholestep.ir.slices import ancestors, descendants, reachable


def test_slices_follow_edges_both_ways_and_contain_where_they_start() -> None:
    graph = fx.symbolic_trace(lambda x, y: (torch.sin(x) + torch.cos(y), torch.tan(y))).graph
    named = {node.name: node for node in graph.nodes}
    assert set(ancestors([named["add"]])) == {named[name] for name in ("add", "sin", "cos", "x", "y")}
    assert set(descendants([named["y"]])) == {named[name] for name in ("y", "cos", "tan", "add", "output")}


def test_each_item_is_followed_once_and_the_order_is_depth_first() -> None:
    asked: list[int] = []

    def following(number: int) -> list[int]:
        asked.append(number)
        return [number // 2, number - 1] if number else [5]

    assert list(reachable([5], following)) == [5, 4, 3, 2, 1, 0]
    assert asked == [5, 4, 3, 2, 1, 0]
