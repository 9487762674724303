"""Hide communication behind computation: when collectives are issued, waited for, and what is computed meanwhile.

    before                                      after
    y = mm(x, w1)                               a = all_gather(w2)           as early as it must be, not earlier
    a = all_gather(w2)                          y = mm(x, w1)
    w = wait_tensor(a)                          g1 = mm(t, dy)               from further up: fills the time of r
    z = mm(y, w)                                w = wait_tensor(a)
    r = reduce_scatter(g)                       z = mm(y, w)
    v = wait_tensor(r)                          v = wait_tensor(r)           when r is done: what it sent is free

Needs: nothing.  Numerics: exact: every node computes what it did, only the order of nodes changes.  Random draws,
writes and effects keep their order; write-backs stay at the end.  All ranks choose the same order where they have the
same graph and the same costs, so collectives of overlapping groups are issued in one order everywhere.
Memory: never above `peak_bytes`.  Cost: a few runs of a list scheduler (`overlap/list_schedule.py`), each near-linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from wholestep.errors import invalid_value
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.overlap.choice import choose
from wholestep.passes.overlap.task_graph import task_graph
from wholestep.simulate.cost_model import node_costs
from wholestep.simulate.machine import Machine
from wholestep.simulate.step_index import costs_by, index_step
from wholestep.simulate.step_timeline import machine_for, stream_rules


def _check(
    *,
    machine: Machine | None = None,
    cost: Callable[[fx.Node], float] | None = None,
    peak_bytes: int | None = None,
    bucket: str | float | None = "auto",
    max_displaced: float | None = None,
) -> None:
    given: Any = machine
    if given is not None and not isinstance(given, Machine):
        raise invalid_value("machine", machine, "give a wholestep.simulate.Machine, or None for that of the graph.")
    if cost is not None and not callable(cost):
        raise invalid_value("cost", cost, "give a function from a node to microseconds.")
    if peak_bytes is not None and not (type(peak_bytes) is int and peak_bytes > 0):
        raise invalid_value("peak_bytes", peak_bytes, "give a number of bytes, or None for 1.05 times the peak.")
    if max_displaced is not None and not 0.0 <= max_displaced <= 1.0:
        raise invalid_value("max_displaced", max_displaced, "give a part of all nodes, from 0 to 1.")


@graph_optimization_pass(numerics="exact", allow_rerun=True, check=_check)
def overlap_communication(
    gm: fx.GraphModule,
    *,
    machine: Machine | None = None,
    cost: Callable[[fx.Node], float] | None = None,
    peak_bytes: int | None = None,
    bucket: str | float | None = "auto",
    max_displaced: float | None = None,
) -> None:
    """Order the nodes of a graph so that communication is hidden.

    `cost`: microseconds of a node; without, the model of `machine` (by default that of the graph's device).
    `peak_bytes`: the most bytes that may be alive; without, 1.05 times the peak of the graph as it is.
    `max_displaced`: the part of all nodes that may move.
    """
    index = index_step(gm)
    if not index.collectives:
        return
    if cost is not None:
        times = costs_by(index, cost)
    else:
        machine = machine or machine_for(gm.graph)
        times = node_costs(index, machine)
    graph = task_graph(index, times)
    found, as_is = choose(graph, stream_rules(index, machine), peak_bytes, max_displaced)
    if found is not as_is:
        reorder(gm.graph, [index.nodes[i] for i in found.order])


def reorder(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Put all nodes of a graph into an order; those that stand right already are not touched."""
    place = next(iter(graph.nodes))
    if nodes[0] is not place:
        place.prepend(nodes[0])
    for before, node in pairwise(nodes):
        if before.next is not node:
            before.append(node)
