"""Wait for a collective as late as possible: right before the first node that needs its result.

    before                                 after
    started = all_reduce(g, 'avg', '0')    started = all_reduce(g, 'avg', '0')
    done = wait_tensor(started)            h2 = mm(..)                        runs during the communication
    flat = view(done, [-1])                done = wait_tensor(started)
    h2 = mm(..)                            flat = view(done, [-1])
    p1 = add(p, flat)                      p1 = add(p, flat)

Needs: comm_fusion_with_concat (moving waits of collectives that will be merged is wasted work).  Numerics: exact.
Legal because waits and views move down to their first real user, past nodes that do not read them, but never behind the
first write-back of the epilogue, nor behind a write into what the collective is still sending (or a view still shows):
a StepGraph has no such writes, graphs from elsewhere may.  The wait of a collective that works in place stays where it
is.  Views, splits and parts of a result move along.  Cost: one walk over the graph.
"""

from __future__ import annotations

import math

from torch import fx

from wholestep.ir.collectives import is_part
from wholestep.ir.effects import WriteWindows, is_wait, writes
from wholestep.ir.graph_walks import epilogue, reachable
from wholestep.passes.comm_fusion import comm_fusion_with_concat
from wholestep.passes.engine.contract import graph_optimization_pass


@graph_optimization_pass(prerequisites=[comm_fusion_with_concat], numerics="exact", allow_rerun=True)
def schedule_comm_wait(gm: fx.GraphModule) -> None:
    """Move each wait, with the views behind it, to right before its first real user."""
    apply_moves(plan_moves(gm.graph))


def plan_moves(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of a node and the node that it moves right before, in graph order."""
    nodes: list[fx.Node] = list(graph.nodes)
    place = dict(zip(nodes, range(len(nodes)), strict=True))
    followers = _followers(graph)
    end = min((place[node] for node in epilogue(graph)), default=len(nodes) - 1)
    windows = WriteWindows(nodes, end)
    last: dict[fx.Node, int] = {}
    in_order = sorted(followers, key=place.__getitem__)
    for node in reversed(in_order):
        if node.users:
            reals = [last.get(user, place[user]) if user in followers else place[user] for user in node.users]
            last[node] = min(*reals, end, *_next_writes(node, windows, place))
    return [(node, nodes[last[node]]) for node in in_order if node in last]


def _next_writes(node: fx.Node, windows: WriteWindows, place: dict[fx.Node, int]) -> list[int]:
    """The nodes before which a wait or a view must be placed, because they write what it, or its collective, reads."""
    if not windows.any:
        return []
    found = [windows.around([node, *node.all_input_nodes], place[node])[1]]
    if is_wait(node.target):
        started = _started_by(node)
        if writes(started):
            return [place[node] + 1]  # a reader of its operand reads the result
        found.append(windows.around(started.all_input_nodes, place[started])[1])
    return [int(each) for each in found if each != math.inf]


def _started_by(wait: fx.Node) -> fx.Node:
    """The collective that a wait completes, or the input that it waits for."""
    node = wait
    while (is_wait(node.target) or is_part(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _followers(graph: fx.Graph) -> set[fx.Node]:
    """Waits, and views of their results."""
    other = set[int]()
    waits: list[fx.Node] = []
    for node in graph.nodes:
        if id(node.target) in other:
            continue
        if is_wait(node.target):
            waits.append(node)
        else:
            other.add(id(node.target))
    return set(reachable(waits, lambda node: filter(is_part, node.users)))


def apply_moves(moves: list[tuple[fx.Node, fx.Node]]) -> None:
    """Nodes with the same destination keep their order."""
    for node, before in moves:
        if node.next is not before:
            before.prepend(node)
