"""Communicate nothing that nobody reads: capture keeps a collective and its wait although their result was dropped.

    before                                           after
    g = mul(x, 2)                                    loss = sum(x)
    r = all_reduce(g, 'avg', '0')                    output(loss)
    done = wait_tensor(r)
    loss = sum(x)
    output(loss)

Needs: nothing.  Numerics: exact.  Legal where no wait of the collective has a user: its result is a fresh tensor.
In-place collectives, and sends and receives between two ranks, stay.  Other nodes without users go too, unless they are
random ops.  All ranks have the same graph and so drop the same ones.  Cost: one walk over the graph.
"""

from __future__ import annotations

from torch import fx

from wholestep.ir.collectives import comm_block
from wholestep.ir.effects import communicates, is_wait, may_draw, writes
from wholestep.ir.graph_functions import call_on_copies
from wholestep.passes.engine.contract import graph_optimization_pass


@graph_optimization_pass(numerics="exact", allow_rerun=True)
def remove_dead_collectives(gm: fx.GraphModule) -> int:
    """Erase collectives without readers; returns how many."""
    graph, dropped = gm.graph, 0
    for node in reversed(list(graph.nodes)):
        if _is_droppable(node):
            block = comm_block(node)
            if block.is_dead:
                for behind in (*block.waits, *reversed(block.parts)):
                    graph.erase_node(behind)
                dropped += 1
            else:
                continue
        elif node.users or not _is_pure(node):
            continue
        graph.erase_node(node)
    if dropped:
        gm.recompile()
    return dropped


drop_dead_collectives = remove_dead_collectives
"""The same pass by a shorter name."""


def _is_droppable(node: fx.Node) -> bool:
    return communicates(node) and node.target is not call_on_copies and not writes(node)


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or communicates(node) or is_wait(node.target) or writes(node):
        return False
    return not may_draw(node.target) and not node.is_impure()
