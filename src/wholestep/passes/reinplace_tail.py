"""Turn updates at the end of a graph back into in-place operators, so that memory does not double.

    before                                    after
    p1 = add(p, g, alpha=-lr)                 p1 = add_(p, g, alpha=-lr)
    copy_(p, p1)                              output(loss)
    output(loss)

For graphs from elsewhere: `ws.compile` does it by itself after all passes (`ir.reinplace`).  It ends the normal form
and so is the last pass.  Numerics: exact.  Cost: one walk over the graph.

`note_updates` finds which operators of a graph could update in place, for graphs without a record of what eager ran:

    m1 = lerp(m, g, 0.1); p1 = addcdiv(p, m1, d)     the values of write-backs, and their first
    copy_(m, m1); copy_(p, p1)                       arguments: lerp_ and addcdiv_ exist

`reinplace` decides whether a recorded operator may really write.  Cost: the nodes that are visited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx

from wholestep.ir.effects import in_place_variant, sharing_with_outputs, writes
from wholestep.ir.graph_walks import epilogue
from wholestep.ir.meta import node_meta, update_node_meta
from wholestep.ir.reinplace import reinplace
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.torch_private.operators import OpOverload


@graph_optimization_pass(numerics="exact", ends_normal_form=True)
def reinplace_tail(gm: fx.GraphModule) -> None:
    """Turn updates back into in-place operators. For graph modules: a StepGraph stays in its normal form.

    A graph that writes outside of its epilogue is left alone. Inputs must not share memory.
    """
    last = epilogue(gm.graph)
    if not any(writes(node) and node not in last for node in gm.graph.nodes):
        note_updates(gm.graph, last)
        reinplace(gm.graph)


def note_updates(graph: fx.Graph, write_backs: Iterable[fx.Node]) -> None:
    """Record the in-place operator on each node that computes a write-back, if it has one."""
    stack = [node.args[1] for node in write_backs]
    seen: set[Any] = set(sharing_with_outputs(graph))  # a result with memory of its own keeps it
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if not isinstance(node.target, OpOverload):
            stack += node.all_input_nodes  # an element of a list
            continue
        twin = in_place_variant(node.target)
        if twin is None or not node.args or node_meta(node).in_place is not None or not _is_known(node):
            continue
        update_node_meta(node, in_place=twin)
        first = node.args[0]
        stack += list(first) if isinstance(first, list | tuple) else [first]


def _is_known(node: fx.Node) -> bool:
    """Whether results and first arguments are known to have one dtype: an in-place operator does not change it."""
    first = node.args[0]
    targets = list(first) if isinstance(first, list | tuple) else [first]
    values = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in (node, *targets)]
    return all(isinstance(value, Tensor | list | tuple) for value in values)
