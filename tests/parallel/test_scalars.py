"""Scalars that must be the same on all ranks are compared: named before the first run, or while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

import wholestep as ws
from cases.parts import train_step
from ranks import run_ranks
from selection import each_now

PLANS = {"replicate": ws.Replicate, "fully shard": ws.FullyShard}
SECONDS = 40.0
"""For a difference to be found: the hash is compared about once a second."""


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))


def message_of(run: Callable[[], Any], seconds: float = SECONDS) -> str:
    """Call a step until it raises; the error."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            run()
        except ws.errors.DesyncError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others, "weight_decay": options.pop("second_decay", 0.1)}]
    return torch.optim.AdamW(groups, **{"lr": 0.01, **options})


FROM_THE_START: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "lr": ({}, {"lr": 0.02}, "optimizer.param_groups[0].lr: rank 0 has 0.01, rank 1 has 0.02"),
    "weight decay of the second group": (
        {},
        {"second_decay": 0.2},
        "optimizer.param_groups[1].weight_decay: rank 0 has 0.1, rank 1 has 0.2",
    ),
    "weight decay that is an int": (
        {"second_decay": 0},
        {},
        "optimizer.param_groups[1].weight_decay: rank 0 has 0, rank 1 has 0.1",
    ),
    "betas": ({}, {"betas": (0.9, 0.99)}, "optimizer.param_groups[0].betas[1]: rank 0 has 0.999, rank 1 has 0.99"),
    "eps": ({"eps": 1e-6}, {}, "optimizer.param_groups[0].eps: rank 0 has 1e-06, rank 1 has 1e-08"),
    "amsgrad": ({}, {"amsgrad": True}, "optimizer.param_groups[0].amsgrad: rank 0 has False, rank 1 has True"),
    "maximize": ({"maximize": True}, {}, "optimizer.param_groups[1].maximize: rank 0 has True, rank 1 has False"),
    "lr that is a tensor": (
        {"lr": torch.tensor(0.25)},
        {"lr": torch.tensor(0.5)},
        "optimizer.param_groups[0].lr: rank 0 has 0.25, rank 1 has 0.5",
    ),
}


def from_the_start(rank: int, kind: str) -> dict[str, str]:
    plan, found = PLANS[kind](world_mesh()), {}
    for name, (here, there, _) in FROM_THE_START.items():
        model = net()
        optimizer = adamw(model, **dict(there if rank else here))
        before = [p.detach().clone() for p in model.parameters()]
        step = ws.compile(train_step, parallel=plan)
        with pytest.raises(ws.errors.DesyncError) as caught:
            step(model, optimizer, torch.ones(2 + rank, 6))
        found[name] = str(caught.value)
        if kind == "replicate":
            assert all(map(torch.equal, model.parameters(), before)), "nothing ran"
    return found


@pytest.mark.parametrize("kind", each_now(PLANS, "replicate"))
def test_options_that_differ_from_the_start_are_named_before_anything_runs(kind: str) -> None:
    """Batches have other lengths too, so that graphs rightly differ; under FullyShard so do the shards."""
    for found in run_ranks(from_the_start, 2, kind, deadline=90):
        for name, (_, _, expected) in FROM_THE_START.items():
            assert expected in found[name], found[name]
            assert "in call 1 of train_step" in found[name]


class Training:
    """One model in training, whose rank 1 changes something at call 5."""

    def __init__(self, name: str, rank: int, plan: Any) -> None:
        self.name, self.rank, self.calls, self.message = name, rank, 0, ""
        self.model = net()
        self.holder = Holder()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        if name in ("lr", "betas", "lr tensor"):
            lr = torch.tensor(0.01) if name == "lr tensor" else 0.01
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.step = ws.compile(STEPS[name], parallel=plan)

    def run(self) -> None:
        self.calls += 1
        if self.calls >= 5 and self.rank:
            CHANGES[self.name](self.optimizer, self.holder, self.scaler)
        if self.calls in (3, 4):
            self.holder.factor += 0.25  # on all ranks: it becomes an input of the graph
        scale = self.holder.factor if self.name == "argument" else 1.0
        x = torch.ones(2 + self.rank, 6)  # longer on rank 1: whole graphs are not compared
        self.step(self.model, self.optimizer, x, self.holder, self.scaler, scale)

    def try_run(self) -> None:
        """Unless it has raised before."""
        if not self.message:
            try:
                self.run()
            except ws.errors.DesyncError as error:
                self.message = str(error)


def changes_while_running(rank: int, kind: str, names: list[str]) -> dict[str, str]:
    """Side by side: a training that stops does not disturb the others."""
    plan = PLANS[kind](world_mesh())
    all_of_them = [Training(name, rank, plan) for name in names]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not all(each.message for each in all_of_them):
        for each in all_of_them:
            each.try_run()
        time.sleep(0.01)
    dist.barrier()  # the process groups still work
    return {each.name: each.message for each in all_of_them}


def changes_with_a_capture(rank: int, name: str) -> str:
    return message_of(Training(name, rank, ws.Replicate(world_mesh())).run)


class Holder:
    """Numbers of the user's."""

    def __init__(self) -> None:
        self.factor = 1.0


def plain(model: nn.Module, optimizer: Optimizer, x: Tensor, *rest: Any) -> Tensor:
    return train_step(model, optimizer, x)


def scaled_by_attribute(model: nn.Module, optimizer: Optimizer, x: Tensor, holder: Holder, *rest: Any) -> Tensor:
    """The attribute scales gradients after they were reduced."""
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(holder.factor)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def decayed_by_argument(
    model: nn.Module, optimizer: Optimizer, x: Tensor, holder: Holder, scaler: Any, scale: float
) -> Tensor:
    loss = train_step(model, optimizer, x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - 0.001 * scale)
    return loss


def with_scaler(model: nn.Module, optimizer: Optimizer, x: Tensor, holder: Holder, scaler: Any, *rest: Any) -> Tensor:
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def set_option(key: str, value: Any) -> Callable[..., None]:
    def change(optimizer: Optimizer, holder: Holder, scaler: Any) -> None:
        optimizer.param_groups[0][key] = value

    return change


def replace_scale(optimizer: Optimizer, holder: Holder, scaler: Any) -> None:
    scaler.update(16.0)


def set_growth(optimizer: Optimizer, holder: Holder, scaler: Any) -> None:
    scaler.set_growth_factor(3.0)


def fill_lr(optimizer: Optimizer, holder: Holder, scaler: Any) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.75)


def set_factor(optimizer: Optimizer, holder: Holder, scaler: Any) -> None:
    holder.factor = 7.0


STEPS: dict[str, Callable[..., Tensor]] = {
    "lr": plain,
    "betas": plain,
    "lr tensor": plain,
    "attribute": scaled_by_attribute,
    "loss scale": with_scaler,
    "growth factor": with_scaler,
    "momentum": plain,
    "dampening": plain,
    "argument": decayed_by_argument,
}
CHANGES: dict[str, Callable[..., None]] = {
    "lr": set_option("lr", 0.05),
    "betas": set_option("betas", (0.5, 0.999)),
    "lr tensor": fill_lr,
    "attribute": set_factor,
    "loss scale": replace_scale,
    "growth factor": set_growth,
    "momentum": set_option("momentum", 0.9),
    "dampening": set_option("dampening", 0.5),
    "argument": set_factor,
}
VALUES = {
    "lr": ("optimizer.param_groups[0].lr", "0.01", "0.05"),
    "betas": ("optimizer.param_groups[0].betas[0]", "0.9", "0.5"),
    "lr tensor": ("optimizer.param_groups[0].lr", "0.009999999776482582", "0.75"),
    "attribute": ("holder.factor", "1.5", "7.0"),
    "loss scale": ("scaler._scale", "4.0", "16.0"),
    "growth factor": ("scaler._growth_factor", "2.0", "3.0"),
}


@pytest.mark.parametrize("kind", each_now(PLANS, "replicate"))
def test_what_changes_on_one_rank_is_named_with_the_call(kind: str) -> None:
    for messages in run_ranks(changes_while_running, 2, kind, list(VALUES), deadline=60):
        for name, (path, here, there) in VALUES.items():
            assert "differ since call 5:" in messages[name], name
            one = f"{path}: rank 0 has {here}, rank 1 has {there}"
            other = f"{path}: rank 1 has {there}, rank 0 has {here}"
            assert one in messages[name] or other in messages[name], messages[name]


CONSTANTS = {
    "momentum": "optimizer.param_groups[0].momentum: rank",
    "dampening": "optimizer.param_groups[0].dampening: rank",
    "argument": "scale: rank",
}


@pytest.mark.parametrize("name", each_now(CONSTANTS, "momentum", "argument"))
def test_a_constant_that_changes_on_one_rank_is_named(name: str) -> None:
    for message in run_ranks(changes_with_a_capture, 2, name, deadline=60):
        assert CONSTANTS[name] in message, message


def one_of_three(rank: int) -> str:
    """Only two of the three pairs of neighbours can see it; all three ranks raise."""
    training = Training("lr", rank // 2, ws.Replicate(world_mesh()))
    return message_of(training.run)


def test_all_ranks_raise_where_one_differs() -> None:
    for message in run_ranks(one_of_three, 3, deadline=60):
        assert "differ since call 5:" in message
        assert "rank 2 has 0.05" in message


# What may differ.


class Trainer:
    """Knows its rank, as trainers do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.noise = 0.0

    def step(self, model: nn.Module, optimizer: Optimizer, x: Tensor, tokens: float) -> Tensor:
        loss = model(x).square().sum() / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss if self.rank >= 0 else loss * 2

    def noisy_step(self, model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(self.noise)
        return loss


def run_for(seconds: float, *runs: Callable[[int], Any]) -> int:
    """As many calls on every rank, for about as long; how many."""
    calls = 0
    going = torch.ones(())
    end = time.monotonic() + seconds
    while going:
        for run in runs:
            run(calls)
        calls += 1
        if calls % 10 == 0:
            going = torch.tensor(float(time.monotonic() < end))
            dist.all_reduce(going, dist.ReduceOp.MIN)
    return calls


def numbers_of_the_batch(rank: int, plan: Any) -> Callable[[int], Any]:
    """Each rank divides by its own count of tokens, which changes from call to call; batches have other lengths."""
    model = net()
    optimizer = adamw(model)
    step = ws.compile(Trainer(rank).step, parallel=plan, max_recompiles=1000)
    return lambda i: step(model, optimizer, torch.ones(2 + rank, 6), 8.0 + (i % 3) + rank)


def scheduled(rank: int, plan: Any) -> Callable[[int], Any]:
    """The learning rate changes at every call, the loss scale now and then; ranks are apart in time."""
    model = net()
    optimizer = adamw(model)
    holder = Holder()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    step = ws.compile(with_scaler, parallel=plan)

    def run(i: int) -> None:
        if i % 50 == 10 + rank:
            time.sleep(0.3)
        step(model, optimizer, torch.ones(2 + rank, 6), holder, scaler)
        scheduler.step()

    return run


def ints_and_floats(rank: int, plan: Any) -> Callable[[int], Any]:
    """One rank read its options from a file that has no ints, and lists instead of tuples."""
    model = net()
    betas: Any = [0.5, 0.75] if rank else (0.5, 0.75)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 if rank else 1.0, betas=betas, weight_decay=0.0)
    optimizer.param_groups[0]["name"] = f"of rank {rank}"  # no option of the optimizer
    step = ws.compile(train_step, parallel=plan)
    return lambda i: step(model, optimizer, torch.ones(2 + rank, 6))


def per_rank(rank: int, plan: Any) -> Callable[[int], Any]:
    """Numbers that change parameters, and that the plan lets differ."""
    model = net()
    optimizer = adamw(model, lr=0.01 * (1 + rank))
    trainer = Trainer(rank)
    plan = replace(plan, per_rank=["*.noise", "optimizer.param_groups*.lr"])
    step = ws.compile(trainer.noisy_step, parallel=plan)

    def run(i: int) -> None:
        trainer.noise = 0.001 * (i % 3 + rank) if i > 2 else 0.0
        step(model, optimizer, torch.ones(2 + rank, 6))

    return run


def what_may_differ(rank: int, kind: str) -> int:
    plan = PLANS[kind](world_mesh())
    makers = (numbers_of_the_batch, scheduled, ints_and_floats, per_rank)
    return run_for(3, *(make(rank, plan) for make in makers))


@pytest.mark.parametrize("kind", each_now(PLANS, "fully shard"))
def test_nothing_is_raised_for_what_may_differ(kind: str) -> None:
    """Numbers that only scale the loss, schedules, equal values of other types, paths that the plan excludes."""
    first, second = run_ranks(what_may_differ, 2, kind, deadline=60)
    assert first == second >= 10


def test_per_rank_is_a_list_of_paths() -> None:
    for message in run_ranks(refused_plan, 1, deadline=30):
        assert "per_rank='x' is a string" in message


def refused_plan(rank: int) -> str:
    with pytest.raises(ws.errors.PlanError) as caught:
        ws.Replicate(world_mesh(), per_rank="x")
    return str(caught.value)


def two_trainings(rank: int) -> list[float]:
    """Two models are trained side by side, each on two ranks with a learning rate of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sweep", "dp"))
    model = net()
    optimizer = adamw(model, lr=0.01 * (1 + rank // 2))
    step = ws.compile(train_step, parallel=ws.Replicate(mesh["dp"]))
    run_for(2, lambda i: step(model, optimizer, torch.ones(2, 6)))
    return [p.sum().item() for p in model.parameters()]


def test_ranks_that_no_axis_of_the_plan_connects_may_differ() -> None:
    a, b, c, d = run_ranks(two_trainings, 4, deadline=60)
    assert a == b != c == d


def both_axes(rank: int) -> str:
    """Rank 3 differs from rank 1 along one axis and from rank 2 along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    optimizer = adamw(model)
    step = ws.compile(train_step, parallel=ws.FullyShard(mesh))

    def run() -> None:
        step(model, optimizer, torch.ones(2, 6))
        if rank == 3:
            optimizer.param_groups[0]["eps"] = 1e-4

    return message_of(run)


def test_ranks_of_a_mesh_of_two_axes_are_all_compared() -> None:
    for message in run_ranks(both_axes, 4, deadline=60):
        assert "optimizer.param_groups[0].eps: rank" in message
        assert "rank 3 has 0.0001" in message


def constants_of_ragged_graphs(rank: int) -> str:
    model = net()
    optimizer = adamw(model)
    holder = Holder()
    holder.factor = 1.0 + rank
    step = ws.compile(scaled_by_attribute, parallel=ws.FullyShard(world_mesh()))
    with pytest.raises(ws.errors.DesyncError) as caught:
        step(model, optimizer, torch.ones(2 + rank, 6), holder)
    return str(caught.value)


def test_a_constant_of_the_update_is_compared_where_batches_have_other_lengths() -> None:
    for message in run_ranks(constants_of_ragged_graphs, 2, deadline=60):
        assert "Ranks disagree on the update of call 1 of scaled_by_attribute" in message
        assert "holder.factor: rank 0 has 1.0, rank 1 has 2.0" in message


def back_to_equal(rank: int) -> str:
    """The learning rate differs for a single call."""
    model = net()
    optimizer = adamw(model)
    step = ws.compile(train_step, parallel=ws.Replicate(world_mesh()))
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        optimizer.param_groups[0]["lr"] = 0.5 if rank and calls == 6 else 0.01
        step(model, optimizer, torch.ones(2, 6))

    return message_of(run)


def test_a_difference_in_a_single_call_is_named_afterwards() -> None:
    for message in run_ranks(back_to_equal, 2, deadline=60):
        assert "differ since call 6" in message
        assert "rank 1 has 0.5" in message
