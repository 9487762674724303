"""A collective with everything through which its results are reached.

started = all_reduce_coalesced([a, b], 'sum', '0')     collective
part = started[0]; flat = view(part, [-1])             parts: results that are not there yet
done = wait_tensor(flat)                               waits
n = sym_size(started, 0)                               measures: ask for a size, which is known before the result is
started + 1                                            misused: reads a result without waiting (verify refuses it)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from wholestep.ir.effects import is_collective, is_measure, is_wait, shared_inputs, writes


@dataclass(frozen=True)
class CollectiveBlock:
    """A collective and the nodes behind it, each in the order in which it is found."""

    collective: fx.Node
    parts: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]
    misused: tuple[fx.Node, ...]
    measures: tuple[fx.Node, ...] = ()

    @property
    def is_dead(self) -> bool:
        """Whether nobody uses what the collective brings."""
        return not self.misused and not self.measures and not any(wait.users for wait in self.waits)


def comm_block(collective: fx.Node) -> CollectiveBlock:
    """The block of one collective. Costs its users."""
    parts: list[fx.Node] = []
    waits: list[fx.Node] = []
    misused: list[fx.Node] = []
    measures: list[fx.Node] = []
    stack = [collective]
    while stack:
        for user in stack.pop().users:
            if is_wait(user.target):
                waits.append(user)
            elif is_part(user):
                parts.append(user)
                stack.append(user)
            elif is_measure(user.target):
                measures.append(user)
            else:
                misused.append(user)
    return CollectiveBlock(collective, tuple(parts), tuple(waits), tuple(misused), tuple(measures))


def collective_of(wait: fx.Node) -> fx.Node:
    """The collective that a wait waits for; there may be views and parts of lists in between."""
    node = wait
    while node.all_input_nodes and not is_collective(node.target):
        node = node.all_input_nodes[0]
    return node


def is_part(node: fx.Node) -> bool:
    """Whether a node only gives another form to its one input: an element of a list, a view."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    return node.target is operator.getitem or (bool(shared_inputs(node)) and not writes(node))
