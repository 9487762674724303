"""Steps that communicate by themselves, without a plan: functional collectives and DTensors that live inside the step.

Every rank keeps half of each parameter (dim 0) and its own batch; reading a parameter gathers it, its gradient is
averaged and scattered, and clipping takes the norm over all shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils import clip_grads_with_norm_

import wholestep as ws
from harness import Run, assert_frames_equal, batch_of, device, play
from ranks import run_ranks
from wholestep.ir.effects import is_collective, is_wait

WORLD = 2
STEPS = 3
comm = torch.ops._c10d_functional


class Gather(torch.autograd.Function):
    """All shards, one under the other; the gradient is averaged over ranks and scattered."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        return comm.wait_tensor(comm.all_gather_into_tensor(mine, WORLD, dist.group.WORLD.group_name))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mine = comm.reduce_scatter_tensor(gradient.contiguous(), "avg", WORLD, dist.group.WORLD.group_name)
        return comm.wait_tensor(mine)


def all_reduced(value: Tensor, how: str) -> Tensor:
    return comm.wait_tensor(comm.all_reduce(value, how, dist.group.WORLD.group_name))


def clip_shards(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """clip_grad_norm_ where every rank has a part of each gradient."""
    shards = list(parameters)
    squares = torch.stack([torch.linalg.vector_norm(each.grad).square() for each in shards])
    total = all_reduced(squares.sum(), "sum").sqrt()
    clip_grads_with_norm_(shards, max_norm, total)
    return total


def on_dtensors() -> Callable[[Tensor], Tensor]:
    mesh = init_device_mesh("cpu", (WORLD,))

    def gather(mine: Tensor) -> Tensor:
        whole = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])

    return gather


class ShardedLinear(nn.Module):
    """One rank's rows of a linear layer, gathered where they are used."""

    def __init__(self, columns: int, rows: int, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows // WORLD, columns) / 4)
        self.bias = nn.Parameter(torch.randn(rows // WORLD) / 4)
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.gather(self.weight), self.gather(self.bias))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = clip_shards(model.parameters(), 0.01)
    optimizer.step()
    return all_reduced(loss.detach(), "avg"), norm


def training(rank: int, gather: Callable[[Tensor], Tensor]) -> Run:
    torch.manual_seed(rank)
    model = nn.Sequential(ShardedLinear(6, 8, gather), nn.GELU(), ShardedLinear(8, 4, gather))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    return Run(
        step,
        lambda i: (model, optimizer, batch_of(device(), WORLD * i + rank, 5, 6)),
        {"model": model, "optimizer": optimizer},
        after=lambda i, result: optimizer.param_groups[0].update(lr=0.05 * 0.8**i),
    )


def beside_eager(rank: int, way: str) -> list[Counter[str]]:
    """Eager and compiled on the same ranks, to the last bit; how often each graph calls each collective."""
    gather = Gather.apply if way == "functional collectives" else on_dtensors()
    run = training(rank, gather)
    expected = play(run, run.step, STEPS)
    run = training(rank, gather)
    compiled = ws.compile(run.step)
    assert_frames_equal(expected, play(run, compiled, STEPS))
    assert len(compiled.graphs) == 2, "one that creates the state, one for ever after"
    for graph in compiled.graphs:
        assert ws.StepGraph.from_json(graph.to_json()).fingerprint() == graph.fingerprint()
        for node in graph.gm.graph.nodes:
            if isinstance(node.meta.get("val"), Tensor):
                assert type(node.meta["val"]).__name__ == "FakeTensor", "no DTensor, no AsyncCollectiveTensor is left"
            if is_collective(node.target):
                assert [is_wait(user.target) for user in node.users] == [True]
    return [
        Counter(str(n.target) for n in graph.gm.graph.nodes if is_collective(n.target)) for graph in compiled.graphs
    ]


@pytest.mark.parametrize("way", ["functional collectives", "DTensors"])
def test_a_step_that_gathers_its_own_shards_is_one_graph_with_the_bits_of_eager(way: str) -> None:
    first, second = run_ranks(beside_eager, WORLD, way)
    assert first == second
    for counts in first:
        assert counts == {
            "_c10d_functional.all_gather_into_tensor.default": 4,
            "_c10d_functional.reduce_scatter_tensor.default": 4,
            "_c10d_functional.all_reduce.default": 2,  # the norm and the loss
        }


def test_a_rank_captures_without_its_peers_and_communicates_only_when_it_runs() -> None:
    def code(rank: int) -> int:
        run = training(rank, on_dtensors())
        return len(ws.capture(run.step, *run.arguments(0)).gm.graph.nodes) if rank == 0 else 0

    assert run_ranks(code, WORLD, deadline=20)[0] > 0


def test_a_branch_on_a_number_that_ranks_summed_up_is_refused_not_communicated() -> None:
    """It looks like a step count, which capture and guards may compute; a collective they may not."""

    def branches(count: nn.Buffer) -> Tensor:
        return count * 2 if all_reduced(count, "sum").item() > 1 else count

    def code(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ws.errors.ControlFlowError):
                ws.capture(lambda module: branches(module.count), counter)

    counter = nn.Module()
    counter.register_buffer("count", torch.zeros(()))
    run_ranks(code, WORLD, deadline=20)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_what_dtensor_runs_to_work_out_shapes_is_not_in_the_graph() -> None:
    """It does so for what it has not seen before: the second capture in a process, or on another rank, would differ."""

    def code(rank: int) -> list[list[str]]:
        mesh = init_device_mesh("cpu", (1,))

        def drops(x: Tensor) -> Tensor:
            return nn.functional.dropout(DTensor.from_local(x, mesh, [Shard(0)], run_check=False)).to_local()

        captured = [ws.capture(drops, torch.ones(4, 3)) for _ in range(2)]
        return [[str(node.target) for node in graph.gm.graph.nodes] for graph in captured]

    first, second = run_ranks(code, 1)[0]
    assert first == second
    assert sum("bernoulli" in target for target in first) == 1
