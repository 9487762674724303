"""`fit_to_budget` knows executables only by the measure that it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

import wholestep as ws
from remat.steps import Net, rows, train_step
from wholestep.ir.meta import node_meta
from wholestep.ir.step_graph import StepGraph
from wholestep.remat.fit import fit_to_budget
from wholestep.remat.measure import Measured, MeasureEager
from wholestep.remat.options import Budget, policy_of


class Counting(MeasureEager):
    """Builds a number for each graph that it measures."""

    def __init__(self, step_graph: StepGraph) -> None:
        super().__init__(step_graph)
        self.peaks: list[int] = []

    def __call__(self, graph: fx.Graph, shed: int | None = None) -> Measured[Any]:
        found = super().__call__(graph, shed)
        self.peaks.append(found.peak)
        return replace(found, executable=len(self.peaks) - 1)


def captured() -> StepGraph:
    torch.manual_seed(0)
    model = Net(blocks=3)
    return ws.capture(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), rows(0))


def test_the_executable_of_the_chosen_candidate_is_returned() -> None:
    step_graph = captured()
    measure = Counting(step_graph)
    fitted = fit_to_budget(step_graph, Budget(fraction=0.3), policy_of(None), measure=measure)
    assert fitted.executable is not None
    assert measure.peaks[fitted.executable] == fitted.report.planned_peak <= fitted.report.budget
    assert len(measure.peaks) == fitted.report.plans_tried


def test_the_step_graph_recomputes_what_the_report_says() -> None:
    step_graph = captured()
    report = fit_to_budget(step_graph, Budget(fraction=0.0), policy_of(None), measure=MeasureEager(step_graph)).report
    added = [node.name for node in step_graph.gm.graph.nodes if node_meta(node).recompute]
    assert added
    assert sorted(added) == sorted(f"{name}_again" for name in report.recomputed)
