"""Gradients that add up: over micro-batches inside of a step, and over steps that do not reduce."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from parallel.pairs import Case, Compiled, Side, all_of, collectives, compare, look, numbers, world_mesh
from ranks import run_ranks
from selection import each_now

MICRO = 3


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> Tensor:
    """Reduces at the last micro-batch, in each of three ways: DDP's, FSDP2's, ours."""
    total = torch.zeros(())
    for i, x in enumerate(batches.unbind()):
        is_last = i == MICRO - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
            loss = model(x).square().mean() / MICRO
            loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def batches(i: int, rank: int) -> tuple[Any, ...]:
    return (numbers(i, rank, MICRO, 5, 6),)


CASE = Case("micro-batches", step=accumulate, batch=batches, steps=4)


def test_micro_batches_reduce_once_with_the_bits_of_ddp() -> None:
    def check(case: Case) -> list[str]:
        ours = Compiled(case, ws.Replicate(world_mesh()))
        lines = compare(Side(case, DistributedDataParallel).run_all(), ours.run_all())
        return lines if ours.collectives == {"all_reduce": 4} else [*lines, str(ours.collectives)]

    all_of(check, [CASE])


@pytest.mark.parametrize("again", each_now([True, False], "True"))
def test_micro_batches_reduce_once_with_the_bits_of_fully_shard(again: bool) -> None:
    def check(case: Case) -> list[str]:
        mesh = world_mesh()
        torchs = Side(case, lambda model: fully_shard(model, mesh=mesh, reshard_after_forward=again))
        ours = Compiled(case, ws.FullyShard(mesh, reshard_after_forward=again))
        lines = compare(torchs.run_all(), ours.run_all())
        return lines if ours.collectives["reduce_scatter_tensor"] == 4 else [*lines, str(ours.collectives)]

    all_of(check, [CASE])


def only_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def then_update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = only_gradients(model, optimizer, x)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("sharded", each_now([False, True], "True"))
def test_steps_that_do_not_reduce_add_up_until_one_does(sharded: bool) -> None:
    """Two steps accumulate, the third reduces: sums have torch's order, so bits are equal."""

    def check(case: Case) -> list[str]:
        mesh = world_mesh()
        torchs = Side(case, (lambda m: fully_shard(m, mesh=mesh)) if sharded else DistributedDataParallel)
        ours = Side(case)
        plan: Any = ws.FullyShard(mesh) if sharded else ws.Replicate(mesh)
        quiet = ws.compile(only_gradients, parallel=plan.no_sync())
        full = ws.compile(then_update, parallel=plan)
        lines = []
        for i in range(9):
            torch.manual_seed(i)
            is_last = i % 3 == 2
            (x,) = case.batch(i, torch.distributed.get_rank())
            if sharded:
                torchs.through.set_requires_gradient_sync(is_last)
            with torchs.through.no_sync() if not sharded and not is_last else nullcontext():
                want = (then_update if is_last else only_gradients)(torchs.through, torchs.optimizer, x)
            got = (full if is_last else quiet)(ours.model, ours.optimizer, x)
            if is_last:
                expected = look(torchs.model, torchs.optimizer, f"call {i}", want)
                lines += compare([expected], [look(ours.model, ours.optimizer, "", got)])
            elif not torch.equal(want, got):
                lines.append(f"call {i}: loss {want} and {got}")
        names = set(collectives(quiet)) - {"all_gather_into_tensor"}
        if names or len(quiet.graphs) > 4 or len(full.graphs) > 2:  # gradients and optimizer state: there or not yet
            lines.append(f"{names}, {len(quiet.graphs)} and {len(full.graphs)} graphs")
        return lines

    all_of(check, [Case("no_sync")])


def test_gradients_of_eager_backwards_before_the_step_count_as_reduced() -> None:
    """DDP adds what `.grad` holds to the reduced gradient of this step only where nothing is held back; so do we."""

    def code(rank: int) -> list[str]:
        mesh = world_mesh()
        torchs, ours = Side(Case(""), lambda m: fully_shard(m, mesh=mesh)), Side(Case(""))
        step = ws.compile(then_update, parallel=ws.FullyShard(mesh))
        lines = []
        for i in range(4):
            (x,) = torchs.case.batch(i, rank)
            if i:  # the model is sharded since the first call
                only_gradients(torchs.through, torchs.optimizer, x)
                only_gradients(ours.through, ours.optimizer, x)
            then_update(torchs.through, torchs.optimizer, x)
            step(ours.model, ours.optimizer, x)
            lines += compare([look(torchs.model, torchs.optimizer)], [look(ours.model, ours.optimizer)])
        return lines

    assert run_ranks(code, 2) == [[], []]
