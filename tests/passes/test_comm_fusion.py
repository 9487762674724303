"""Buckets: what shares one, where it starts and ends, and that the step computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from cases.parts import train_step
from ir.collectives import Build
from ranks import run_ranks
from wholestep.errors import OptionError
from wholestep.ir.effects import is_collective, is_wait
from wholestep.passes import bucket_all_gather, bucket_reduce_scatter, comm_fusion_with_concat, schedule_comm_wait
from wholestep.passes.engine.manager import apply_pass, run_passes

KIB = 1 / 1024


def count(gm: fx.GraphModule, kind: str) -> int:
    return sum(is_collective(n.target) and kind in str(n.target) for n in gm.graph.nodes)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 8), nn.Linear(8, 5))


def beside_torch(rank: int, kind: str, passes: Any) -> tuple[bool, int, int]:
    """Twenty steps of ours and of torch's wrapper: equal bits, collectives with and without passes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model, reference = net(), net()
    if kind == "replicate":
        plan, wrapped = ws.Replicate(mesh), DistributedDataParallel(reference)
    else:
        plan, wrapped = ws.FullyShard(mesh), fully_shard(reference, mesh=mesh)
    ours = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    theirs = torch.optim.AdamW(wrapped.parameters(), 0.01, foreach=False)
    step = ws.compile(train_step, parallel=plan, passes=passes, verify=3)
    equal = True
    for i in range(20):
        torch.manual_seed(10 * i + rank)
        x = torch.randn(4, 6)
        equal &= torch.equal(step(model, ours, x), train_step(wrapped, theirs, x))
    plain = ws.capture(ws.compile(train_step, parallel=plan, passes=None), model, ours, x)
    assert step.last is not None
    return equal, count(step.last.gm, ""), count(plain.gm, "")


SMALL = [
    comm_fusion_with_concat(bucket_size_mb=0.2 * KIB),
    bucket_reduce_scatter(bucket_size_mb=0.2 * KIB),
    bucket_all_gather(bucket_size_mb=0.3 * KIB),
    schedule_comm_wait(),
]


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        pytest.param("replicate", "default", id="replicate-default"),
        pytest.param("fully shard", SMALL, id="fully shard-small buckets"),
        pytest.param("replicate", SMALL, id="replicate-small buckets", marks=pytest.mark.long),
        pytest.param("fully shard", "default", id="fully shard-default", marks=pytest.mark.long),
    ],
)
def test_bucketed_training_has_the_bits_of_torchs_wrappers(kind: str, passes: Any) -> None:
    for equal, with_passes, without in run_ranks(beside_torch, 2, kind, passes, deadline=90):
        assert equal
        assert with_passes < without


def waits_before_first_use(gm: fx.GraphModule) -> bool:
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    waits = [n for n in gm.graph.nodes if is_wait(n.target)]
    return all(place[wait] < min((place[u] for u in wait.users), default=10**9) for wait in waits)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 8, 40]), min_size=1, max_size=12),
    chained=st.sets(st.integers(0, 11)),
    used_early=st.sets(st.integers(0, 11)),
    limit=st.sampled_from([0.01, 0.1, 0.3, 25.0]),
    kind=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
)
def test_random_steps_compute_the_same_in_buckets(
    sizes: list[int], chained: set[int], used_early: set[int], limit: float, kind: str
) -> None:
    build = Build()
    previous, results = None, []
    inputs = [build.input(f"w{i}", 2 * size, 3) for i, size in enumerate(sizes)]
    start: Any = {"all_reduce": build.reduce, "reduce_scatter": build.scatter, "all_gather": build.gather}[kind]
    for i, x in enumerate(inputs):
        operand = build.call(torch.ops.aten.mul.Tensor, x, 1.5)
        if i in chained and previous is not None:
            operand = build.call(torch.ops.aten.add.Tensor, operand, previous)
        done = build.wait(start(operand))
        if i in used_early:
            previous = build.call(torch.ops.aten.sum.default, done)
        results.append(build.call(torch.ops.aten.mul.Tensor, done, 2.0))
    step = build.finish(*results)
    bucket: Any = {
        "all_reduce": comm_fusion_with_concat,
        "reduce_scatter": bucket_reduce_scatter,
        "all_gather": bucket_all_gather,
    }[kind]
    before = count(step.gm, kind)
    apply_pass(bucket, step, (limit * KIB,), {}, level=3)
    assert count(step.gm, kind) <= before
    comm_fusion_with_concat(step, 25, allow_rerun=True)
    apply_pass(schedule_comm_wait, step, (), {}, level=3)
    assert waits_before_first_use(step.gm)


@pytest.mark.parametrize("size", [0, -1, "25", None])
def test_a_bucket_has_a_size(size: Any) -> None:
    build = Build()
    step = build.finish(build.call(torch.ops.aten.neg.default, build.input("w", 2)))
    with pytest.raises((OptionError, ws.errors.PassError), match="bucket_size_mb"):
        comm_fusion_with_concat(step, size)


@pytest.mark.parametrize("thousands", [2, pytest.param(50, marks=pytest.mark.long)])
def test_all_of_it_runs_on_many_thousand_nodes(thousands: int) -> None:
    build = Build()
    neg = torch.ops.aten.neg.default
    waits = []
    for x in [build.input(f"w{i}", 4, 4) for i in range(90 * thousands)]:
        node = x
        for _ in range(8):
            node = build.call(neg, node)
        waits.append(build.wait(build.reduce(node)))
    step = build.finish(*[build.call(neg, wait) for wait in waits])
    assert len(step.gm.graph.nodes) > 1000 * thousands
    run_passes(step, [comm_fusion_with_concat(), schedule_comm_wait()])
    assert count(step.gm, "all_reduce") == 1


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@pytest.mark.parametrize("asked", [False, True], ids=["", "sizes asked in flight"])
def test_symbolic_shapes_share_a_bucket(kind: str, asked: bool) -> None:
    comm = torch.ops._c10d_functional
    start: Any = {
        "gather": lambda x: comm.all_gather_into_tensor(x, 2, "0"),
        "scatter": lambda x: comm.reduce_scatter_tensor(x, "sum", 2, "0"),
        "reduce": lambda x: comm.all_reduce(x, "sum", "0"),
    }[kind]
    bucket: Any = {
        "gather": bucket_all_gather,
        "scatter": bucket_reduce_scatter,
        "reduce": comm_fusion_with_concat,
    }[kind]

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = start(x), start(y)
        sizes = [x.new_ones(a.shape[0], b.shape[0])] if asked else []
        return (comm.wait_tensor(a), comm.wait_tensor(b), *sizes)

    given = torch.randn(6, 3), torch.randn(4, 5)
    gm = make_fx(step, tracing_mode="symbolic")(*given)
    apply_pass(bucket, gm, (), {}, level=3)
    assert count(gm, {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce"}[kind]) == 1
    size = {"gather": 2.0, "scatter": 0.5, "reduce": 1.0}[kind]
    other = torch.ones(8, 2), torch.ones(2, 7)
    found = Alone(gm).run(*other)
    assert [tuple(each.shape) for each in found[:2]] == [(int(8 * size), 2), (int(2 * size), 7)]
    if asked:
        assert found[2].shape == (int(8 * size), int(2 * size))


class Alone(fx.Interpreter):
    """Every rank has the same."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_wait(target):
            return args[0]
        if is_collective(target):
            name = str(target)
            if "gather" in name:
                return torch.cat([args[0], args[0]])
            return args[0].chunk(2)[0] if "scatter" in name else args[0].clone()
        return super().call_function(target, args, kwargs)
