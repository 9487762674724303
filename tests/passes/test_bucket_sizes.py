"""How much goes into a bucket: never more collectives than torch's own passes leave, and the first bucket early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor.fx_passes import bucketing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws
from ir.collectives import Build, comm
from wholestep.ir.effects import is_collective
from wholestep.ir.graph_walks import copy_graph
from wholestep.passes import bucket_all_gather, bucket_reduce_scatter, comm_fusion_with_concat
from wholestep.passes.engine.manager import apply_pass, run_passes

pytestmark = pytest.mark.fake_group

aten = torch.ops.aten
MIB = 2**18
"""Elements of float32."""


def sizes_of(gm: fx.GraphModule) -> list[float]:
    """MiB of each collective's operand, in order."""
    return [n.args[0].meta["val"].numel() / MIB for n in gm.graph.nodes if is_collective(n.target)]


@pytest.mark.parametrize(
    ("mebibytes", "cap", "expected"),
    [
        ([0.5] * 20, 25, [10]),  # all fit into one
        ([0.5] * 20, 4, [2, 4, 4]),  # the first takes what would be left for the last
        ([0.5] * 18, 4, [1, 4, 4]),  # so that there are no more than without
        ([1.0] * 8, 4, [1, 4, 3]),  # full buckets: one more, so that communication starts early
        ([0.25, 6.0, 0.25, 0.25], 4, [0.25, 6, 0.5]),  # larger than a bucket: alone
        ([0.25] * 8, 0.5, [0.5] * 4),  # a bucket that is small itself
    ],
)
def test_the_first_bucket_is_small_where_that_costs_nothing(
    mebibytes: list[float], cap: float, expected: list[float]
) -> None:
    build = Build()
    inputs = [build.input(f"w{i}", int(size * MIB)) for i, size in enumerate(mebibytes)]
    waits = [build.wait(build.reduce(build.call(aten.neg.default, x))) for x in inputs]
    step = build.finish(*[build.call(aten.neg.default, wait) for wait in waits])
    comm_fusion_with_concat(step, cap)
    assert sizes_of(step.gm) == expected


def gathered_again(written_between: bool) -> ws.StepGraph:
    """Two parameters, cast and gathered for a forward and for its backward."""
    build = Build()
    a, b = build.input("a", 4, 3), build.input("b", 2, 3)
    results = []
    for again in (False, True):
        for x in (a, b):
            cast = build.call(aten._to_copy.default, x, dtype=torch.bfloat16)
            results.append(build.call(aten.sum.default, build.wait(build.gather(cast, recompute=again))))
        if written_between and not again:
            build.call(aten.mul_.Tensor, a, 2.0)
    return build.finish(*results)


def test_what_is_gathered_again_in_the_same_bucket_travels_once() -> None:
    step = gathered_again(written_between=False)
    apply_pass(bucket_all_gather, step, (), {}, level=3)
    (gather,) = [n for n in step.gm.graph.nodes if n.target is comm.all_gather_into_tensor.default]
    assert gather.args[0].meta["val"].numel() == 4 * 3 + 2 * 3


def test_a_parameter_that_was_written_is_gathered_again() -> None:
    gm = gathered_again(written_between=True).gm
    bucket_all_gather(gm)
    gathers = [n for n in gm.graph.nodes if n.target is comm.all_gather_into_tensor.default]
    assert [n.args[0].meta["val"].numel() for n in gathers] == [18, 18]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def collectives(graph: fx.Graph) -> int:
    return sum(is_collective(node.target) for node in graph.nodes)


@pytest.mark.parametrize("plan", [ws.Replicate, ws.FullyShard])
@pytest.mark.parametrize("updates", [True, False], ids=["with optimizer", "without"])
@pytest.mark.parametrize("cap", [0.03, 0.2, None], ids=["tiny", "small", "torch's own"])
def test_no_more_collectives_than_torchs_own_passes(mesh: DeviceMesh, plan: Any, updates: bool, cap: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)]
    model = nn.Sequential(*layers, nn.Linear(64, 96), nn.Linear(96, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False) if updates else None
    step = ws.capture(ws.compile(train_step, parallel=plan(mesh), passes=None), model, optimizer, torch.randn(2, 64))
    theirs = fx.GraphModule(step.gm, copy_graph(step.gm.graph))
    caps = None if cap is None else (lambda _: cap)
    bucketing.bucket_all_gather(theirs, caps)
    bucketing.bucket_reduce_scatter(theirs, caps)
    if hasattr(bucketing, "bucket_all_reduce"):
        bucketing.bucket_all_reduce(theirs, caps)
    before = collectives(step.gm.graph)
    size = cap or 2000
    run_passes(
        step, [p(bucket_size_mb=size) for p in (comm_fusion_with_concat, bucket_reduce_scatter, bucket_all_gather)]
    )
    assert collectives(step.gm.graph) <= min(collectives(theirs.graph), before - 1)
