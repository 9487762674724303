"""Communicate nothing that nobody reads: capture keeps a collective and its wait although their result was dropped.

    before                                           after
    g = mul(x, 2)                                    loss = sum(x)
    r = all_reduce(g, 'avg', '0')                    output(loss)
    done = wait_tensor(r)
    loss = sum(x)
    output(loss)

Needs: nothing.  Numerics: exact.  Legal where no wait of the collective has a user: its result is a fresh tensor.
In-place collectives, and sends and receives between two ranks, stay.  What only the dropped ones read goes too, unless
it draws random numbers.  All ranks have the same graph and so drop the same ones.  Cost: one walk over the graph.
"""

from __future__ import annotations

from torch import fx

from wholestep.ir.comm_block import comm_block
from wholestep.ir.effects import communicates, is_wait, may_draw, writes
from wholestep.ir.mutable import call_on_copies


def drop_dead_collectives(gm: fx.GraphModule) -> int:
    """Erase collectives without readers; returns how many."""
    graph, dropped = gm.graph, 0
    senders: set[fx.Node] = set()
    """What the dropped nodes read."""
    for node in reversed(list(graph.nodes)):
        if _is_droppable(node):
            block = comm_block(node)
            if block.is_dead:
                for behind in (*block.waits, *reversed(block.parts)):
                    graph.erase_node(behind)
                dropped += 1
            else:
                continue
        elif not (node in senders and not node.users and _is_pure(node)):
            continue
        senders.update(node.all_input_nodes)
        graph.erase_node(node)
    if dropped:
        gm.recompile()
    return dropped


def _is_droppable(node: fx.Node) -> bool:
    return communicates(node) and node.target is not call_on_copies and not writes(node)


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or communicates(node) or is_wait(node.target) or writes(node):
        return False
    return not may_draw(node.target) and not node.is_impure()
