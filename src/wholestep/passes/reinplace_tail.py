"""Turn updates at the end of a graph back into in-place operators, so that memory does not double.

    before                                    after
    p1 = add(p, g, alpha=-lr)                 p1 = add_(p, g, alpha=-lr)
    copy_(p, p1)                              output(loss)
    output(loss)

For graphs from elsewhere: `ws.compile` does it by itself after all passes (`ir.reinplace`).  It ends the normal form
and so is the last pass.  Numerics: exact.  Cost: one walk over the graph.
"""

from __future__ import annotations

from torch import fx

from wholestep.ir.effects import writes
from wholestep.ir.graphs import epilogue
from wholestep.ir.reinplace import reinplace
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.in_place_twins import note_updates


@graph_optimization_pass(numerics="exact", ends_normal_form=True)
def reinplace_tail(gm: fx.GraphModule) -> None:
    """Turn updates back into in-place operators. For graph modules: a StepGraph stays in its normal form.

    A graph that writes outside of its epilogue is left alone. Inputs must not share memory.
    """
    last = epilogue(gm.graph)
    if not any(writes(node) and node not in last for node in gm.graph.nodes):
        note_updates(gm.graph, last)
        reinplace(gm.graph)
