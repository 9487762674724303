from __future__ import annotations

import torch
from torch import fx

from wholestep.ir.graph_walks import ancestors, descendants, postorder, reachable


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


def test_in_postorder_each_item_comes_after_what_it_needs_and_starts_keep_their_order() -> None:
    needs = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": [], "e": ["b"]}
    order = postorder(["e", "a"], needs.__getitem__)
    assert sorted(order) == sorted(needs)
    assert all(order.index(each) < order.index(item) for item, below in needs.items() for each in below)
    assert order.index("e") < order.index("a")


def test_a_long_chain_needs_no_recursion() -> None:
    assert postorder([50_000], lambda number: [number - 1] if number else []) == list(range(50_001))
