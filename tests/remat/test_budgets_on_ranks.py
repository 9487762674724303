"""Memory budgets on two ranks: the same plan on both, no collective twice, the results of DDP and fully_shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from parallel.pairs import world_mesh
from ranks import run_ranks
from remat.steps import Net, train_step
from wholestep.ir.effects import is_collective
from wholestep.ir.meta import node_meta


def batch(i: int, rank: int) -> torch.Tensor:
    return torch.randn(256, 16, generator=torch.Generator().manual_seed(10 * i + rank))


def trained(wrap, step) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(Net(blocks=3, dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(3):
        step(model, optimizer, batch(i, dist.get_rank()))
    full = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [value.detach().clone() for value in full]


def beside(plan, wrap) -> tuple[bool, tuple[str, ...], int]:
    step = ws.compile(train_step, parallel=plan, memory_budget=0.2)
    same = all(map(torch.equal, trained(lambda model: model, step), trained(wrap, train_step)))
    again = [node for node in step.last.gm.graph.nodes if node_meta(node).recompute and node.name.endswith("_again")]
    return same, step.last.memory.recomputed, sum(is_collective(node.target) for node in again)


def rank_code(rank: int) -> list[tuple[bool, tuple[str, ...], int]]:
    mesh = world_mesh()
    return [
        beside(ws.Replicate(mesh), DistributedDataParallel),
        beside(ws.FullyShard(mesh), lambda model: fully_shard(model, mesh=mesh)),
    ]


def test_ranks_choose_the_same_plan_and_train_as_torchs_wrappers():
    first, second = run_ranks(rank_code, 2, deadline=100)
    assert first == second
    for same, recomputed, collectives in first:
        assert same
        assert recomputed
        assert collectives == 0
