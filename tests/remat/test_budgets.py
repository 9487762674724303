"""Steps under a memory budget: the planned peak is the measured peak, and results equal eager."""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch

import wholestep as ws
from remat.steps import Images, Net, Trained, pictures
from selection import each_now
from wholestep.errors import MemoryBudgetError
from wholestep.ir.meta import node_meta

CASES = {"net": (Net, None), "images": (Images, pictures), "checkpointed": (partial(Net, checkpointed=3), None)}
FRACTIONS = {"net": [0.0, 0.1, 0.35, 0.6, 0.85, 1.0], "images": [0.0, 0.5, 1.0], "checkpointed": [0.0, 0.35, 0.7, 1.0]}


@functools.cache
def smallest() -> Trained:
    """Everything that may be recomputed is."""
    return Trained(memory_budget=0.0)


def trained(case: str, **options):
    make, batch = CASES[case]
    return Trained(make, *(() if batch is None else (batch,)), **options)


@pytest.mark.parametrize("case", each_now(CASES, "net", "images"))
def test_peaks_are_as_planned_within_the_budget_and_grow_with_it(case):
    eager = trained(case, eager=True)
    peaks, again = [], []
    for fraction in FRACTIONS[case]:
        ours = trained(case, memory_budget=fraction)
        memory = ours.memory
        assert ours.equals(eager), fraction
        assert abs(memory.measured_peak - memory.planned_peak) <= 0.02 * memory.planned_peak
        assert memory.planned_peak <= memory.budget
        peaks.append(memory.planned_peak)
        again.append(len(memory.recomputed))
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.9 * peaks[-1]
    assert again[-1] == 0 < again[0]


def test_a_budget_in_bytes_is_honoured_and_one_that_is_wide_changes_nothing():
    wide = Trained(memory_budget="1GiB", steps=2)
    assert wide.memory.recomputed == ()
    assert wide.memory.budget == 2**30
    most = round(0.8 * wide.memory.planned_peak)
    tight = Trained(memory_budget=most, steps=2)
    assert tight.memory.budget == most
    assert tight.memory.measured_peak <= most
    assert tight.memory.recomputed
    assert sum(tensor.bytes for tensor in tight.memory.saved) < wide.memory.saved_bytes


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can():
    with pytest.raises(MemoryBudgetError, match=r"smallest peak is .* \((\d+) bytes\)") as found:
        Trained(memory_budget="64KiB", steps=2)
    least = int(str(found.value).split("memory_budget=")[1].split()[0])
    # The later steps hold the optimizer's state from the beginning; they are refused before the first one ran.
    assert Trained(memory_budget=least).memory.measured_peak <= least
    with pytest.raises(MemoryBudgetError):
        Trained(memory_budget=least - 1, steps=1)


def test_random_ops_are_not_recomputed():
    draws = [
        n for n in smallest().step.last.gm.graph.nodes if "bernoulli" in str(n.target) or "dropout" in str(n.target)
    ]
    assert draws
    assert not any(node_meta(node).recompute for node in draws)


def test_the_backward_recomputes_right_before_the_first_use():
    nodes = list(smallest().step.last.gm.graph.nodes)
    again = [i for i, node in enumerate(nodes) if node_meta(node).recompute]
    first = next(i for i, node in enumerate(nodes) if node_meta(node).phase == "backward")
    assert min(again) >= first
    others = [i for i in range(again[0], again[-1]) if not node_meta(nodes[i]).recompute]
    assert len(others) > 20  # not all at once in the beginning


def test_a_policy_decides_what_is_saved_and_what_is_recomputed():
    free = smallest()
    assert any(name.startswith("addmm") for name in free.memory.recomputed)
    saved = Trained(memory_budget=0.0, steps=2, policy={torch.ops.aten.addmm: "save"})
    assert not any(name.startswith("addmm") for name in saved.memory.recomputed)
    assert saved.memory.planned_peak > free.memory.planned_peak
    forced = Trained(memory_budget=1.0, policy={"model.blocks.2": "recompute"}, steps=2)
    paths = {node_meta(n).module_path for n in forced.step.last.gm.graph.nodes if node_meta(n).recompute}
    assert paths
    assert all(path.startswith("model.blocks.2") for path in paths)
    assert forced.equals(Trained(eager=True, steps=2))


def test_a_policy_may_be_a_function_and_the_last_rule_counts():
    chosen = Trained(memory_budget=0.0, steps=2, policy=lambda node: "save" if "gelu" in str(node.target) else None)
    assert not any(name.startswith("gelu") for name in chosen.memory.recomputed)
    rules = {"model.*": "recompute", "aten.addmm": "save"}
    last = Trained(memory_budget=1.0, steps=2, policy=rules)
    assert any(name.startswith("gelu") for name in last.memory.recomputed)
    assert not any(name.startswith("addmm") for name in last.memory.recomputed)


def test_recomputation_of_a_checkpoint_stays_in_the_backward():
    ours = trained("checkpointed", memory_budget=1.0, steps=2)
    plain = trained("net", memory_budget=1.0, steps=2)
    assert ours.memory.planned_peak < plain.memory.planned_peak
    assert ours.memory.recomputed == ()


def test_the_report_prints_recomputation_and_saved_tensors():
    text = str(Trained(memory_budget=0.3, steps=1).memory)
    assert "nodes recomputed" in text
    assert "model.blocks." in text
    assert "KiB" in text


def test_without_a_budget_there_is_no_report():
    assert Trained(steps=1).step.last.memory is None


def test_dynamic_sizes_are_planned_for_the_call_that_was_traced():
    step = ws.compile(lambda m, o, x: _step(m, o, x), memory_budget=0.5, dynamic={"x": {0: ws.Dim(8, 512)}})
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (256, 128, 300):
        step(model, optimizer, torch.ones(size, 16))
    assert len(step.graphs) == 1
    assert step.last.memory.recomputed


def _step(model, optimizer, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
