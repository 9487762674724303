"""At rest each rank of FullyShard holds its part of parameters and optimizer state, and no whole parameter."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from parallel.pairs import Case, Compiled, numbers, world_mesh
from ranks import run_ranks

WIDTH = 64


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))


def bytes_of(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("again", [True, False])
def test_what_stays_is_a_part_of_parameters_and_state(ranks: int, again: bool) -> None:
    def code(rank: int) -> tuple[float, list[Any]]:
        case = Case("", wide, batch=lambda i, rank: (numbers(i, rank, 5, WIDTH),))
        ours = Compiled(case, ws.FullyShard(world_mesh(), reshard_after_forward=again))
        for i in range(3):
            ours.run(i)
        ours.results.clear()
        held = [*ours.model.parameters()]
        held += [v for entries in ours.optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
        whole = 3 * 4 * sum(p.numel() for p in ours.model.parameters())
        gc.collect()
        sizes = {tuple(p.shape) for p in ours.model.parameters() if p.dim() == 2}
        sizes |= {(b, a) for a, b in sizes}
        alive = [
            tuple(o.shape)
            for o in gc.get_objects()
            if type(o) in (Tensor, nn.Parameter) and o.device.type == "cpu" and tuple(o.shape) in sizes
            if o.untyped_storage().nbytes()
        ]
        return sum(map(bytes_of, held)) / whole, alive

    for part, alive in run_ranks(code, ranks):
        assert part == pytest.approx(1 / ranks, rel=0.05)
        assert alive == []
