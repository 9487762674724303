"""`lower_step` is a function from a StepGraph to a finished executable, which the caller holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx, nn

import wholestep as ws
from cases.parts import train_step
from wholestep.ir.graph_walks import epilogue
from wholestep.ir.step_graph import StepGraph
from wholestep.lower import LowerOptions
from wholestep.lower.compiled_region import RegionCache
from wholestep.lower.lower_step import LoweredStep, is_compiled, lower_step, record_step
from wholestep.runtime.python_program import program


def captured(optimizer: str = "SGD") -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    return ws.capture(train_step, model, made, torch.randn(4, 8))


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes]


def test_without_options_the_graph_runs_operator_by_operator_in_place() -> None:
    step_graph = captured()
    before = targets(step_graph.gm)
    lowered = lower_step(step_graph, None)
    assert lowered.report is None
    assert lowered.written == ()
    assert epilogue(step_graph.gm.graph)
    assert not epilogue(lowered.gm.graph)
    assert targets(step_graph.gm) == before


def test_regions_are_compiled_and_the_step_graph_stays_as_it_is() -> None:
    step_graph = captured()
    before = targets(step_graph.gm)
    cache = RegionCache()
    lowered = lower_step(step_graph, LowerOptions(min_aten_ops=2, strict=True), cache=cache)
    assert lowered.report is not None
    assert lowered.report.regions
    assert [spec for i, spec in enumerate(step_graph.signature.inputs) if i in lowered.written]
    assert targets(step_graph.gm) == before
    lower_step(step_graph, LowerOptions(min_aten_ops=2, strict=True), cache=cache)
    assert cache.hits == len(lowered.report.regions)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lowered.report = None  # type: ignore[misc]


def test_a_graph_that_creates_optimizer_state_is_not_compiled() -> None:
    step_graph = captured("Adam")
    assert not is_compiled(step_graph, runs_once=True)
    assert lower_step(step_graph, LowerOptions(), runs_once=True).report is None


def test_a_step_is_recorded_only_where_that_is_asked_for_and_possible() -> None:
    step_graph = captured()
    lowered = lower_step(step_graph, None)
    assert record_step(step_graph, lowered, program, cuda_graph=False) is None
    assert record_step(step_graph, lowered, program, cuda_graph="auto") is None
    assert isinstance(lowered, LoweredStep)
    with pytest.raises(ws.errors.CudaGraphError, match="does nothing on a CUDA device"):
        record_step(step_graph, lowered, program, cuda_graph=True)
