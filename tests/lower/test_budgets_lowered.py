"""Compiled steps under a memory budget: measured as planned, within the budget, and close to eager."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import wholestep as ws
from remat.steps import Net, Trained
from wholestep.errors import OptionError
from wholestep.ir.meta import node_meta
from wholestep.lower.options import LowerOptions
from wholestep.lower.retrace import retrace
from wholestep.remat.fit import decompose_norms
from wholestep.torch_private.inductor import keeps_order_of_random_ops


def shallow() -> Net:
    """Every plan of a budget is compiled: as few blocks as still leave a choice."""
    return Net(blocks=3)


@pytest.mark.long  # a budget near the usual peak, below, is compiled, met and compared too
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_compiled_steps_stay_within_their_budget_and_train_as_eager(fraction):
    eager = Trained(shallow, eager=True)
    ours = Trained(shallow, memory_budget=fraction, lower="inductor")
    memory = ours.memory
    assert memory.planned_peak <= memory.budget
    assert abs(memory.measured_peak - memory.planned_peak) <= 0.02 * memory.planned_peak
    assert memory.peak_without > memory.planned_peak
    assert memory.recomputed
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(eager.losses))
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.long  # test_forward_backward.py has such calls
def test_forward_and_backward_are_calls_of_their_own():
    ours = Trained(shallow, memory_budget=1.0, lower="inductor", steps=2)
    phases = [region.phases for region in ours.step.lowering.regions]
    assert phases
    assert not any({"forward", "backward"} <= set(each) for each in phases)


def test_norms_are_decomposed_so_that_their_parts_can_be_saved():
    graph = Trained(steps=1).step.last.gm.graph
    count = sum(1 for node in graph.nodes if node.target is torch.ops.aten.native_layer_norm.default)
    assert decompose_norms(graph) == count > 0
    graph.lint()
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.native_layer_norm.default)
    assert all(node_meta(node).phase for node in graph.nodes)


@pytest.mark.long  # the budget below, with another optimizer
def test_scalar_inputs_of_an_unfused_optimizer_are_packed_while_planning():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = ws.compile(train, lower="inductor", memory_budget=0.5)
    losses = [step(torch.ones(64, 8)) for _ in range(3)]
    assert losses[2] < losses[0]
    memory = step.last.memory
    assert abs(memory.measured_peak - memory.planned_peak) <= 0.05 * memory.planned_peak


def test_what_was_built_for_a_budget_is_what_runs(monkeypatch):
    built = []

    def counted(*args, **kwargs):
        built.append(retrace(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(sys.modules["wholestep.lower.partial_lower"], "retrace", counted)
    ours = Trained(lambda: Net(blocks=1), memory_budget="1GiB", lower="inductor", steps=2)
    memories = [graph.memory for graph in ours.step.graphs]
    assert [memory.plans_tried for memory in memories] == [1] * len(memories)
    assert len(built) == len(memories) * len(ours.step.lowering.regions)


@pytest.mark.parametrize("wrong", [-1, 0.5, "1GiB", True])
def test_bytes_to_shed_must_be_an_integer(wrong: Any) -> None:
    with pytest.raises(OptionError, match="shed"):
        LowerOptions(shed=wrong)


def test_shed_requires_remat() -> None:
    with pytest.raises(OptionError, match="remat=False"):
        LowerOptions(shed=1, remat=False)
    assert not LowerOptions(remat=False).shed


@pytest.mark.skipif(
    not keeps_order_of_random_ops(), reason="this torch has dropout outside of regions, so there is no one cut"
)
def test_a_budget_near_the_usual_peak_is_met_by_the_compilers_own_cut():
    eager = Trained(shallow, eager=True, steps=3)
    usual = Trained(shallow, memory_budget="1GiB", lower="inductor", steps=3)
    assert usual.memory.shed == 0
    assert usual.memory.saved
    assert usual.memory.measured_peak == usual.memory.planned_peak
    budget = int(0.97 * usual.memory.planned_peak)
    less = Trained(shallow, memory_budget=budget, lower="inductor", steps=3)
    assert less.memory.shed
    assert less.memory.planned_peak <= budget
    for memory in (usual.memory, less.memory):  # estimates agree with what was built
        assert memory.smallest_peak <= memory.planned_peak <= memory.peak_without
    assert abs(less.memory.measured_peak - less.memory.planned_peak) <= 0.02 * budget
    assert less.memory.saved_bytes < usual.memory.saved_bytes
    torch.testing.assert_close(torch.stack(less.losses), torch.stack(eager.losses))
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(less.model.state_dict()[name], value, atol=1e-4, rtol=1e-4)
