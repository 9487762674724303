"""`step.profile` of a step with compiled regions: a time for each region, whose nodes share it."""

from __future__ import annotations

import torch
from torch import Tensor

import wholestep as ws


def test_a_region_is_one_row_and_its_nodes_are_those_of_the_graph() -> None:
    weight = torch.randn(16, 16)

    def step(x: Tensor) -> Tensor:
        return torch.sort((x @ weight).relu().exp() + 1.0)[0].sum()

    compiled = ws.compile(step, lower="inductor", lower_options={"min_aten_ops": 1})
    measured = compiled.profile(torch.randn(8, 16), steps=2)
    assert compiled.lowering is not None
    assert compiled.last is not None
    graph = {node.name for node in compiled.last.gm.graph.nodes}
    regions = {row.name: row for row in measured.measured if row.nodes}
    assert {region.name for region in compiled.lowering.regions} == set(regions)
    assert regions
    assert all(set(row.nodes) <= graph for row in regions.values())
    inside = {name for row in regions.values() for name in row.nodes}
    assert not inside & {row.name for row in measured.measured}, "elements of a region's result are not measured nodes"
    assert max(len(row.nodes) for row in measured.rows) > 1
    machine = ws.simulate.calibrate(ws.simulate.CPU, measured)
    assert "aten::mm" in machine.correction
    assert "operators compiled" in str(measured)
