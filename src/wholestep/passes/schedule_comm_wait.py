"""Wait for a collective as late as possible: right before the first node that needs its result.

    before                                 after
    started = all_reduce(g, 'avg', '0')    started = all_reduce(g, 'avg', '0')
    done = wait_tensor(started)            h2 = mm(..)                        computed while the ranks talk
    flat = view(done, [-1])                done = wait_tensor(started)
    h2 = mm(..)                            flat = view(done, [-1])
    p1 = add(p, flat)                      p1 = add(p, flat)

Needs: comm_fusion_with_concat (moving waits of collectives that will be merged is work for nothing).  Numerics: exact.
Legal everywhere: waits and views move down to their first real user, past nodes that do not read them, but never behind
the first write-back of the epilogue.  Views, splits and parts of a result move along.  Cost: one walk over the graph.
"""

from __future__ import annotations

from torch import fx

from wholestep.ir.comm_block import is_part
from wholestep.ir.effects import is_wait
from wholestep.passes.comm_fusion import comm_fusion_with_concat
from wholestep.passes.common_subexpressions import epilogue
from wholestep.passes.contract import graph_optimization_pass


@graph_optimization_pass(prerequisites=[comm_fusion_with_concat], numerics="exact", allow_rerun=True)
def schedule_comm_wait(gm: fx.GraphModule) -> None:
    """Move each wait, with the views behind it, to right before its first real user."""
    apply_moves(plan_moves(gm.graph))


def plan_moves(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Which node goes right before which other, in graph order."""
    place = dict(zip(graph.nodes, range(len(graph.nodes)), strict=True))
    followers = _followers(graph)
    last = epilogue(graph)
    end = min(last, key=place.__getitem__) if last else None
    first_user: dict[fx.Node, fx.Node] = {}
    in_order = sorted(followers, key=place.__getitem__)
    for node in reversed(in_order):
        reals = [first_user.get(user, user) if user in followers else user for user in node.users]
        if reals:
            first = min(reals, key=place.__getitem__)
            first_user[node] = first if end is None or place[first] < place[end] else end
    return [(node, first_user[node]) for node in in_order if node in first_user]


def _followers(graph: fx.Graph) -> set[fx.Node]:
    """Waits, and views of what they give."""
    other = set[int]()
    stack: list[fx.Node] = []
    for node in graph.nodes:
        if id(node.target) in other:
            continue
        if is_wait(node.target):
            stack.append(node)
        else:
            other.add(id(node.target))
    found = set(stack)
    while stack:
        for user in stack.pop().users:
            if user not in found and is_part(user):
                found.add(user)
                stack.append(user)
    return found


def apply_moves(moves: list[tuple[fx.Node, fx.Node]]) -> None:
    """Nodes with the same destination keep their order."""
    for node, before in moves:
        if node.next is not before:
            before.prepend(node)
