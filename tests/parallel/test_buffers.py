"""Buffers that a step writes are rank 0's at its start, whatever other inputs the graph has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from cases.parts import train_step
from ranks import run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def beside_ddp(rank: int) -> tuple[bool, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model, reference = net(), DistributedDataParallel(net())
    # Numbers that are equal are still inputs of their own.
    ours = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.1)
    step = ws.compile(train_step, parallel=ws.Replicate(mesh), verify=2)
    for i in range(4):
        torch.manual_seed(10 * i + rank)
        x = torch.randn(6, 4)
        step(model, ours, x)
        train_step(reference, theirs, x)
    same = all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.module.buffers(), strict=True))
    assert step.last is not None
    return same, sum("broadcast" in str(node.target) for node in step.last.gm.graph.nodes)


def test_written_buffers_start_from_rank_0_as_ddp_has_it() -> None:
    for same, broadcasts in run_ranks(beside_ddp, 2, deadline=60):
        assert same
        assert broadcasts == 3  # running mean and variance, and how many batches there were
