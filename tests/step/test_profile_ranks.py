"""`step.profile` of a sharded step on two ranks: all state is restored on each, and collectives have times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import wholestep as ws
from ranks import run_ranks
from wholestep.ir.effects import is_collective


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def profiled(rank: int, first: int) -> dict[str, Any]:
    """Losses of four calls with a profile after the first few of them, and what the profile says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = ws.compile(step, lower="eager", parallel=ws.FullyShard(init_device_mesh("cpu", (2,))))
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank + 2 * i)) for i in range(4)]
    losses = [compiled(batch) for batch in batches[:first]]
    before = [whole(p).clone() for p in model.parameters()]
    measured = None
    if first < 4:
        measured = compiled.profile(batches[first], steps=2)
        assert all(torch.equal(whole(p), was) for p, was in zip(model.parameters(), before, strict=True))
    losses += [compiled(batch) for batch in batches[first:]]
    found: dict[str, Any] = {"losses": [float(loss) for loss in losses]}
    if measured is not None:
        assert compiled.last is not None
        collectives = {n.name for n in compiled.last.gm.graph.nodes if is_collective(n.target)}
        rows = {row.name for row in measured.measured}
        found |= {"collectives": len(collectives & rows), "waits": sum(row.is_wait for row in measured.measured)}
        found |= {"ends": all(measured.spans[name][1] > measured.spans[name][0] for name in collectives & rows)}
    return found


def test_a_sharded_step_is_profiled_on_every_rank_and_trains_on_as_before() -> None:
    plain = run_ranks(profiled, 2, 4)
    for first in (0, 2):
        ranks = run_ranks(profiled, 2, first)
        for rank, said in enumerate(ranks):
            assert said["losses"] == plain[rank]["losses"], f"profile after {first} calls"
            assert said["collectives"] == said["waits"] > 3
            assert said["ends"]
