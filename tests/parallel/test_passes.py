"""Twenty steps with passes beside torch's own wrappers, on real ranks: the same bits after every step.

On two ranks a sum has one order, so buckets change no bit. On four a backend may add ranks in another order at another
place of a buffer: there bucketed reductions agree within reassociation, and everything else to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from parallel.pairs import Case, Compiled, Side, all_of, apart, beside, compare, numbers, world_mesh
from selection import some_now
from wholestep.ir.effects import is_collective
from wholestep.passes import (
    bucket_all_gather,
    bucket_reduce_scatter,
    comm_fusion_with_concat,
    merge_common_subexpressions,
    overlap_optimizer_with_next_forward,
    remove_copy_from_optimizer,
    remove_dead_collectives,
    remove_duplicate_collectives,
    schedule_comm_wait,
)
from wholestep.passes.engine.registry import DEFAULT

STEPS = 20
SIZE = 3e-4
EXACT = [
    remove_copy_from_optimizer,
    merge_common_subexpressions,
    remove_duplicate_collectives,
    remove_dead_collectives,
    bucket_all_gather(bucket_size_mb=SIZE),
]
SMALL = [
    comm_fusion_with_concat(bucket_size_mb=SIZE),
    bucket_reduce_scatter(bucket_size_mb=SIZE),
    bucket_all_gather(bucket_size_mb=SIZE),
    schedule_comm_wait,
]
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, foreach=False),
    "AdamW, foreach": lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
}


def net() -> nn.Module:
    """Rows that no number of ranks shares evenly, and a scalar-like vector."""
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 9, bias=False), nn.Linear(9, 1))


def case(name: str, optimizer: str, passes: Any, **more: Any) -> Case:
    return Case(name, net, OPTIMIZERS[optimizer], steps=STEPS, compile={"passes": passes}, **more)


LISTS: dict[str, Any] = {
    "small buckets": SMALL,
    "all-reduce": [comm_fusion_with_concat(bucket_size_mb=SIZE)],
    "reduce-scatter": [bucket_reduce_scatter(bucket_size_mb=SIZE)],
    "exact": EXACT,
    "overlap": [*SMALL, overlap_optimizer_with_next_forward],
}
CASES = [case(f"default, {name}", name, "default") for name in OPTIMIZERS] + [
    case(f"{title}, {list(OPTIMIZERS)[i % 4]}", list(OPTIMIZERS)[i % 4], passes)
    for i, (title, passes) in enumerate(LISTS.items(), 1)
]


class Flushing:
    """A step that leaves nothing pending: here somebody looks at raw tensors after each call."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, *args: Any) -> Any:
        result = self._step(*args)
        self._step.flush()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def pair(given: Case, kind: str, mesh: DeviceMesh | None = None) -> tuple[Side, Compiled]:
    mesh = mesh or world_mesh()
    if kind == "replicate":
        return Side(given, DistributedDataParallel), Compiled(given, ws.Replicate(mesh))
    return Side(given, lambda model: fully_shard(model, mesh=mesh)), Compiled(given, ws.FullyShard(mesh))


def bits(kind: str) -> Callable[[Case], list[str]]:
    def check(given: Case) -> list[str]:
        torchs, ours = pair(given, kind)
        if "overlap" in given.name:
            ours.step = Flushing(ours.step)
        return beside(torchs, ours)

    return check


@pytest.mark.parametrize("cases", some_now(CASES, "default, AdamW, fused", "small buckets, AdamW", "overlap, AdamW"))
def test_two_ranks_have_the_bits_of_ddp(cases: list[Case]) -> None:
    all_of(bits("replicate"), cases)


@pytest.mark.parametrize(
    "cases", some_now(CASES, "default, SGD", "reduce-scatter, AdamW, fused", "exact, SGD", "overlap, AdamW")
)
def test_two_ranks_have_the_bits_of_fully_shard(cases: list[Case]) -> None:
    all_of(bits("shard"), cases)


ON_FOUR_RANKS = [CASES[2], *(each for each in CASES if each.name.startswith(("exact", "overlap")))]


@pytest.mark.long  # two ranks above have the same passes, four ranks below the buckets
@pytest.mark.parametrize("cases", [ON_FOUR_RANKS], ids=["all"])
def test_four_ranks_agree_within_reassociation_and_exact_passes_to_the_bit(cases: list[Case]) -> None:
    def check(given: Case) -> list[str]:
        lines = []
        for kind in ("replicate", "shard"):
            torchs, ours = pair(given, kind)
            if "exact" in given.name:
                plain = pair(replace(given, compile={}), kind)[1]
                lines += compare(plain.run_all(), ours.run_all())
                continue
            torchs.run_all()
            ours.run_all()
            ours.model.state_dict()
            lines += [f"{kind}: {line}" for line in apart(torchs, ours, rtol=1e-4)]
        return lines

    all_of(check, cases, ranks=4)


@pytest.mark.parametrize("cases", some_now([CASES[3], CASES[-1]], CASES[-1].name))
def test_hybrid_sharding_with_buckets_and_updates_that_cross(cases: list[Case]) -> None:
    def check(given: Case) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torchs, ours = pair(given, "shard", mesh)
        torchs.run_all()
        ours.run_all()
        ours.model.state_dict()
        found = collectives(ours)
        plain = pair(replace(given, steps=2, compile={}), "shard", mesh)[1]
        plain.run_all()
        fewer = [] if found < collectives(plain) else [f"{found} collectives"]
        return fewer + apart(torchs, ours, rtol=1e-4)

    all_of(check, cases, ranks=4)


def collectives(side: Compiled) -> int:
    return sum(is_collective(n.target) for n in side.step.last.gm.graph.nodes)


OVERLAPPING = [
    case(name, name, [*SMALL, overlap_optimizer_with_next_forward]) for name in OPTIMIZERS if name != "AdamW"
]


@pytest.mark.parametrize("cases", some_now(OVERLAPPING, "AdamW, foreach"))
def test_a_save_a_resume_into_a_fresh_model_and_an_eval_in_the_middle(cases: list[Case], tmp_path: Path) -> None:
    def check(given: Case) -> list[str]:
        """The save happens while updates are pending; the fresh model goes on from it beside torch's wrapper."""
        lines = []
        for kind in ("replicate", "shard"):
            torchs, ours = pair(given, kind)
            folder = tmp_path / f"{given.name}, {kind}"
            for i in range(STEPS):
                torchs.run(i)
                ours.call(i)
                if i in (8, 11) and not ours.step.has_pending:
                    lines.append(f"{kind}: nothing is pending after call {i}")
                if i == 8:
                    x = numbers(50, 0, 3, 6)
                    with torch.no_grad():
                        same = torch.equal(torchs.model.eval()(x), ours.model.eval()(x))
                    lines += [] if same else [f"{kind}: eval"]
                    torchs.model.train(), ours.model.train()
                if i == 11:
                    model, optimizer = get_state_dict(ours.model, ours.optimizer)
                    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
                    ours = pair(given, kind)[1]
                    if kind == "shard":
                        ours.call(90)  # places the shards, and leaves something pending
                    model, optimizer = get_state_dict(ours.model, ours.optimizer)
                    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
                    set_state_dict(ours.model, ours.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            ours.model.state_dict()
            lines += [f"{kind}: {line}" for line in apart(torchs, ours, rtol=0)]
        return lines

    all_of(check, cases)


def test_the_default_list_and_the_passes_by_name_are_these() -> None:
    assert [each.name for each in DEFAULT] == [each.name for each in SMALL]
