"""Optimizers that write in place, as `make_fx` traces them, become functional: blocks, splits and moves can find them.

    before                                       after
    _foreach_add_([s0, s1], 1)                   s = _foreach_add([s0, s1], 1)
    _fused_adam_([p0, p1], [g0, g1], ..)         new = _fused_adam([p0, p1], [g0, g1], .., [s[0], s[1]])
                                                 copy_(s0, s[0]); copy_(p0, new[0][0]); ..

Needs: nothing.  Numerics: exact.  Legal everywhere (`ir.functionalize`); operators on whose results a collective
depends stay as they are.  A captured step has no such operators.  Cost: a few walks over the graph.

Copies of an optimizer's results into memory that no node reads are removed (`remove_copy_from_optimizer`).

    before                                        after
    new = _fused_adam([p], [g], [m], ..)          new = _fused_adam([p], [g], [m], ..)
    copy_(g, new[1][0])                           copy_(p, new[0][0])
    copy_(p, new[0][0])                           copy_(m, new[2][0])
    copy_(m, new[2][0])

Tracing an optimizer leaves such orphans: a fused operator also returns the gradients. A StepGraph has none,
because every `copy_` of its epilogue is a write-back of the signature; graphs from elsewhere do.
Needs: nothing.  Numerics: exact.  Legal where nothing uses the `copy_` and nothing after it reads the memory that it
writes, through whatever view; an input, a constant, or a view of one is never an orphan, so weight updates stay. Only
copies of what a `_fused_*` or `_foreach_*` operator computed go, and of a captured step only those of its optimizer:
the user's own `copy_` stays. What only the orphans read is removed with them.  Cost: one walk over the graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from wholestep.ir.effects import is_needed, is_new_element, keeps_elements, reads_contents, shared_inputs, writes
from wholestep.ir.functionalize import functionalize
from wholestep.ir.graph_walks import erase_unread
from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.meta import node_meta
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.torch_private.operators import OpOverload, op_name


@graph_optimization_pass(numerics="exact", allow_rerun=True)
def functionalize_optimizer(gm: Any) -> None:
    """Turn in-place updates into new values and `copy_`, and drop copies that no node reads."""
    functionalized(gm.graph)


def functionalized(graph: fx.Graph) -> None:
    """The same, on a graph."""
    count = graph.functionalize_optim() if isinstance(graph, IterGraph) else functionalize(graph)
    if count:
        apply_removal(graph, plan_orphans(graph))


_COPY = torch.ops.aten.copy_.default
_OPTIMIZERS = ("aten::_fused_", "aten::_foreach_")


@graph_optimization_pass(prerequisites=[], apply_after=[], numerics="exact", allow_rerun=True)
def remove_copy_from_optimizer(gm: fx.GraphModule) -> None:
    """Erase the orphan `copy_` nodes of an optimizer, and what was computed only for them."""
    apply_removal(gm.graph, plan_orphans(gm.graph))


def plan_orphans(graph: fx.Graph) -> list[fx.Node]:
    """The copies that can be removed, in graph order."""
    memory = _memory(graph)
    is_captured = any(node_meta(node).phase == "optimizer" for node in graph.nodes)
    read: set[fx.Node] = set()
    """Memory that a later node reads; the walk is backwards."""
    orphans: list[fx.Node] = []
    for node in reversed(graph.nodes):
        target = node.args[0] if node.target is _COPY and node.args else None
        if isinstance(target, fx.Node):
            ours = not is_captured or node_meta(node).phase in ("optimizer", "epilogue")
            if ours and not node.users and _is_temporary(memory[target], read) and _is_of_an_optimizer(node):
                orphans.append(node)
                continue
            sources = [source for source in node.all_input_nodes if source is not target or source in node.args[1:]]
        else:
            sources = node.all_input_nodes if reads_contents(node) else []
        for source in sources:
            read |= memory[source]
    return orphans[::-1]


def apply_removal(graph: fx.Graph, orphans: list[fx.Node]) -> None:
    """Erase the orphans, and all nodes without effects that only they read."""
    wanted = set(orphans)
    erase_unread(graph, orphans, lambda node: node in wanted or not (is_needed(node) or writes(node)))


def _memory(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node: the nodes whose memory its result may lie in (itself, if it is new)."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        shared = [] if is_new_element(node) else shared_inputs(node)
        roots = [found[source] for source in shared]
        found[node] = frozenset().union(*roots) if roots else frozenset((node,))
    return found


def _is_temporary(memory: frozenset[fx.Node], read: set[fx.Node]) -> bool:
    return not memory & read and all(root.op == "call_function" for root in memory)


def _is_of_an_optimizer(copy: fx.Node) -> bool:
    """Whether the value is the result of a list operator, possibly through views."""
    value = copy.args[1]
    while isinstance(value, fx.Node):
        if isinstance(value.target, OpOverload) and op_name(value.target).startswith(_OPTIMIZERS):
            return True
        if value.target is not operator.getitem and not keeps_elements(value):
            return False
        value = value.all_input_nodes[0]
    return False
