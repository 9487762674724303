"""Optimizers that write in place, as `make_fx` traces them, become functional: blocks, splits and moves can find them.

    before                                       after
    _foreach_add_([s0, s1], 1)                   s = _foreach_add([s0, s1], 1)
    _fused_adam_([p0, p1], [g0, g1], ..)         new = _fused_adam([p0, p1], [g0, g1], .., [s[0], s[1]])
                                                 copy_(s0, s[0]); copy_(p0, new[0][0]); ..

Needs: nothing.  Numerics: exact.  Legal everywhere (`ir.functionalize`); operators that something depends on which is
sent stay as they are.  A captured step has no such operators.  Cost: a few walks over the graph.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from wholestep.ir.functionalize import functionalize
from wholestep.ir.iter.graph import IterGraph
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.remove_copy_from_optimizer import apply_removal, plan_orphans


@graph_optimization_pass(numerics="exact", allow_rerun=True)
def functionalize_optimizer(gm: Any) -> None:
    """Turn in-place updates into new values and `copy_`, and drop the copies that nobody reads."""
    functionalized(gm.graph)


def functionalized(graph: fx.Graph) -> None:
    """The same, on a graph."""
    count = graph.functionalize_optim() if isinstance(graph, IterGraph) else functionalize(graph)
    if count:
        apply_removal(graph, plan_orphans(graph))
