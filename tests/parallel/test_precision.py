"""Mixed precision: the policies of fully_shard, autocast, and GradScaler with inf on one rank only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from parallel.pairs import (
    Case,
    Compiled,
    Side,
    all_of,
    beside_ddp,
    beside_fully_shard,
    compare,
    net,
    numbers,
    world_mesh,
)
from selection import each_now

HALF = torch.bfloat16
POLICIES = {
    "param": MixedPrecisionPolicy(param_dtype=HALF),
    "param and reduce": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32),
    "reduce": MixedPrecisionPolicy(reduce_dtype=HALF),
    "output": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, output_dtype=torch.float32),
    "float16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}


def autocast_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", HALF):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("again", each_now([True, False], "True"))
def test_policies_have_the_bits_of_fully_shard(again: bool) -> None:
    cases = [Case(name, steps=4) for name in POLICIES]
    all_of(lambda case: beside_fully_shard(case, mp_policy=POLICIES[case.name], reshard_after_forward=again), cases)


def test_inputs_are_left_as_they_are_if_the_policy_says_so() -> None:
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, cast_forward_inputs=False)
    given = Case("inputs", batch=lambda i, rank: (numbers(i, rank, 5, 6, dtype=HALF),), steps=4)
    all_of(lambda case: beside_fully_shard(case, mp_policy=policy), [given])


def test_autocast_has_the_bits_of_torchs_wrappers() -> None:
    case = Case("autocast", step=autocast_step, steps=4)
    all_of(beside_fully_shard, [case])
    all_of(beside_ddp, [case])


def test_models_in_bfloat16_have_the_bits_of_torchs_wrappers() -> None:
    case = Case(
        "bfloat16", lambda: net().to(HALF), batch=lambda i, rank: (numbers(i, rank, 5, 6, dtype=HALF),), steps=4
    )
    all_of(beside_fully_shard, [case])
    all_of(beside_ddp, [case])


class Scaled:
    """A step with a scaler of its own. In call 2 the last rank's batch overflows."""

    def __init__(self, clip: bool) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        self.clip = clip

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return loss


def overflowing(i: int, rank: int) -> tuple[Any, ...]:
    x = numbers(i, rank, 5, 6)
    return (x * float("inf") if i in (2, 5) and rank == 1 else x,)


def scaled_sides(sharded: bool, clip: bool) -> tuple[Side, Compiled]:
    mesh = world_mesh()
    torchs = Side(
        Case("", step=Scaled(clip), batch=overflowing, steps=8),
        (lambda model: fully_shard(model, mesh=mesh)) if sharded else DistributedDataParallel,
    )
    plan = ws.FullyShard(mesh) if sharded else ws.Replicate(mesh)
    return torchs, Compiled(Case("", step=Scaled(clip), batch=overflowing, steps=8), plan)


@pytest.mark.parametrize("sharded", each_now([False, True], "True"))
def test_all_ranks_skip_a_step_if_one_overflows(sharded: bool) -> None:
    def check(case: Case) -> list[str]:
        torchs, ours = scaled_sides(sharded, case.name == "clipped")
        lines = []
        scales = []
        for i in range(8):
            lines += compare([torchs.run(i)], [ours.run(i)])
            want, got = (side.case.step.scaler.get_scale() for side in (torchs, ours))
            scales.append(got)
            if want != got:
                lines.append(f"call {i + 1}: scale {want} and {got}")
        if scales != [256.0, 256.0, 128.0, 128.0, 128.0, 64.0, 64.0, 64.0]:
            lines.append(f"scales {scales}")
        return lines

    all_of(check, [Case("plain"), Case("clipped")])
