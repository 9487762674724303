"""Editing a graph by methods of the graph, as PyTorch's `IterGraph` wanted it: each is what `fx.Node` does itself.

There they kept three graphs in step. Here the other graphs are made from the main one, so that both ways are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx
from torch.fx.node import Argument


class NodeEdits:
    """The `node_*` methods and moves of an IterGraph."""

    def move_before(self, nodes: Iterable[fx.Node], target_node: fx.Node) -> None:
        """Move nodes, in their order, to right before another."""
        for node in nodes:
            target_node.prepend(node)

    def move_after(self, nodes: Iterable[fx.Node], target_node: fx.Node) -> None:
        """Move nodes, in their order, to right after another."""
        for node in nodes:
            target_node.append(node)
            target_node = node

    def node_prepend(self, target_node: fx.Node, node: fx.Node) -> None:
        """`target_node.prepend(node)`."""
        target_node.prepend(node)

    def node_append(self, target_node: fx.Node, node: fx.Node) -> None:
        """`target_node.append(node)`."""
        target_node.append(node)

    def node_set_args(self, node: fx.Node, args: tuple[Argument, ...]) -> None:
        """`node.args = args`."""
        node.args = args

    def node_set_kwargs(self, node: fx.Node, kwargs: dict[str, Argument]) -> None:
        """`node.kwargs = kwargs`."""
        node.kwargs = kwargs

    def node_update_arg(self, node: fx.Node, index: int, arg: Argument) -> None:
        """`node.update_arg(index, arg)`."""
        node.update_arg(index, arg)

    def node_replace_all_uses_with(
        self,
        node: fx.Node,
        replace_with: fx.Node,
        delete_user_cb: Callable[[fx.Node], bool] = lambda user: True,
        *,
        propagate_meta: bool = False,
    ) -> list[fx.Node]:
        """`node.replace_all_uses_with(..)`."""
        return node.replace_all_uses_with(replace_with, delete_user_cb, propagate_meta=propagate_meta)
