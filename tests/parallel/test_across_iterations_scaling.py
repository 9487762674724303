"""A GradScaler whose decision waits for the next iteration: skipped steps, and what the scaler says when it is asked.

A scaler looks at all gradients before anything is updated, so that all updates cross together, and with them its scale.
It has no hooks by which it could say that somebody asks: tensors that complete the step lie in the place of its own.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from parallel.pairs import Case, Compiled, Side, all_of, compare, look, numbers, world_mesh
from selection import some_now
from wholestep.cross_iteration.pending_updates import LateTensor
from wholestep.passes.iter_move import marked_moves, overlap_optimizer_with_next_forward

STEPS = 14
OVERFLOWS = (0, 3, 4, 8)
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, foreach=False),
    "AdamW, foreach": lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
}


class Scaled:
    """A step with a scaler of its own."""

    def __init__(self, clip: bool = False) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.clip = clip

    def __call__(self, model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return loss


def overflowing(i: int, rank: int) -> tuple[Any, ...]:
    """Some batches of the last rank are infinite; all ranks must skip those steps."""
    x = numbers(i, rank, 5, 6)
    return (x * float("inf") if i in OVERFLOWS and rank == dist.get_world_size() - 1 else x,)


def sides(name: str, sharded: bool, clip: bool = False) -> tuple[Side, Compiled]:
    mesh = world_mesh()
    given = {"optimizer": OPTIMIZERS[name], "batch": overflowing, "compile": {"passes": [PASS]}}
    wrap = (lambda model: fully_shard(model, mesh=mesh)) if sharded else DistributedDataParallel
    plan = ws.FullyShard(mesh) if sharded else ws.Replicate(mesh)
    return Side(Case("", step=Scaled(clip), **given), wrap), Compiled(Case("", step=Scaled(clip), **given), plan)


PASS = overlap_optimizer_with_next_forward


def scaler_of(side: Side) -> torch.amp.GradScaler:
    step: Any = side.case.step
    return step.scaler


def run_both(torchs: Side, ours: Side, i: int) -> list[str]:
    torchs.call(i)
    ours.call(i)
    want, got = torchs.results[-1].detach(), ours.results[-1].detach()
    return [] if torch.equal(want.nan_to_num(), got.nan_to_num()) else [f"loss {i}: {want} and {got}"]


@pytest.mark.parametrize(
    ("sharded", "clip", "cases"),
    [
        pytest.param(sharded, clip, *each.values, marks=each.marks, id=f"{plan}-{how}-{each.id}")
        for plan, sharded, how, clip, now in (
            ("replicated", False, "plain", False, "SGD"),
            ("replicated", False, "clipped", True, "AdamW, foreach"),
            ("sharded", True, "plain", False, "AdamW, fused"),
            ("sharded", True, "clipped", True, "AdamW"),
        )
        for each in some_now([Case(name) for name in OPTIMIZERS], now)
    ],
)
def test_steps_that_overflow_are_skipped_as_in_eager(sharded: bool, clip: bool, cases: list[Case]) -> None:
    def check(case: Case) -> list[str]:
        torchs, ours = sides(case.name, sharded, clip)
        lines, pending = [], 0
        for i in range(STEPS):
            lines += run_both(torchs, ours, i)
            pending += ours.step.has_pending
            if i in (4, 10):  # after a skipped step, and after one that was not
                ours.step.flush()
                lines += compare([look(torchs.model, torchs.optimizer)], [look(ours.model, ours.optimizer)])
        if pending < STEPS - 3:
            lines.append(f"only {pending} calls left something")
        if len(marked_moves(ours.step.last.gm.graph)) != 1:
            lines.append("updates do not cross together")
        want, got = (scaler_of(side).get_scale() for side in (torchs, ours))
        lines += [] if want == got else [f"scale {want} and {got}"]
        return lines + compare([look(torchs.model, torchs.optimizer)], [look(ours.model, ours.optimizer)])

    all_of(check, cases)


def pickled(scaler: torch.amp.GradScaler) -> Any:
    file = io.BytesIO()
    torch.save(scaler, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False).state_dict()


def loaded(scaler: torch.amp.GradScaler) -> None:
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})


def updated(scaler: torch.amp.GradScaler) -> float:
    scaler.update(32.0)
    return scaler.get_scale()


ASKED: dict[str, Callable[[torch.amp.GradScaler], Any]] = {
    "get_scale": lambda scaler: scaler.get_scale(),
    "state_dict": lambda scaler: scaler.state_dict(),
    "pickle": pickled,
    "deepcopy": lambda scaler: copy.deepcopy(scaler).state_dict(),
    "scale": lambda scaler: scaler.scale(torch.ones(3)).tolist(),
    "load_state_dict": loaded,
    "update": updated,
}


@pytest.mark.parametrize("cases", some_now([Case(name) for name in ASKED], "get_scale", "deepcopy", "load_state_dict"))
def test_a_scaler_that_is_asked_in_any_way_gives_what_eager_has(cases: list[Case]) -> None:
    def check(case: Case) -> list[str]:
        torchs, ours = sides("SGD", sharded=False)
        lines = []
        for i in range(STEPS):
            lines += run_both(torchs, ours, i)
            if i in (3, 6, 8):
                if not ours.step.has_pending:
                    lines.append(f"nothing is pending after call {i}")
                want, got = (ASKED[case.name](scaler_of(side)) for side in (torchs, ours))
                lines += [] if want == got else [f"call {i}: {want} and {got}"]
                if ours.step.has_pending:
                    lines.append("what is pending was not completed")
        if len(ours.step.graphs) > 3 + (case.name == "load_state_dict"):  # no scale, no momentum, both; settings
            lines.append(f"captured again: {ours.step.recompiles}")
        ours.step.flush()
        return lines + compare([look(torchs.model, torchs.optimizer)], [look(ours.model, ours.optimizer)])

    all_of(check, cases)


def test_one_rank_may_ask_alone_and_the_scaler_of_a_step_that_is_gone_is_whole() -> None:
    def check(case: Case) -> list[str]:
        torchs, ours = sides("AdamW", sharded=False)
        lines = []
        for i in range(6):
            lines += run_both(torchs, ours, i)
            if i == 3 and dist.get_rank() == 0:
                lines += [] if scaler_of(torchs).state_dict() == scaler_of(ours).state_dict() else ["asked alone"]
        held = vars(scaler_of(ours))["_scale"]
        assert isinstance(held, LateTensor)
        assert held.shape == ()
        assert ours.step.has_pending, "a shape is known without waiting"
        ours.step = None
        assert type(vars(scaler_of(ours))["_scale"]) is Tensor
        lines += [] if held.item() == scaler_of(torchs).get_scale() else ["a tensor that somebody held"]
        return lines + compare([look(torchs.model, torchs.optimizer)], [look(ours.model, ours.optimizer)])

    all_of(check, [Case("alone")])


def test_two_steps_that_share_a_scaler_see_each_others_scale() -> None:
    """As in the training of two networks against each other."""

    def check(case: Case) -> list[str]:
        torchs, ours = sides("SGD", sharded=False)
        again, others = sides("SGD", sharded=False)
        again.case.step.scaler, others.case.step.scaler = scaler_of(torchs), scaler_of(ours)
        lines = []
        for i in range(STEPS):
            lines += run_both(torchs, ours, i)
            lines += run_both(again, others, i + 1)
        for one, other in ((torchs, ours), (again, others)):
            other.step.flush()
            lines += compare([look(one.model, one.optimizer)], [look(other.model, other.optimizer)])
        want, got = (scaler_of(side).state_dict() for side in (torchs, ours))
        return lines if want == got else [*lines, f"{want} and {got}"]

    all_of(check, [Case("two")])
