"""Lowered steps on two ranks: close to torch's own wrappers, communication where the passes put it and outside."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from harness import Frame
from lower.close import agreeing
from parallel.pairs import Case, Compiled, Side, all_of, compare, look, numbers, world_mesh
from selection import some_now
from wholestep.ir.effects import is_collective
from wholestep.lower.compiled_region import CompiledRegion
from wholestep.passes import (
    bucket_all_gather,
    bucket_reduce_scatter,
    comm_fusion_with_concat,
    overlap_optimizer_with_next_forward,
    schedule_comm_wait,
)

SIZE = 3e-4
OVERLAP = [
    comm_fusion_with_concat(bucket_size_mb=SIZE),
    bucket_reduce_scatter(bucket_size_mb=SIZE),
    bucket_all_gather(bucket_size_mb=SIZE),
    schedule_comm_wait,
    overlap_optimizer_with_next_forward,
]


def net() -> nn.Module:
    """Rows that two ranks cannot share evenly."""
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))


def training(name: str, passes: Any, optimizer: Callable[..., Optimizer], **options: Any) -> Case:
    return Case(
        name,
        net,
        lambda model: optimizer(model.parameters(), **options),
        batch=lambda i, rank: (numbers(i, rank, 5, 6),),
        steps=4,
        compile={"passes": passes, "lower": "inductor", "lower_options": {"min_aten_ops": 4}},
    )


CASES = [
    training("no passes", None, AdamW, lr=0.01, foreach=True),
    training("default passes", "default", AdamW, lr=0.01, fused=True),
    training("overlap", OVERLAP, SGD, lr=0.1, momentum=0.9, foreach=False),
]


def communication(step: Any) -> list[str]:
    return [str(node.target) for node in step.graph.nodes if node.op == "call_function" and is_collective(node.target)]


def trained(side: Side) -> Frame:
    """What a rank has after all steps, and all losses. Reading in between would complete pending updates."""
    for i in range(side.case.steps):
        side.call(i)
    return look(side.model, side.optimizer, "the last step", side.results)


def lowered_beside(torchs: Side, case: Case, plan: Any) -> list[str]:
    """What differs from torch's wrapper beyond rounding, or is not where it should be."""
    ours = Compiled(case, plan)
    plain = Compiled(dataclasses.replace(case, compile={**case.compile, "lower": "eager"}), plan)
    expected = trained(torchs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ws.LowerWarning)
        actual = trained(ours)
    trained(plain)
    lines = compare([expected], [agreeing(expected, actual)])
    lowered, eager = ours.step.executable, plain.step.executable
    if communication(lowered) != communication(eager):
        lines.append(f"order of collectives: {communication(lowered)} instead of {communication(eager)}")
    if not communication(lowered):
        lines.append("no collective")
    if not any(isinstance(module, CompiledRegion) for module in lowered.modules()):
        lines.append("nothing is compiled")
    return lines


def beside_ddp(case: Case) -> list[str]:
    return lowered_beside(Side(case, DistributedDataParallel), case, ws.Replicate(world_mesh()))


def beside_fully_shard(case: Case) -> list[str]:
    mesh = world_mesh()
    return lowered_beside(Side(case, lambda model: fully_shard(model, mesh=mesh)), case, ws.FullyShard(mesh))


@pytest.mark.parametrize("cases", some_now(CASES, "overlap"))
def test_steps_train_lowered_as_torchs_wrappers(cases: list[Case]) -> None:
    """In one set of ranks: each of them imports Inductor."""

    def check(case: Case) -> list[str]:
        replicated = [f"beside DDP: {line}" for line in beside_ddp(case)]
        return replicated + [f"beside fully_shard: {line}" for line in beside_fully_shard(case)]

    all_of(check, cases, deadline=600)
