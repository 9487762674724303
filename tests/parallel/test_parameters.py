"""Parameters of every kind under FullyShard: rows that do not divide, tied, frozen, unused, scalars."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from cases.parts import TiedLanguageModel, WithUnusedParts, zero_first
from parallel.pairs import (
    Case,
    Compiled,
    Side,
    all_of,
    apart,
    beside_ddp,
    beside_fully_shard,
    net,
    numbers,
    sharded_beside_ddp,
    world_mesh,
)
from ranks import run_ranks
from selection import some_now


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def tokens(i: int, rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 + 100 * i + rank)
    return (torch.randint(11, (2, 5), generator=generator),)


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


CASES = [
    Case("7 rows", steps=4),
    Case("1 row", lambda: nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 4)), steps=4),
    Case("8 rows", lambda: net(rows=8), steps=4),
    Case("tied", TiedLanguageModel, step=language_step, batch=tokens, steps=4),
    Case("frozen and unused", WithUnusedParts, steps=4),
    Case("gradients kept", WithUnusedParts, step=zero_first, steps=4),
    Case("float64", lambda: net().double(), batch=lambda i, rank: (numbers(i, rank, 5, 6).double(),), steps=4),
]


def test_shards_have_the_bits_of_fully_shard() -> None:
    all_of(beside_fully_shard, CASES)


WHOLE = [
    *(each for each in CASES if each.name not in ("frozen and unused", "gradients kept")),
    *(Case("scalar", WithScalar, steps=4), Case("clipped", step=clipped_step)),
]


@pytest.mark.parametrize("cases", some_now(WHOLE, "7 rows", "tied", "scalar", "clipped"))
def test_whole_parameters_have_the_bits_of_ddp(cases: list[Case]) -> None:
    all_of(beside_ddp, cases)


def test_scalars_are_replicated_under_fully_shard() -> None:
    all_of(sharded_beside_ddp, [Case("scalar", WithScalar, steps=4)])


@pytest.mark.parametrize(
    "cases",
    some_now((each for each in CASES if each.name not in ("tied", "frozen and unused", "gradients kept")), "1 row"),
)
def test_four_ranks_agree_within_rounding(cases: list[Case]) -> None:
    """Four addends: torch reduces one flat buffer, and gloo adds each chunk of it in an order of its own."""

    def check(case: Case) -> list[str]:
        mesh = world_mesh()
        sharded = Side(case, lambda model: fully_shard(model, mesh=mesh)), Compiled(case, ws.FullyShard(mesh))
        whole = Side(case, DistributedDataParallel), Compiled(case, ws.Replicate(mesh))
        for side in (*sharded, *whole):
            side.run_all()
        return [line for pair in (sharded, whole) for line in apart(*pair, rtol=1e-6)]

    all_of(check, cases, ranks=4)


def clipped_by(kind: float, rows: int) -> Case:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=kind)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return Case(f"norm {kind} of {rows} rows", lambda: net(rows=rows), step=step, steps=4)


CLIPPED = [clipped_by(kind, rows) for kind in (2.0, 1.0, 3.0, math.inf, 0.0) for rows in (1, 7)]


@pytest.mark.parametrize(
    "cases", some_now(CLIPPED, "norm 2.0 of 7 rows", "norm 3.0 of 1 rows", "norm inf of 7 rows", "norm 0.0 of 1 rows")
)
def test_clipping_takes_the_norm_of_the_whole_within_rounding(cases: list[Case]) -> None:
    def check(case: Case) -> list[str]:
        alone, ours = Side(case), Compiled(case, ws.FullyShard(world_mesh()))
        for i in range(case.steps):
            alone.run(i, torch.cat([case.batch(i, r)[0] for r in range(2)]))
            ours.run(i)
        norms = [(float(want[1]), float(got[1])) for want, got in zip(alone.results, ours.results, strict=True)]
        lines = [f"norms {want} and {got}" for want, got in norms if got != pytest.approx(want, 1e-6)]
        return lines + apart(alone, ours, rtol=1e-6)

    all_of(check, cases)


def test_a_tied_parameter_is_gathered_once_in_each_direction_and_reduced_once() -> None:
    def code(rank: int) -> tuple[Counter[str], int]:
        case = Case("tied", TiedLanguageModel, step=language_step, batch=tokens, compile={"passes": None})
        ours = Compiled(case, ws.FullyShard(world_mesh()))
        ours.run(0)
        return ours.collectives, len(list(ours.model.parameters()))

    for found, parameters in run_ranks(code, 2):
        assert parameters == 3
        assert found["reduce_scatter_tensor"] == parameters
        assert found["all_gather_into_tensor"] == parameters + 2  # both matrices are needed by the backward


def test_nothing_is_sent_for_gradients_of_frozen_and_unused_parameters() -> None:
    def code(rank: int) -> Any:
        case = Case("", WithUnusedParts, step=zero_first, compile={"passes": None})
        sharded, replicated = Compiled(case, ws.FullyShard(world_mesh())), Compiled(case, ws.Replicate(world_mesh()))
        for i in range(2):
            sharded.run(i)
            replicated.run(i)
        without = [
            name
            for side in (sharded, replicated)
            for name, param in side.model.named_parameters()
            if param.grad is None
        ]
        return sharded.collectives, replicated.collectives, without

    missing = ["frozen.weight", "frozen.bias", "unused.weight", "unused.bias"]
    for sharded, replicated, without in run_ranks(code, 2):
        assert sharded == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2}
        assert replicated == {"all_reduce": 2}
        assert without == missing * 2


@pytest.mark.parametrize(("again", "gathers"), [(True, 5), (False, 4)])
def test_saved_weights_are_gathered_again_if_resharded_after_the_forward(again: bool, gathers: int) -> None:
    """Of two matrices and two vectors only the last matrix is needed by the backward."""

    def code(rank: int) -> tuple[list[str], Counter[str]]:
        case = Case("", steps=3, compile={"passes": None})
        lines = beside_fully_shard(case, reshard_after_forward=again)
        ours = Compiled(case, ws.FullyShard(world_mesh(), reshard_after_forward=again))
        ours.run(0)
        return lines, ours.collectives

    for lines, found in run_ranks(code, 2):
        assert lines == []
        assert found == {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": 4}
