"""Lightning on two ranks: DistributedDataParallel of its Trainer and of Fabric is in the graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy

import wholestep as ws
from integrations.test_accelerate_ranks import collectives
from integrations.test_lightning import Manual, Regression, fit
from integrations.test_lightning import pytestmark as pytestmark
from ranks import run_ranks
from selection import each_now
from wholestep.integrations.lightning import WholestepCallback


def as_torchrun(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0", "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test"}


@pytest.mark.parametrize("make", each_now([Regression, Manual], "Regression"))
def test_training_on_two_ranks_shows_what_lightning_shows(make: Any, tmp_path: Path) -> None:
    def code(rank: int) -> Any:
        as_torchrun(rank)
        options: dict[str, Any] = {} if make is Manual else {"accumulate_grad_batches": 2}
        found, callback = [], WholestepCallback()
        for ours in (None, callback):
            folder = tmp_path / ("eager" if ours is None else "graphs")
            strategy = DDPStrategy(process_group_backend="gloo")
            _, seen = fit(make, folder, ours, devices=2, strategy=strategy, max_epochs=1, **options)
            found.append({key: value for key, value in seen.items() if rank == 0 or key != "logged"})
        for name, want in found[0].items():
            assert found[1][name] == want, name
        return [collectives(graph) for step in callback.compiled_steps for graph in step.graphs], found[1]["weights"]

    (graphs, weights), (_, others) = run_ranks(code, 2, deadline=120)
    assert weights == others
    assert {"all_reduce" in graph for graph in graphs} == ({True} if make is Manual else {True, False})


def test_a_step_of_fabric_on_two_ranks_trains_as_in_eager() -> None:
    def one(rank: int, compiled: bool) -> Any:
        as_torchrun(rank)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricDDP(process_group_backend="gloo"))
        fabric.launch()
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))

        def step(x: Tensor, y: Tensor, is_last: bool) -> Tensor:
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        run: Any = ws.compile(step) if compiled else step
        torch.manual_seed(rank)
        seen = []
        for i in range(4):
            loss = run(torch.randn(4, 6), torch.randn(4, 4), i % 2 == 1)
            seen.append((loss.tolist(), [p.tolist() for p in plain.parameters()]))
        return seen, [collectives(graph) for graph in run.graphs] if compiled else []

    def code(rank: int) -> Any:
        (expected, _), (actual, graphs) = one(rank, False), one(rank, True)
        assert expected == actual
        return graphs

    (graphs, _) = run_ranks(code, 2, deadline=90)
    assert {"all_reduce" in graph for graph in graphs} == {True, False}
