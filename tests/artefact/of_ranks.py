"""A step under a plan, for ranks that capture it and ranks that load it; saved by a process with a fake group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws

PLANS = {"shard": ws.FullyShard, "replicate": ws.Replicate}


def train_step(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    """One step with a clip over all ranks."""
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def made() -> tuple[nn.Module, Any]:
    """A model whose rows divide by the number of ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def batch(rank: int, call: int) -> Tensor:
    """What a rank gets in a call."""
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * rank + call))


def plan_named(name: str) -> Any:
    """A plan over all ranks."""
    return PLANS[name](init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))


def save_with_a_fake_group(names: Sequence[str], ranks: int, folder: str) -> None:
    """Capture as rank 0 of so many ranks, of which there is one process; a file for each plan."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    for name in names:
        step = ws.compile(train_step, lower="eager", parallel=plan_named(name), progress=False)
        model, optimizer = made()
        for call in range(2):
            step(model, optimizer, batch(0, call))
        step.save(f"{folder}/{name}.ws")
