"""Rewrites that `ws.compile` does by itself, as passes with contracts for graphs from elsewhere.

    remove_duplicate_collectives(gm)     dedup_collectives
    remove_dead_collectives(gm)          drop_dead_collectives
    reinplace_tail(gm)                   reinplace: the last pass, since it ends the normal form

The functions themselves stay what they are: capture and the runtime call them before and after all passes.
"""

from __future__ import annotations

from torch import fx

from wholestep.ir.effects import writes
from wholestep.ir.graphs import epilogue
from wholestep.ir.reinplace import reinplace
from wholestep.passes.dedup_collectives import dedup_collectives
from wholestep.passes.drop_dead_collectives import drop_dead_collectives
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.in_place_twins import note_updates


@graph_optimization_pass(numerics="exact", allow_rerun=True)
def remove_duplicate_collectives(gm: fx.GraphModule) -> None:
    """Communicate once what is asked for twice."""
    dedup_collectives(gm)


@graph_optimization_pass(numerics="exact", allow_rerun=True)
def remove_dead_collectives(gm: fx.GraphModule) -> None:
    """Communicate nothing that nobody reads."""
    drop_dead_collectives(gm)


@graph_optimization_pass(numerics="exact", ends_normal_form=True)
def reinplace_tail(gm: fx.GraphModule) -> None:
    """Turn updates back into in-place operators. For graph modules: a StepGraph stays in its normal form.

    A graph that writes outside of its epilogue is left alone. Inputs must not share memory.
    """
    last = epilogue(gm.graph)
    if not any(writes(node) and node not in last for node in gm.graph.nodes):
        note_updates(gm.graph, last)
        reinplace(gm.graph)
