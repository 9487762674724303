"""`ws.inspect.diff(a, b)`: what is different in two graphs, what causes it, and what it costs.

    difference = ws.inspect.diff(step.graphs[0], step.graphs[1])
    print(difference)
    difference.causes[0].text, difference.causes[0].kind, difference.causes[0].location

A changed size changes every node behind it. Those follow; the differences that nothing before them explains are the
causes. Equal changes in several layers are one cause with a number. `correspondence.py` says which nodes correspond,
`causes.py` what a difference is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from wholestep.errors import OptionError, called
from wholestep.inspect.differences.causes import find_causes, lowering_change
from wholestep.inspect.differences.correspondence import Correspondence
from wholestep.inspect.differences.graph_diff import GraphCost, GraphDiff
from wholestep.inspect.differences.graph_nodes import ComparedGraph
from wholestep.ir.signature import Signature
from wholestep.ir.step_graph import StepGraph
from wholestep.simulate.machine import GroupSpread, Machine
from wholestep.simulate.step_timeline import StepTimeline, machine_for
from wholestep.simulate.step_timeline import step as simulate_step


def diff(
    a: Any,
    b: Any,
    *,
    machine: Machine | None = None,
    groups: Mapping[str, GroupSpread] | None = None,
    labels: tuple[str, str] = ("a", "b"),
) -> GraphDiff:
    """What is different in two graphs, and what causes it.

    `a`, `b`: StepGraphs (`step.graphs[0]`, `ws.capture(...)`, `StepGraph.from_json(...)`), graph modules, or compiled
    steps that have run, whose last graphs and lowering are compared. `machine`, `groups`: for predicted times, as in
    `ws.simulate.step`. `labels`: what messages call the two.
    """
    (gm_a, signature_a), (gm_b, signature_b) = _graph(a), _graph(b)
    one, other = ComparedGraph(gm_a, signature_a), ComparedGraph(gm_b, signature_b)
    found = Correspondence(one, other)
    chosen = machine or machine_for(gm_a.graph)
    before, after = (simulate_step(gm, machine=chosen, groups=groups) for gm in (gm_a, gm_b))
    causes = [*find_causes(found, before.cost, after.cost, labels), *lowering_change(a, b, labels)]
    guards = set(signature_a.guards), set(signature_b.guards)
    return GraphDiff(
        labels,
        tuple(causes),
        len(found.to_b),
        sum(one.nodes[i].whole == other.nodes[j].whole for i, j in found.to_b.items()),
        tuple(node.node.name for node in found.only_in_a),
        tuple(node.node.name for node in found.only_in_b),
        _cost(before),
        _cost(after),
        tuple(text for text in signature_a.guards if text not in guards[1]) if causes else (),
        tuple(text for text in signature_b.guards if text not in guards[0]) if causes else (),
        chosen.name,
    )


def _graph(given: Any) -> tuple[fx.GraphModule, Signature]:
    last = getattr(given, "last", None)
    given = last if isinstance(last, StepGraph) else given
    if isinstance(given, StepGraph):
        return given.gm, given.signature
    if isinstance(given, fx.GraphModule):
        return given, Signature()
    raise OptionError(
        f"{called(given)} has no graph to compare.",
        fix="give StepGraphs, graph modules, or compiled steps that have run.",
    )


def _cost(timeline: StepTimeline) -> GraphCost:
    index = timeline.index
    return GraphCost(len(index), timeline.step_us, timeline.exposed_us, timeline.peak_bytes, len(index.collectives))
