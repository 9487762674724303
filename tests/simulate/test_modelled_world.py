"""`benchmarks/modelled_world.py`: one real process among modelled ranks, and the collectives that steps issue there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws
from wholestep.simulate.machine import CollectiveModel, Link
from wholestep.simulate.profile import collective_times

pytestmark = pytest.mark.fake_group
QUICK = replace(ws.simulate.CPU, collectives=CollectiveModel(Link(1e-5, 0.0, 1e12), Link(1e-5, 0.0, 1e12)))


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import modelled_world

    return modelled_world


def test_collectives_complete_in_order_and_small_results_are_those_of_equal_ranks(modelled: Any) -> None:
    with modelled.modelled_world(4, QUICK):
        gathered = [torch.empty(3) for _ in range(4)]
        dist.all_gather(gathered, torch.arange(3.0))
        assert all(torch.equal(each, torch.arange(3.0)) for each in gathered)
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(5)]
        works[-1].wait()
        assert all(work.is_completed() for work in works)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicate", "full"])
def test_a_step_issues_the_collectives_that_were_predicted(modelled: Any, sharded: bool) -> None:
    with modelled.modelled_world(8, QUICK):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters())

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        plan = ws.FullyShard(mesh) if sharded else ws.Replicate(mesh)
        step = ws.compile(train_step, parallel=plan, lower="eager")
        for _ in range(3):
            step(torch.ones(4, 8))
        group = mesh.get_group()
        group.issued.clear()
        step(torch.ones(4, 8))
        timeline = ws.simulate.step(step.last, machine=QUICK)
        collectives = timeline.index.collectives
        assert len(group.issued) == len(collectives) > 0
        predicted = sorted(timeline.cost[i] / 1e6 for i in collectives)
        assert predicted == pytest.approx(sorted(seconds for _, _, seconds in group.issued))


def test_what_a_collective_took_is_told_from_the_spans_of_issue_and_wait() -> None:
    spans = {"a": (0.0, 1.0), "b": (1.0, 2.0), "c": (2.0, 3.0), "d": (60.0, 61.0), "other": (2.5, 3.0)}
    waits = {"a": (3.0, 10.0), "b": (10.0, 30.0), "c": (50.0, 50.1), "d": (61.0, 70.0), "other": (70.0, 70.0)}
    groups = {"other": "1", **dict.fromkeys("abcd", "0")}
    # b begins when a is done; c ended some time before its wait, so nothing is known of it; d begins when it is issued.
    assert collective_times(groups, spans, waits) == {"a": 10.0, "b": 20.0, "d": 10.0}
