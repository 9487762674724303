"""How long the uses of a result can wait: elementwise followers move down, with their results, to the first real use.

    w1 = wait(a1); d1 = div(w1, 2)         d1 = div(w1, 2) can stand anywhere before the output,
    b2 = all_reduce(g2); w2 = wait(b2)     so w1 may come as late as that,
    d2 = div(w2, 2)                        and a1 may share a bucket with b2
    output(d1, d2)

Movable are views, casts and elementwise operators that write nothing and draw nothing; never past a write into what
they read, nor if a collective that is just being placed reads them.  Each node is looked at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from wholestep.ir.collectives import is_part
from wholestep.ir.effects import WriteWindows, is_communication, may_draw, may_write
from wholestep.ir.slices import reachable
from wholestep.torch_private.operators import OpOverload

aten = torch.ops.aten

_CASTS = frozenset({aten._to_copy.default, aten.clone.default})


class LateUses:
    """Until where the results of nodes are not needed, if all that can move does."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        place: dict[fx.Node, int],
        end: int,
        windows: WriteWindows,
        fixed: Collection[fx.Node],
    ) -> None:
        """`fixed`: nodes that stay although they could move; `end`: behind it nothing goes."""
        self._nodes, self._place, self._end = nodes, place, end
        self._windows, self._fixed = windows, fixed
        self._late: dict[fx.Node, float] = {}
        self._movable: dict[fx.Node, bool] = {}

    def late(self, wait: fx.Node) -> float:
        """The last position before which a wait can stand."""
        stack = [wait]
        while stack:
            node = stack[-1]
            missing = [user for user in node.users if user not in self._late and self._moves(user)]
            if missing:
                stack += missing
                continue
            stack.pop()
            uses = [self._late[user] if self._moves(user) else self._place[user] for user in node.users]
            next_write = self._windows.around([node, *node.all_input_nodes], self._place[node])[1]
            self._late[node] = min(self._end, next_write, *uses)
        return self._late[wait]

    def behind(self, waits: Iterable[fx.Node], place: float) -> list[fx.Node]:
        """The nodes behind some waits that stand before a place and have to move there, in graph order."""

        def early(node: fx.Node) -> list[fx.Node]:
            return [user for user in node.users if self._place[user] < place and self._moves(user)]

        found = reachable((user for wait in waits for user in early(wait)), early)
        return sorted(found, key=self._place.__getitem__)

    def _moves(self, node: fx.Node) -> bool:
        known = self._movable.get(node)
        if known is None:
            known = self._movable[node] = node not in self._fixed and is_movable(node)
        return known


def is_movable(node: fx.Node) -> bool:
    """Whether a node only computes, element by element, something new out of what it reads."""
    target = node.target
    if node.op != "call_function":
        return False
    if is_part(node):
        return True
    if not isinstance(target, OpOverload) or may_write(target) or is_communication(target):
        return False
    return target in _CASTS or (torch.Tag.pointwise in target.tags and not may_draw(target))
