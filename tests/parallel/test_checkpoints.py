"""State dicts and checkpoints of sharded models are those of fully_shard; eager use between compiled steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import wholestep as ws
from parallel.pairs import Case, Compiled, Side, all_of, apart, compare, look, numbers, whole_state, world_mesh
from ranks import run_ranks
from selection import each_now

CASE = Case("", steps=3)


def one_batch(i: int) -> Tensor:
    """The same on every rank, so that any number of ranks trains alike."""
    return numbers(i, 0, 4, 6, dtype=torch.float64)


def side(plan: Any = None) -> Side:
    case = Case("", lambda: CASE.model().double(), batch=lambda i, rank: (one_batch(i),))
    return Side(case) if plan is None else Compiled(case, plan)


def run(side: Side, first: int, last: int) -> Side:
    for i in range(first, last):
        side.run(i)
    return side


def test_state_dicts_are_those_of_fully_shard() -> None:
    def code(rank: int) -> list[str]:
        mesh = world_mesh()
        torchs, ours = Side(CASE, lambda model: fully_shard(model, mesh=mesh)), Compiled(CASE, ws.FullyShard(mesh))
        names = list(ours.model.state_dict())
        torchs.run_all()
        ours.run_all()
        want, got = torchs.model.state_dict(), ours.model.state_dict()
        lines = [] if list(got) == list(want) == names else [f"names {list(got)}"]
        for name, value in want.items():
            mine = got[name]
            if not isinstance(mine, DTensor) or mine.placements != value.placements or mine.shape != value.shape:
                lines.append(f"{name} is {type(mine).__name__}")
            elif not torch.equal(mine.to_local(), value.to_local()):
                lines.append(f"{name} differs")
        expected, found = (s.optimizer.state_dict() for s in (torchs, ours))
        if expected["param_groups"] != found["param_groups"]:
            lines.append("param_groups")
        return lines

    assert run_ranks(code, 2) == [[], []]


def save(rank: int, folder: Path) -> list[tuple[str, Tensor]]:
    trained = run(side(ws.FullyShard(world_mesh())), 0, 3)
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return whole_state(run(trained, 3, 6))


def load(rank: int, folder: Path, kind: str) -> list[tuple[str, Tensor]]:
    """Into a model that trained on something else; into one that was never called; into one without a plan."""
    fresh = side() if kind == "eager" else side(ws.FullyShard(world_mesh()))
    if kind == "trained":
        run(fresh, 7, 8)
    model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return whole_state(run(fresh, 3, 6))


def test_checkpoints_of_two_ranks_go_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, tmp_path / "saved")[0]
    for ranks, kind in ((1, "eager"), (1, "trained"), (2, "trained"), (2, "fresh"), (4, "fresh")):
        for found in run_ranks(load, ranks, tmp_path / "saved", kind):
            assert [name for name, _ in found] == [name for name, _ in expected]
            for (name, want), (_, got) in zip(expected, found, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=f"{name}, {ranks} ranks, {kind}")


def test_an_eager_call_between_steps_has_the_whole_model() -> None:
    def code(rank: int) -> list[str]:
        mesh, x = world_mesh(), numbers(50, 0, 3, 6)
        whole, ours = Compiled(CASE, ws.Replicate(mesh)), Compiled(CASE, ws.FullyShard(mesh))
        lines = []
        for i in range(4):
            whole.run(i)
            ours.run(i)
            with torch.no_grad():
                if not torch.equal(whole.model(x), ours.model(x)):
                    lines.append(f"output after call {i + 1}")
            if not all(isinstance(p, DTensor) for p in ours.model.parameters()):
                lines.append(f"left whole after call {i + 1}")
        if len(ours.step.graphs) != 2:
            lines.append(f"{len(ours.step.graphs)} graphs: {ours.step.recompiles}")
        return lines + apart(whole, ours, rtol=0)

    assert run_ranks(code, 2) == [[], []]


@pytest.mark.parametrize("factor", each_now([None, 3.0], "3.0"))
def test_eager_and_compiled_steps_take_turns(factor: float | None) -> None:
    def check(case: Case) -> list[str]:
        mesh = world_mesh()

        def wrap(model: nn.Module) -> nn.Module:
            sharded = fully_shard(model, mesh=mesh)
            if factor is not None:
                sharded.set_gradient_divide_factor(factor)
                sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no sum of scaled addends
            return sharded

        torchs, ours = Side(case, wrap), Side(case)
        compiled = ws.compile(case.step, parallel=ws.FullyShard(mesh, gradient_divide_factor=factor))
        lines = []
        for i in range(6):
            ours.step = case.step if i % 2 else compiled
            lines += compare([torchs.run(i)], [ours.run(i)])
        if len(compiled.graphs) > 2:
            lines.append(f"{len(compiled.graphs)} graphs: {compiled.recompiles}")
        return lines

    all_of(check, [CASE])


def test_state_of_an_optimizer_that_was_used_before_is_sharded_alike() -> None:
    def check(case: Case) -> list[str]:
        """Trained by one process first; then by a plan, against torch's wrapper over the same start."""
        mesh, lines = world_mesh(), []
        for plan in (ws.Replicate(mesh), ws.FullyShard(mesh)):
            alone, ours = Side(case), Side(case)
            for i in range(2):
                for each in (alone, ours):
                    each.run(i, one_batch(i).float())
            ours.step = ws.compile(case.step, parallel=plan)
            for i in range(2, 5):
                alone.run(i, one_batch(i).float())
                ours.run(i, one_batch(i).float())
            lines += apart(alone, ours, rtol=0)
            for param in ours.model.parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    if isinstance(ours.optimizer.state[param][key], DTensor) != isinstance(param, DTensor):
                        lines.append(f"{key} is not placed like its parameter")
        return lines

    all_of(check, [CASE])


def test_an_optimizer_that_comes_later_than_the_model_is_pointed_to_the_shards() -> None:
    """An evaluation places the model; the first training step brings the optimizer, with state or without."""

    def evaluate(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).square().mean()

    def check(case: Case) -> list[str]:
        mesh = world_mesh()
        alone, ours = Side(case), Side(case)
        first = 2 if case.name == "with state" else 0
        for i in range(first):
            for each in (alone, ours):
                each.run(i, one_batch(i).float())
        loss = ws.compile(evaluate, parallel=ws.FullyShard(mesh))(ours.model, one_batch(9).float())
        lines = [] if torch.equal(loss, evaluate(alone.model, one_batch(9).float())) else ["evaluation"]
        ours.step = ws.compile(case.step, parallel=ws.FullyShard(mesh))
        for i in range(first, first + 3):
            alone.run(i, one_batch(i).float())
            ours.run(i, one_batch(i).float())
        return lines + apart(alone, ours, rtol=0)

    all_of(check, [Case("without state"), Case("with state")])


def test_ranks_that_start_apart_are_made_equal_to_the_first() -> None:
    def code(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for plan in (ws.Replicate, ws.FullyShard):
            torch.manual_seed(rank)
            model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4))
            model[1].running_mean.fill_(rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            ws.compile(CASE.step, parallel=plan(world_mesh(), buffers="local"))(model, optimizer, numbers(0, 0, 5, 6))
            found.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()])
            found[-1].append(model[1].running_mean)
        return found[0], found[1]

    torch.manual_seed(0)
    first = list(nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)).parameters())
    ranks = run_ranks(code, 2)
    for tensors in (t for each in ranks for t in each):
        assert all(torch.equal(want, got) for want, got in zip(first, tensors[:-1], strict=True))
        assert torch.equal(tensors[-1], ranks[0][0][-1])


def test_reading_the_sharded_model_communicates_nothing() -> None:
    def code(rank: int) -> int:
        ours = Compiled(CASE, ws.FullyShard(world_mesh()))
        ours.run_all()
        if rank == 0:  # alone: would hang if it talked to rank 1
            look(ours.model, ours.optimizer)
            return len(ours.model.state_dict())
        dist.get_rank()
        return 4

    assert run_ranks(code, 2) == [4, 4]
