"""Products and the collectives beside them in parts: the same numbers, and a faster step where it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from cases.parts import adamw, train_step
from ir.collectives import comm
from parallel.pairs import numbers
from ranks import run_ranks
from simulate.sharded_steps import experts, fully_sharded, tensor_parallel
from wholestep import simulate
from wholestep.errors import OptionError
from wholestep.ir.effects import is_collective
from wholestep.passes import collective_matmul, overlap_communication
from wholestep.passes.collective_matmul import segments

aten = torch.ops.aten


def wait(started: Tensor) -> Tensor:
    result: Tensor = comm.wait_tensor.default(started)
    return result


def rows_of_ranks(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The first dimension is gathered and scattered; the sum needs the whole product."""
    y = wait(comm.all_gather_into_tensor.default(x[0], 2, "0")) @ w
    scattered = wait(comm.reduce_scatter_tensor.default(torch.relu(y) @ v, "sum", 2, "0"))
    return scattered + x[0], y.sum()


def second_dimension(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Sequence parallelism: the second dimension is sharded, so that gathered blocks are put beside each other."""
    normed = x * torch.rsqrt(x.square().mean(2, keepdim=True) + 1e-5)
    blocks = wait(comm.all_gather_into_tensor.default(normed, 2, "0"))
    whole = torch.cat(blocks.split(x.shape[0]), 1)
    y = (whole.view(-1, whole.shape[2]) @ w).sigmoid() @ v
    pieces = torch.cat(y.view(whole.shape).split(x.shape[1], 1))
    out = wait(comm.reduce_scatter_tensor.default(pieces, "sum", 2, "0")) + x
    again = wait(comm.all_gather_into_tensor.default(out * out.mean(2, keepdim=True), 2, "0"))
    return out, again.view(-1, whole.shape[2]) @ w


def to_experts_and_back(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Tokens go to the other rank and come back."""
    half = x.shape[1] // 2
    there = wait(comm.all_to_all_single.default(x[0], [half, half], [half, half], "0"))
    back = wait(comm.all_to_all_single.default((there @ w).relu() @ v, [half, half], [half, half], "0"))
    return back + x[0], there


STEPS: list[Callable[..., Any]] = [rows_of_ranks, second_dimension, to_experts_and_back]


def test_two_ranks_compute_the_same_numbers_in_parts() -> None:
    def code(rank: int) -> list[tuple[str, int, int, float]]:
        found = []
        for step in STEPS:
            given = [numbers(0, rank, 4, 8, 6), numbers(1, 0, 6, 10), numbers(2, 0, 10, 6)]
            gm = make_fx(step)(*given)
            expected = gm(*given)
            before = sum(is_collective(node.target) for node in gm.graph.nodes)
            for parts in (2, 4):
                cut = make_fx(step)(*given)
                collective_matmul(cut, parts=parts)
                actual = cut(*given)
                after = sum(is_collective(node.target) for node in cut.graph.nodes)
                overlap_communication(cut)
                assert all(torch.equal(a, b) for a, b in zip(actual, cut(*given), strict=True))
                apart = max(float((a - b).abs().max()) for a, b in zip(expected, actual, strict=True))
                found.append((step.__name__, parts * before, after, apart))
        return found

    for rank in run_ranks(code, 2):
        for name, wanted, after, apart in rank:
            assert after == wanted, name
            assert apart < 1e-5, name


def test_a_tensor_parallel_step_trains_the_same_in_parts() -> None:
    def code(rank: int) -> tuple[list[float], int, list[float], int]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        plan = ws.Replicate(mesh["dp"], tensor_parallel=(mesh["tp"], styles), broadcast=False)
        found: list[Any] = []
        for passes in (None, [collective_matmul(parts=2), overlap_communication(bucket=None)]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
            optimizer = adamw(model)
            step = ws.compile(train_step, parallel=plan, lower="eager", passes=passes)
            losses = [float(step(model, optimizer, numbers(i, 0, 8, 6)).detach()) for i in range(3)]
            nodes = step.last.gm.graph.nodes
            found += [losses, sum(n.op == "call_function" and is_collective(n.target) for n in nodes)]
        return found[0], found[1], found[2], found[3]

    for plain, few, cut, more in run_ranks(code, 2):
        torch.testing.assert_close(torch.tensor(cut), torch.tensor(plain))
        assert more > few


def test_the_rows_of_a_gather_are_followed_to_the_scatter() -> None:
    (segment,) = segments(tensor_parallel(layers=1).gm.graph, 2)[:1]
    targets = [node.target for node in segment.nodes]
    assert targets[:3] == [comm.all_gather_into_tensor.default, comm.wait_tensor.default, aten.mm.default]
    assert comm.reduce_scatter_tensor.default in targets


@pytest.mark.parametrize(("make", "gain"), [(tensor_parallel, 0.93), (experts, 0.99), (fully_sharded, 1.001)])
def test_parts_are_used_where_the_simulated_step_is_faster(make: Any, gain: float) -> None:
    sizes = {"layers": 6, "rows": 16384, "width": 4096, "ranks": 8}
    whole, parts = make(**sizes), make(**sizes)
    overlap_communication(whole, machine=simulate.H100)
    collective_matmul(parts, machine=simulate.H100)
    overlap_communication(parts, machine=simulate.H100)
    before, after = (simulate.step(graph, machine=simulate.H100) for graph in (whole, parts))
    assert after.step_us <= gain * before.step_us
    assert after.peak_bytes <= 1.06 * before.peak_bytes


@pytest.mark.parametrize(
    ("options", "text"), [({"parts": 1}, "parts"), ({"cost": 3}, "cost"), ({"machine": 1}, "mach")]
)
def test_wrong_options_are_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        collective_matmul(**options)


def test_no_collective_no_change() -> None:
    gm = make_fx(lambda x: x @ x)(torch.ones(4, 4))
    collective_matmul(gm, parts=2)
    assert sum(node.target is aten.mm.default for node in gm.graph.nodes) == 1
    assert not dist.is_initialized()
