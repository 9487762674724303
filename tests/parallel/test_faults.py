"""A rank that dies, raises, sleeps or runs something else: every other rank raises and says which, none hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.synchronize import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import wholestep as ws
from cases.parts import train_step
from ranks import RanksFailed, run_ranks
from selection import each_now
from wholestep import step
from wholestep.ir.effects import is_collective

PLANS = {"replicate": ws.Replicate, "fully shard": ws.FullyShard}


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))


class Job:
    """A model under a plan, ready to train."""

    def __init__(self, plan: Any, **options: Any) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.step = ws.compile(train_step, parallel=plan, **options)

    def run(self, width: int = 6) -> Tensor:
        return self.step(self.model, self.optimizer, torch.ones(2, width))


def killed(rank: int, kind: str) -> str:
    job = Job(PLANS[kind](world_mesh(), deadline=5))
    for _ in range(3):
        job.run()
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(ws.errors.PeerFailedError) as caught:
        run_forever(job)
    with pytest.raises(ws.errors.PeerFailedError, match="abort"):
        job.run()
    return str(caught.value)


def run_forever(job: Job) -> None:
    while True:
        job.run()


@pytest.mark.parametrize("kind", each_now(PLANS, "fully shard"))
def test_a_killed_rank_is_named_by_the_survivors(kind: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(killed, 3, kind, deadline=60)
    assert set(failed.value.failures) == {1}
    assert "SIGKILL" in failed.value.failures[1]
    for survivor in (0, 2):
        message = failed.value.results[survivor]
        assert "Rank 1" in message
        assert "of train_step" in message
        assert "call" in message


def raises_while_capturing(rank: int) -> str:
    job = Job(ws.Replicate(world_mesh(), deadline=20))
    job.run()
    if rank == 1:
        with pytest.raises(RuntimeError, match="reduction dim"):
            job.run(width=5)  # a batch that does not fit
        return "raised"
    with pytest.raises(ws.errors.PeerFailedError) as caught:
        job.run()
    return str(caught.value)


def test_an_error_of_one_rank_reaches_the_others_with_its_text() -> None:
    first, second = run_ranks(raises_while_capturing, 2, deadline=60)
    assert second == "raised"
    assert "ank 1" in first
    assert "reduction dim" in first


def does_not_come(rank: int, raised: Event) -> str:
    job = Job(ws.FullyShard(world_mesh(), deadline=1.5))
    if rank == 1:
        assert raised.wait(40)
    with pytest.raises((ws.errors.DesyncError, ws.errors.PeerFailedError)) as caught:
        job.run()
    raised.set()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    first, second = run_ranks(does_not_come, 2, multiprocessing.get_context("fork").Event(), deadline=60)
    assert "rank 1 did not reach call 1" in first
    assert "WS-" in second


@ws.passes.graph_optimization_pass(numerics="changes")
def swap_first_two(gm: fx.GraphModule) -> None:
    """Two gathers trade places, as a pass gone wrong on one rank would do: no shape tells."""
    first, second = [n for n in gm.graph.nodes if is_collective(n.target) and n.meta["val"].shape == (8,)][:2]
    first.prepend(second)
    gm.graph.lint()
    gm.recompile()


def swapped(rank: int) -> str:
    if rank == 1:
        step.ALWAYS = (swap_first_two,)  # this process ends with the test
    job = Job(ws.FullyShard(world_mesh(), deadline=20), passes=None)
    with pytest.raises(ws.errors.DesyncError) as caught:
        job.run()
    return str(caught.value)


def test_two_swapped_collectives_are_found_before_they_run() -> None:
    for message in run_ranks(swapped, 2, deadline=60):
        assert "Ranks disagree on the graph of call 1 of train_step: rank 0 against rank 1" in message
        assert "all_gather" in message


def other_reduction(rank: int, where: str) -> str:
    if where == "plan":
        job = Job(ws.Replicate(world_mesh(), reduce_op="sum" if rank else "avg"))
    else:
        plan = ws.Replicate(world_mesh())
        job = Job(plan.no_sync() if rank else plan)
    with pytest.raises(ws.errors.DesyncError) as caught:
        job.run()
    return str(caught.value)


@pytest.mark.parametrize("where", ["plan", "graph"])
def test_another_reduction_on_one_rank_is_found_before_it_runs(where: str) -> None:
    for message in run_ranks(other_reduction, 2, where, deadline=60):
        assert "The first difference is" in message
        assert "reduce" in message


def other_model(rank: int) -> str:
    job = Job(ws.FullyShard(world_mesh()))
    if rank == 1:
        job.model.append(nn.Linear(8, 8))
    with pytest.raises(ws.errors.DesyncError) as caught:
        job.run()
    assert not any(hasattr(p, "placements") for p in job.model.parameters()), "nothing was placed"
    return str(caught.value)


def test_another_model_on_one_rank_is_found_before_anything_is_sent() -> None:
    for message in run_ranks(other_model, 2, deadline=60):
        assert "model.3.weight" in message


def ragged(rank: int, kind: str) -> tuple[list[float], int]:
    """The last batch of rank 1 is longer: a new graph there, the known one on rank 0."""
    job = Job(PLANS[kind](world_mesh()))
    losses = []
    for i in range(4):
        x = torch.ones(3 if rank and i == 3 else 2, 6)
        losses.append(job.step(job.model, job.optimizer, x).item())
    return losses, len(job.step.graphs)


@pytest.mark.parametrize("kind", each_now(PLANS, "fully shard"))
def test_batches_of_other_lengths_run_together(kind: str) -> None:
    (first, known), (second, more) = run_ranks(ragged, 2, kind, deadline=60)
    assert first == pytest.approx(second)  # means over equal rows
    assert (known, more) == (2, 3)
