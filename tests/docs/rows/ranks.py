"""Rows of "Several ranks": most of them in one set of two ranks, which is started once."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import wholestep as ws
from docs.rows.page import row
from parallel.pairs import (
    Case,
    beside_ddp,
    beside_fully_shard,
    beside_one_process,
    collectives,
    net,
    numbers,
    sharded_beside_ddp,
    world_mesh,
)
from ranks import RanksFailed, run_ranks
from wholestep import errors

CHECKS: dict[str, Callable[[], Any]] = {}
"""What is tried on ranks, by name; each gives what it found."""


def on_ranks(check: Callable[[], Any]) -> Callable[[], Any]:
    """Try something on two ranks, with all the others; calling it here gives what each rank found."""
    CHECKS[check.__name__] = check

    def found() -> list[Any]:
        return [rank[check.__name__] for rank in _all_found()]

    return found


@functools.cache
def _all_found() -> list[dict[str, Any]]:
    return run_ranks(lambda rank: {name: _tried(check) for name, check in CHECKS.items()}, 2, deadline=240.0)


def _tried(check: Callable[[], Any]) -> Any:
    try:
        return check()
    except Exception:
        return traceback.format_exc()


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def code_of(plan: Any, step: Any = train, model: Callable[[], nn.Module] = net, optimizer: Any = adamw) -> str:
    """The code of an error that all ranks raise; a rank may quote another's, which came first."""
    try:
        built = model()
        ws.compile(step, parallel=plan() if callable(plan) else plan)(
            built, optimizer(built), numbers(0, dist.get_rank(), 5, 6)
        )
    except errors.PeerFailedError as error:
        return str(error).split("Error: [")[1].split("]")[0]
    except errors.WholestepError as error:
        return error.code
    return "nothing was raised"


def shard() -> Any:
    return ws.FullyShard(world_mesh())


def replicate() -> Any:
    return ws.Replicate(world_mesh())


def refused(check: Callable[[], Any], *codes: str) -> None:
    assert check() == [list(codes)] * 2


def nothing_differs(check: Callable[[], Any]) -> None:
    assert check() == [[]] * 2


@on_ranks
def averaged() -> list[str]:
    case = Case("plain", steps=3, step=train, optimizer=adamw)
    return [*beside_ddp(case), *beside_fully_shard(case)]


@row("gradients")
def gradients() -> None:
    nothing_differs(averaged)


@on_ranks
def equal_at_the_start() -> tuple[bool, bool]:
    found = []
    for broadcast in (True, False):
        torch.manual_seed(dist.get_rank())
        model = net()
        plan = ws.Replicate(world_mesh(), broadcast=broadcast)
        step = ws.compile(lambda model, x: model(x).sum(), parallel=plan)
        step(model, numbers(0, 0, 5, 6))
        mine = model[0].weight.detach().clone()
        others = mine.clone()
        dist.broadcast(others, 0)
        found.append(bool(torch.equal(mine, others)))
    return found[0], found[1]


@row("parameters and buffers that differ at the start")
def start() -> None:
    assert equal_at_the_start() == [(True, True), (True, False)]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = net(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@on_ranks
def unused_parameters() -> tuple[bool, int]:
    torch.manual_seed(0)
    model = Unused()
    step = ws.compile(train, parallel=replicate())
    step(model, adamw(model), numbers(0, dist.get_rank(), 5, 6))
    sent = [n for n in step.last.gm.graph.nodes if "all_reduce" in str(n.target)]
    return model.other.weight.grad is None, len(sent)


@row("a parameter that a step does not use")
def unused() -> None:
    assert unused_parameters() == [(True, 4)] * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.again = nn.Linear(6, 7)
        self.again.weight = self.first.weight
        self.again.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.last(self.first(x)))


@on_ranks
def odd_rows() -> list[str]:
    return beside_fully_shard(Case("tied", model=Tied, steps=3, step=train, optimizer=adamw))


@row("rows that do not divide by the number of ranks")
def rows_of_weights() -> None:
    nothing_differs(odd_rows)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = net(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


@on_ranks
def without_dimensions() -> tuple[bool, bool, int]:
    torch.manual_seed(0)
    model = Scaled()
    step = ws.compile(train, parallel=shard(), passes=None)
    step(model, adamw(model), numbers(0, dist.get_rank(), 5, 6))
    gathers = sum(count for name, count in collectives(step).items() if "gather" in name)
    return isinstance(model.scale, DTensor), isinstance(model.inner[0].weight, DTensor), gathers


@row("parameters without dimensions under `FullyShard`")
def scalars() -> None:
    assert [found[:2] for found in without_dimensions()] == [(False, True)] * 2


@row("a sharded parameter read inside of a forward")
def gathered() -> None:
    assert [found[2] for found in without_dimensions()] == [5, 5]  # four in the forward, one again in the backward


@on_ranks
def shards_outside() -> list[str]:
    def halves(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        return loss

    return beside_fully_shard(Case("halves", step=halves, steps=3, optimizer=adamw))


@row("a sharded parameter outside of a forward")
def outside() -> None:
    nothing_differs(shards_outside)


class WritesIntoItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-1, 1)
        return self.inner(x)


def penalised(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean() + model[0].weight.square().sum()
    loss.backward()
    optimizer.step()
    return loss


@on_ranks
def penalties() -> list[str]:
    return [code_of(shard, penalised)]


@row("a sharded parameter in arithmetic with plain tensors")
def arithmetic() -> None:
    refused(penalties, "WS-UNSUPPORTED")


@on_ranks
def writes_inside() -> list[str]:
    return [code_of(shard, model=WritesIntoItself)]


@row("writing into a sharded parameter inside of a forward")
def writes() -> None:
    refused(writes_inside, "WS-PARAM-DATA")


@on_ranks
def elementwise() -> list[str]:
    found = []
    for name in "SGD AdamW RAdam Adagrad Rprop".split():  # all of them: tests/parallel/test_optimizers.py
        build = lambda model, name=name: getattr(torch.optim, name)(model.parameters(), lr=0.01)  # noqa: E731
        case = Case(name, step=train, steps=2, optimizer=build, graphs=3)
        # DTensor has no rule for an operator of Rprop.
        found += beside_one_process(case, shard(), rtol=1e-4) if name == "Rprop" else beside_fully_shard(case)
    return found


@row("SGD, Adam, AdamW, NAdam, RAdam, Adagrad, Adadelta, Adamax, RMSprop, Rprop, ASGD")
def on_shards() -> None:
    nothing_differs(elementwise)


@on_ranks
def whole_optimizers() -> list[str]:
    build = lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01)  # noqa: E731
    case = Case("Adafactor", step=train, steps=2, optimizer=build)
    return beside_one_process(case, shard(), rtol=1e-4)


@row("Adafactor, Muon, optimizers that wholestep does not know")
def on_wholes() -> None:
    nothing_differs(whole_optimizers)


@on_ranks
def sparse_adam() -> list[str]:
    return [code_of(shard, optimizer=lambda model: torch.optim.SparseAdam(model.parameters()))]


@row("SparseAdam under `FullyShard`")
def sparse() -> None:
    refused(sparse_adam, "WS-SHARD-OPT")


@on_ranks
def clipped() -> list[str]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return beside_one_process(Case("clipped", step=step, steps=2, optimizer=adamw), shard(), rtol=1e-4)


@row("`clip_grad_norm_`, GradScaler")
def clips() -> None:
    nothing_differs(clipped)


@on_ranks
def batch_norm() -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    step, optimizer = ws.compile(train, parallel=replicate()), adamw(model)
    for i in range(2):
        step(model, optimizer, numbers(i, dist.get_rank(), 5, 6))
    mine = model[1].running_mean.clone()
    first = mine.clone()
    dist.broadcast(first, 0)
    return bool(torch.equal(mine, first))


@row("BatchNorm statistics")
def statistics() -> None:
    assert batch_norm() == [True, False]


@on_ranks
def uneven_batches() -> list[str]:
    batch = lambda i, rank: (numbers(i, rank, 3 + rank, 6),)  # noqa: E731
    return beside_ddp(Case("uneven", step=train, steps=3, batch=batch, optimizer=adamw))


@row("batches of different shapes on ranks")
def batches() -> None:
    nothing_differs(uneven_batches)


@on_ranks
def own_collectives() -> list[Any]:
    group = dist.group.WORLD
    step = ws.compile(lambda x: all_reduce(x * 2, "sum", group))
    return [step(torch.full((2,), float(i))).tolist() for i in range(3)]


@row("functional collectives of your own")
def functional_collectives() -> None:
    assert own_collectives() == [[[0.0, 0.0], [4.0, 4.0], [8.0, 8.0]]] * 2


def reduces(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return train(model, optimizer, x)


@on_ranks
def plain_collectives() -> list[str]:
    return [code_of(replicate, reduces)]


@row("`dist.all_reduce` and the like in the step")
def all_reduces() -> None:
    refused(plain_collectives, "WS-UNSUPPORTED")


@on_ranks
def meshes_in_the_step() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "dp"))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x * mesh["dp"].size())

    return [code_of(replicate, step)]


@row('`mesh["dp"]` in the step')
def slices_of_a_mesh() -> None:
    refused(meshes_in_the_step, "WS-CAPTURED-TENSOR")


@on_ranks
def wrapped_models() -> list[str]:
    return [code_of(replicate, model=lambda: nn.parallel.DistributedDataParallel(net()))]


@row("a model that is wrapped, together with `parallel=`")
def wrapped() -> None:
    refused(wrapped_models, "WS-WRAPPED")


@on_ranks
def other_plans() -> list[str]:
    model = net()
    first = code_of(shard, model=lambda: model)
    again = code_of(replicate, model=lambda: model)
    return [first, again, code_of(lambda: ws.FullyShard(world_mesh(), modules=["no.*"]))]


@row("another plan for a model that was placed before")
def plans() -> None:
    refused(other_plans, "nothing was raised", "WS-PLAN", "WS-PLAN")


@on_ranks
def other_meshes() -> list[str]:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    return [code_of(lambda: ws.Replicate(grid))]


@row("no process group, a mesh of other axes")
def no_group() -> None:
    with pytest.raises(errors.MeshError):
        ws.Replicate(None)  # type: ignore[arg-type]
    refused(other_meshes, "WS-MESH")


def differs(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return train(model, optimizer, x * 2 if dist.get_rank() else x)


@on_ranks
def different_graphs() -> list[str]:
    return [code_of(replicate, differs)]


@row("ranks with different graphs, a rank that does not come")
def desync() -> None:
    refused(different_graphs, "WS-DESYNC")


@on_ranks
def other_rates() -> list[str]:
    rate = 0.01 + dist.get_rank()
    return [code_of(replicate, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=rate))]


@row("a learning rate, weight decay, betas, a loss scale")
def rates() -> None:
    refused(other_rates, "WS-DESYNC")


@on_ranks
def scaled_losses() -> list[str]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, weight: float) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * weight
        loss.backward()
        optimizer.step()
        return loss

    batch = lambda i, rank: (numbers(i, rank, 5, 6), 1.0 + i * (rank + 1))  # noqa: E731
    return beside_ddp(Case("weights", step=step, steps=4, batch=batch, optimizer=adamw, graphs=3))


@row("numbers that only scale the loss of a rank")
def weights_of_losses() -> None:
    nothing_differs(scaled_losses)


@on_ranks
def channels_last() -> list[str]:
    build = lambda: nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last)  # noqa: E731
    planes = lambda i, rank: (numbers(i, rank, 2, 6, 5, 5).contiguous(memory_format=torch.channels_last),)  # noqa: E731
    case = Case("channels last", model=build, step=train, steps=2, batch=planes, optimizer=adamw)
    return [*beside_ddp(case), *sharded_beside_ddp(case)]


@row("parameters in channels last, or transposed")
def layouts() -> None:
    nothing_differs(channels_last)


@row("a rank that raises, dies or ends")
def dying() -> None:
    def code(rank: int) -> str:
        model = net()
        optimizer = adamw(model)
        step = ws.compile(train, parallel=ws.Replicate(world_mesh(), deadline=5))
        step(model, optimizer, numbers(0, rank, 5, 6))
        if rank == 1:
            os._exit(7)
        try:
            for i in range(1, 50):
                step(model, optimizer, numbers(i, rank, 5, 6))
        except errors.PeerFailedError as error:
            return error.code
        return "nothing was raised"

    with pytest.raises(RanksFailed) as caught:
        run_ranks(code, 2, deadline=60.0)
    assert caught.value.results == {0: "WS-PEER-FAILED"}


@row("a world of one rank")
def alone() -> None:
    def code(rank: int) -> tuple[bool, int]:
        torch.manual_seed(0)
        model = net()
        step = ws.compile(train, parallel=replicate())
        ours = step(model, adamw(model), numbers(0, 0, 5, 6))
        torch.manual_seed(0)
        plain = net()
        return bool(torch.equal(ours, train(plain, adamw(plain), numbers(0, 0, 5, 6)))), sum(collectives(step).values())

    assert run_ranks(code, 1) == [(True, 0)]
