"""Updates that wait for the next iteration, on two ranks: what everybody sees is what DistributedDataParallel gives."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils import _pytree as pytree

import wholestep as ws
from cases.parts import train_step, zero_first
from parallel.pairs import numbers
from ranks import run_ranks
from wholestep.passes.comm_fusion import comm_fusion_with_concat
from wholestep.passes.iter_move import STAYS, marked_moves, overlap_optimizer_with_next_forward
from wholestep.passes.schedule_comm_wait import schedule_comm_wait

STEPS = 20
SAVE, EVAL, FLUSH_ONE, GRADS = 6, 9, 12, 14

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd_foreach": lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "adamw_foreach": lambda ps: AdamW(ps, lr=0.01, foreach=True, amsgrad=True),
    "adamw_fused": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "adamw_lr_tensor": lambda ps: AdamW(ps, lr=torch.tensor(0.01), foreach=False),
}


def differences(expected: Any, found: Any, what: str) -> list[str]:
    """A line for each tensor or number that is not the same to the last bit."""
    wanted, _ = pytree.tree_flatten_with_path(expected)
    got = pytree.tree_leaves(found)
    if len(wanted) != len(got):
        return [f"{what}: {len(got)} values instead of {len(wanted)}"]
    pairs = zip(wanted, got, strict=True)
    return [f"{what}{pytree.keystr(path)} differs" for (path, a), b in pairs if not _same(a, b)]


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def norm_returned(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    model(x).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def set_lr(i: int, *optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = 0.02 * (1 + i % 4)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class Sides:
    """The same training by DistributedDataParallel and by a plan with updates that cross."""

    def __init__(self, step: Callable[..., Any], optimizer: str, passes: list[Any]) -> None:
        self.fn = step
        self.model = model_of()
        self.reference = copy.deepcopy(self.model)
        self.wrapped = DistributedDataParallel(self.reference)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.other = OPTIMIZERS[optimizer](self.reference.parameters())
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        self.step = ws.compile(step, parallel=ws.Replicate(mesh), passes=passes, name="across")

    def run(self, i: int, rank: int, **last: bool) -> list[str]:
        set_lr(i, self.optimizer, self.other)
        x = numbers(i, rank, 5, 6)
        torch.manual_seed(i)
        expected = self.fn(self.wrapped, self.other, x)
        torch.manual_seed(i)
        found = self.step(self.model, self.optimizer, x, **last)
        return differences(expected.detach(), found.detach(), f"loss of step {i}")

    def state(self, what: str) -> list[str]:
        """What somebody sees who asks for state: complete, whatever is pending."""
        saved = differences(self.reference.state_dict(), self.model.state_dict(), f"{what}: model")
        return saved + differences(self.other.state_dict(), self.optimizer.state_dict(), f"{what}: optimizer")


def train(rank: int, optimizer: str, step: Callable[..., Any], passes: list[Any]) -> dict[str, Any]:
    sides, said, crossed = Sides(step, optimizer, passes), [], 0
    buffer = io.BytesIO()
    for i in range(STEPS):
        said += sides.run(i, rank)
        crossed += sides.step.has_pending
        if i == SAVE:
            torch.save([sides.model.state_dict(), sides.optimizer.state_dict()], buffer)
            said += sides.state("saved")
        if i == SAVE + 2:  # back to what was saved, in the middle of pending work
            model, state = torch.load(io.BytesIO(buffer.getvalue()))
            for m, o in ((sides.model, sides.optimizer), (sides.reference, sides.other)):
                m.load_state_dict(model)
                o.load_state_dict(copy.deepcopy(state))
        if i == EVAL:
            x = numbers(100, rank, 3, 6)
            said += differences(sides.reference.eval()(x), sides.model.eval()(x), "eval")
            sides.reference.train(), sides.model.train()
        if i == FLUSH_ONE and rank == 0:
            sides.step.flush()
            said += sides.state("flushed alone")
        if i == GRADS and rank == 1:
            grads = [[p.grad for p in m.parameters()] for m in (sides.reference, sides.model)]
            for a, b in zip(*grads, strict=True):
                same = (a is None and b is None) or torch.equal(a, b + 0)
                said += [] if same else ["a gradient differs"]
    said += sides.run(STEPS, rank, last_train_step=True)
    assert not sides.step.has_pending
    parameters = zip(sides.reference.parameters(), sides.model.parameters(), strict=True)
    said += ["a parameter differs at the end" for a, b in parameters if not torch.equal(a, b)]
    last = sides.step.last
    assert last is not None
    moves = [len(nodes) for nodes in marked_moves(last.gm.graph).values()]
    return {"said": said, "crossed": crossed, "moves": moves, "stays": last.gm.meta[STAYS]}


NOW = ((train_step, "adamw_fused"), (train_step, "adamw_lr_tensor"), (zero_first, "adamw_foreach"))


@pytest.mark.parametrize(
    ("step", "optimizer"),
    [
        pytest.param(step, name, marks=() if (step, name) in NOW else pytest.mark.long)
        for step in (train_step, zero_first)
        for name in OPTIMIZERS
    ],
)
def test_training_is_bit_for_bit_that_of_ddp_with_a_save_a_resume_and_an_eval(
    step: Callable[..., Any], optimizer: str
) -> None:
    for rank in run_ranks(train, 2, optimizer, step, [overlap_optimizer_with_next_forward], deadline=120):
        assert rank["said"] == []
        assert len(rank["moves"]) == 6, "one move per gradient reduction"
        assert rank["crossed"] > STEPS - 5


def test_buckets_cross_as_a_whole_and_their_optimizer_is_split() -> None:
    passes = [comm_fusion_with_concat(bucket_size_mb=0.0004), schedule_comm_wait, overlap_optimizer_with_next_forward]
    for optimizer in ("adamw_foreach", "adamw_fused"):
        for rank in run_ranks(train, 2, optimizer, train_step, passes, deadline=120):
            assert rank["said"] == []
            assert 1 < len(rank["moves"]) < 6
            assert rank["crossed"] > STEPS - 5


def test_clipping_needs_all_gradients_so_all_updates_cross_together() -> None:
    for rank in run_ranks(train, 2, "adamw", clipped, [overlap_optimizer_with_next_forward], deadline=120):
        assert rank["said"] == []
        assert len(rank["moves"]) == 1
        assert rank["crossed"] > STEPS - 5


def test_a_norm_of_gradients_that_is_returned_keeps_all_updates_in_their_iteration() -> None:
    for rank in run_ranks(train, 2, "adamw", norm_returned, [overlap_optimizer_with_next_forward], deadline=120):
        assert rank["said"] == []
        assert rank["moves"] == []
        assert rank["crossed"] == 0
        assert len(rank["stays"]) == 6
        assert all("output" in why for why in rank["stays"].values())


def test_the_first_call_may_be_the_last_one() -> None:
    def code(rank: int) -> list[str]:
        sides = Sides(train_step, "sgd", [overlap_optimizer_with_next_forward])
        said = sides.run(0, rank, last_train_step=True)
        said += sides.run(1, rank, last_train_step=True)  # the first of the graph with momentum
        assert not sides.step.has_pending
        return said + sides.state("after two last steps")

    assert run_ranks(code, 2) == [[], []]


def test_a_flush_on_one_rank_does_not_wait_for_absent_ranks() -> None:
    """Rank 1 goes away for good after its step; rank 0 saves."""

    def code(rank: int) -> list[str]:
        sides = Sides(train_step, "adamw", [overlap_optimizer_with_next_forward])
        said = [line for i in range(4) for line in sides.run(i, rank)]
        assert sides.step.has_pending
        return said + (sides.state("on one rank") if rank == 0 else [])

    assert run_ranks(code, 2, deadline=40) == [[], []]


def test_shards_cross_too() -> None:
    def code(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        one, other = model_of(), model_of()
        for layer in (other[0], other[3], other[5]):
            fully_shard(layer, mesh=mesh)
        fully_shard(other, mesh=mesh)
        plan = ws.FullyShard(mesh, modules=["0", "3", "5"])
        step = ws.compile(train_step, parallel=plan, passes=[overlap_optimizer_with_next_forward])
        optimizers: list[Optimizer] = []
        said = []
        for i in range(8):
            x = numbers(i, rank, 5, 6)
            if not optimizers:
                optimizers = [AdamW(one.parameters(), lr=0.01), AdamW(other.parameters(), lr=0.01)]
            torch.manual_seed(i)
            found = step(one, optimizers[0], x)
            torch.manual_seed(i)
            expected = train_step(other, optimizers[1], x)
            said += differences(expected.detach(), found.detach(), f"loss {i}")
        assert step.has_pending
        mine = [p.to_local() for p in one.state_dict().values()]
        theirs = [p.to_local() for p in other.state_dict().values()]
        return said + differences(theirs, mine, "shards")

    assert run_ranks(code, 2) == [[], []]
