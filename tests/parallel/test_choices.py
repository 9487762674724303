"""Graphs are chosen at every call: ranks that choose differently are told, and none goes on alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import wholestep as ws
from ranks import run_ranks
from selection import each_now

PLANS = {"replicate": ws.Replicate, "fully shard": ws.FullyShard}


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


class Two(nn.Module):
    """Two layers of the same shape; a flag says which one runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        return self.a(x) if flag else self.b(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, flag: bool, scale: float = 1.0) -> Tensor:
    loss = model(x, flag).square().mean() * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def both_known(rank: int, kind: str, flag_of_rank: list[bool]) -> str:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = ws.compile(train_step, parallel=PLANS[kind](world_mesh()))
    for flag in (True, False, True, False):
        step(model, optimizer, torch.ones(2, 4), flag)
    with pytest.raises(ws.errors.DesyncError) as caught:
        step(model, optimizer, torch.ones(2, 4), flag_of_rank[rank])
    with pytest.raises((ws.errors.DesyncError, ws.errors.PeerFailedError)):
        step(model, optimizer, torch.ones(2, 4), True)  # no rank goes on as if nothing had been
    return str(caught.value)


@pytest.mark.parametrize("kind", each_now(PLANS, "replicate"))
@pytest.mark.parametrize("flags", [[True, False], [False, True]], ids=["first switches", "second switches"])
def test_known_graphs_that_do_not_fit_are_found_before_they_run(kind: str, flags: list[bool]) -> None:
    for message in run_ranks(both_known, 2, kind, flags, deadline=60):
        assert "Ranks disagree on the graph of call 5 of train_step" in message


def recompiled_alone(rank: int) -> str:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = ws.compile(train_step, parallel=ws.Replicate(world_mesh()))
    step(model, optimizer, torch.ones(2, 4), True)
    with pytest.raises(ws.errors.DesyncError) as caught:
        step(model, optimizer, torch.ones(2, 4), True, 100.0 if rank else 1.0)
    return str(caught.value)


def test_other_mathematics_after_a_capture_on_one_rank_is_found() -> None:
    for message in run_ranks(recompiled_alone, 2, deadline=60):
        assert "aten.mul.Tensor" in message


def state_on_one_rank(rank: int) -> str:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    if rank == 0:  # as if only this rank had loaded a checkpoint
        train_step(model, optimizer, torch.ones(2, 4), True)
    with pytest.raises(ws.errors.DesyncError) as caught:
        ws.compile(train_step, parallel=ws.Replicate(world_mesh()))(model, optimizer, torch.ones(2, 4), True)
    return str(caught.value)


def test_optimizer_state_on_one_rank_only_is_found() -> None:
    assert all("WS-DESYNC" in message for message in run_ranks(state_on_one_rank, 2, deadline=60))


def replaced(rank: int, kind: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = ws.compile(step, parallel=PLANS[kind](world_mesh()))
    compiled(model, optimizer, torch.ones(2, 4))
    torch.manual_seed(100 + rank)
    model[1] = nn.Linear(4, 2)  # another one on each rank
    optimizer.add_param_group({"params": model[1].parameters()})
    for _ in range(2):
        compiled(model, optimizer, torch.ones(2, 4) * (1 + rank))
    return model[1].weight.detach().clone()


@pytest.mark.parametrize("kind", each_now(PLANS, "fully shard"))
def test_parameters_that_come_after_the_placing_are_made_equal(kind: str) -> None:
    first, second = run_ranks(replaced, 2, kind, deadline=60)
    assert torch.equal(first, second)
