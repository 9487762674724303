"""Training loops as people write them, with updates that wait for the next iteration, beside torch's own wrappers.

Each way to clear and to accumulate gradients runs through one story: a learning rate that a scheduler changes between
calls, a state_dict on one rank, an eval, a batch that raises, a checkpoint, a `with` block that ends, a last step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import wholestep as ws
from parallel.pairs import Case, Compiled, Side, all_of, apart, compare, look, numbers, world_mesh
from selection import some_now
from wholestep.passes import (
    bucket_all_gather,
    bucket_reduce_scatter,
    comm_fusion_with_concat,
    overlap_optimizer_with_next_forward,
    schedule_comm_wait,
)

STEPS = 16
SAVED_ALONE, EVALUATED, RAISED, SAVED, WITH_ENDED, LAST = 3, 5, 7, 9, 11, 13
PASS = overlap_optimizer_with_next_forward
SIZE = 3e-4
BUCKETED = [
    comm_fusion_with_concat(bucket_size_mb=SIZE),
    bucket_reduce_scatter(bucket_size_mb=SIZE),
    bucket_all_gather(bucket_size_mb=SIZE),
    schedule_comm_wait,
    PASS,
]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 4))


def looked_at(x: Tensor) -> Tensor:
    if x.shape[1] == 1:
        raise RuntimeError("a batch that is too small")
    return x


def zero_first(set_to_none: bool) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(looked_at(x)[0]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def zero_last(set_to_none: bool) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(looked_at(x)[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    return step


def syncs(model: nn.Module, now: bool) -> contextlib.AbstractContextManager[Any]:
    """Whether gradients are reduced, said in torch's two ways; ours reduces what is held back by itself."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    return contextlib.nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()


def accumulated(first: bool, set_to_none: bool = True) -> Callable[..., Tensor]:
    """Two micro-batches per step, reduced with the second one."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        if first:
            optimizer.zero_grad(set_to_none=set_to_none)
        with syncs(model, False):
            one = model(looked_at(x)[0]).square().mean() / 2
            one.backward()
        with syncs(model, True):
            two = model(x[1]).square().mean() / 2
            two.backward()
        optimizer.step()
        if not first:
            optimizer.zero_grad(set_to_none=set_to_none)
        return one.detach() + two.detach()

    return step


WAYS: dict[str, Callable[..., Tensor]] = {
    "zeroed first, to None": zero_first(True),
    "zeroed first, to zeros": zero_first(False),
    "zeroed last, to None": zero_last(True),
    "zeroed last, to zeros": zero_last(False),
    "accumulated, zeroed first": accumulated(True),
    "accumulated, zeroed first, to zeros": accumulated(True, False),
    "accumulated, zeroed last": accumulated(False),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "AdamW, foreach": lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
}


def pair(given: Case, sharded: bool) -> tuple[Side, Compiled]:
    mesh = world_mesh()
    if sharded:
        return Side(given, lambda model: fully_shard(model, mesh=mesh)), Compiled(given, ws.FullyShard(mesh))
    return Side(given, DistributedDataParallel), Compiled(given, ws.Replicate(mesh))


class Story:
    """Both sides of one training. What differs is in `lines`."""

    def __init__(self, given: Case, sharded: bool, folder: Path, rtol: float = 0) -> None:
        self.torchs, self.ours = pair(given, sharded)
        self.folder, self.rtol = folder, rtol
        self.schedulers = [CosineAnnealingLR(side.optimizer, 10) for side in (self.torchs, self.ours)]
        self.lines: list[str] = []
        self.pending = 0

    def call(self, i: int, **last: bool) -> None:
        x = numbers(i, dist.get_rank(), 2, 5, 6)
        want = self.torchs.step(self.torchs.through, self.torchs.optimizer, x)
        got = self.ours.step(self.ours.model, self.ours.optimizer, x, **last)
        self.pending += self.ours.step.has_pending
        self.same(f"loss {i}", want, got)
        for scheduler in self.schedulers:
            scheduler.step()

    def same(self, what: str, want: Tensor, got: Tensor) -> None:
        if not torch.allclose(want, got, rtol=self.rtol, atol=self.rtol):
            self.lines.append(f"{what}: {want} and {got}")

    def complete(self, what: str) -> None:
        """Nothing is pending, and all tensors are torch's; gradients too."""
        if self.ours.step.has_pending:
            self.lines.append(f"{what}: something is pending")
        if self.rtol:
            self.lines += [f"{what}: {line}" for line in apart(self.torchs, self.ours, self.rtol)]
            return
        want, got = (look(side.model, side.optimizer, what) for side in (self.torchs, self.ours))
        self.lines += compare([want], [got])

    # What happens between calls.

    def save_alone(self) -> None:
        """On rank 0 only; the state of a replica, and the shards of this rank."""
        if dist.get_rank() != 0:
            return
        for want, got in zip(
            self.torchs.model.state_dict().values(), self.ours.model.state_dict().values(), strict=True
        ):
            self.same("saved alone", local(want), local(got))

    def evaluate(self) -> None:
        x = numbers(50, 0, 3, 6)
        with torch.no_grad():
            want, got = (side.model.eval()(x) for side in (self.torchs, self.ours))
        self.same("eval", want, got)
        self.torchs.model.train(), self.ours.model.train()

    def raise_and_go_on(self) -> None:
        """A batch that the step refuses, on all ranks, and an error of the loop itself."""
        x = numbers(0, 0, 2, 1, 6)
        for side in (self.torchs, self.ours):
            try:
                side.step(side.through, side.optimizer, x)
            except RuntimeError:
                continue
            self.lines.append("the bad batch raised nothing")
        with contextlib.suppress(ZeroDivisionError):
            self.call(100)
            raise ZeroDivisionError

    def save_and_load(self) -> None:
        """A checkpoint of ours in the middle, that both sides go on from."""
        if not self.ours.step.has_pending:
            self.lines.append("nothing is pending at the checkpoint")
        model, optimizer = get_state_dict(self.ours.model, self.ours.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder)
        self.complete("checkpoint")
        self.call(101)
        self.call(102)
        for side in (self.torchs, self.ours):
            model, optimizer = get_state_dict(side.model, side.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder)
            set_state_dict(side.model, side.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def tell(self) -> list[str]:
        for i in range(STEPS):
            if i == WITH_ENDED:
                with self.ours.step:
                    self.call(i)
                self.complete("after `with step`")
            elif i in (0, LAST):
                self.call(i, last_train_step=True)
                self.complete("after the last step")
            else:
                self.call(i)
            if i == SAVED_ALONE:
                self.save_alone()
            if i == EVALUATED:
                self.evaluate()
            if i == RAISED:
                self.raise_and_go_on()
            if i == SAVED:
                self.save_and_load()
        if not self.ours.step.has_pending:
            self.lines.append("nothing is pending at the end")
        self.ours.step.flush()
        self.complete("at the end")
        return self.lines


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


FIRST = ("zeroed first, to None, SGD", "zeroed last, to zeros, SGD", "accumulated, zeroed first, AdamW, foreach")
OTHER = (
    "zeroed first, to zeros, AdamW, foreach",
    "zeroed last, to None, AdamW, fused",
    "accumulated, zeroed last, SGD",
)
"""What `make test` runs: each way to clear gradients by one of the plans, with or without buckets."""


def cases(passes: list[Any]) -> list[Case]:
    names = list(OPTIMIZERS)
    made = []
    for i, (way, step) in enumerate(WAYS.items()):
        name = names[i % len(names)]
        made.append(Case(f"{way}, {name}", net, OPTIMIZERS[name], step, compile={"passes": passes}))
    return made


@pytest.mark.parametrize("found", some_now(cases([PASS]), FIRST[1]))
def test_replicas_through_a_whole_loop(found: list[Case], tmp_path: Path) -> None:
    all_of(lambda case: Story(case, False, tmp_path / case.name).tell(), found)


@pytest.mark.parametrize("found", some_now(cases([PASS]), *OTHER))
def test_shards_through_a_whole_loop(found: list[Case], tmp_path: Path) -> None:
    all_of(lambda case: Story(case, True, tmp_path / case.name).tell(), found)


@pytest.mark.parametrize("found", some_now(cases(BUCKETED)[::2], "accumulated, zeroed first, AdamW, foreach"))
def test_buckets_of_two_ranks_through_a_whole_loop(found: list[Case], tmp_path: Path) -> None:
    def check(case: Case) -> list[str]:
        replicas = Story(case, False, tmp_path / f"{case.name}, replicas").tell()
        return replicas + Story(case, True, tmp_path / f"{case.name}, shards").tell()

    all_of(check, found)


@pytest.mark.long  # of two ranks above, to the bit
def test_four_ranks_through_a_whole_loop(tmp_path: Path) -> None:
    def check(case: Case) -> list[str]:
        both = []
        for sharded in (False, True):
            both += Story(case, sharded, tmp_path / f"{case.name}, {sharded}", rtol=1e-4).tell()
        return both

    all_of(check, [cases(BUCKETED)[0], cases([PASS])[4]], ranks=4)


def clipped(side: Side) -> Any:
    norm: Any = nn.utils.clip_grad_norm_(side.model.parameters(), 0.01, norm_type=float("inf"))
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm]


def doubled(side: Side) -> list[Tensor]:
    with torch.no_grad():
        for p in side.model.parameters():
            p.grad.mul_(2)  # type: ignore[union-attr]
    return values(side)


def cleared(side: Side) -> list[Tensor]:
    side.optimizer.zero_grad(set_to_none=False)
    return values(side)


def dropped(side: Side) -> list[Tensor]:
    side.optimizer.zero_grad(set_to_none=True)
    return values(side)


def stepped(side: Side) -> list[Tensor]:
    side.optimizer.step()
    return [*values(side), *(local(p.detach()) for p in side.model.parameters())]


def values(side: Side) -> list[Tensor]:
    return [local(p.grad) + 0 for p in side.model.parameters() if p.grad is not None]


def alone(side: Side) -> list[Tensor]:
    return values(side) if dist.get_rank() == 0 else []


LOOKS = [values, alone, clipped, doubled, cleared, dropped, stepped]


def looks(case: Case, sharded: bool) -> list[str]:
    """After each call the gradients are read, each time in another way; no call of `flush`."""
    torchs, ours = pair(case, sharded)
    lines = []
    for i in range(len(LOOKS) + 2):
        x = numbers(i, dist.get_rank(), 2, 5, 6)
        want = torchs.step(torchs.through, torchs.optimizer, x)
        got = ours.step(ours.model, ours.optimizer, x)
        lines += [] if torch.equal(want, got) else [f"loss {i}"]
        if i < 2:
            continue
        look = LOOKS[i - 2]
        if not ours.step.has_pending:
            lines.append(f"nothing is pending before {look.__name__}")
        pairs = list(zip(look(torchs), look(ours), strict=True))
        lines += [f"{look.__name__} in call {i}" for a, b in pairs if not torch.equal(a, b)][:1]
    ours.step.flush()
    return lines + apart(torchs, ours, rtol=0)


@pytest.mark.parametrize(
    "found",
    some_now(
        [each for each in cases([PASS]) if "zeroed first" in each.name],
        FIRST[0],
        "accumulated, zeroed first, to zeros, AdamW, fused",
    ),
)
def test_gradients_read_between_two_calls_are_those_of_this_step(found: list[Case]) -> None:
    all_of(lambda case: looks(case, False) + looks(case, True), found)


def only_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x[0]).square().mean()
    loss.backward()
    return loss


def test_steps_that_only_add_gradients_between_those_that_update() -> None:
    """Two calls per update, each a compiled step of its own; the first one of a pair sees the last update."""

    def check(case: Case, sharded: bool) -> list[str]:
        torchs, ours = pair(case, sharded)
        mesh = world_mesh()
        plan = ws.FullyShard(mesh) if sharded else ws.Replicate(mesh)
        quiet = ws.compile(only_gradients, parallel=plan.no_sync())
        lines, pending = [], 0
        for i in range(12):
            x = numbers(i, dist.get_rank(), 2, 5, 6)
            with syncs(torchs.through, bool(i % 2)):
                step = case.step if i % 2 else only_gradients
                want = step(torchs.through, torchs.optimizer, x)
            got = (ours.step if i % 2 else quiet)(ours.model, ours.optimizer, x)
            pending += ours.step.has_pending
            lines += [] if torch.equal(want, got) else [f"loss {i}: {want} and {got}"]
        stays = sharded and "zeros" in case.name  # a whole gradient becomes a shard, in this step's output
        if pending < 4 and not stays:
            lines.append(f"only {pending} calls left something")
        ours.step.flush()
        return lines + apart(torchs, ours, rtol=0)

    last = [each for each in cases([PASS]) if each.name.startswith("zeroed last")]
    all_of(lambda case: check(case, False) + check(case, True), last)
