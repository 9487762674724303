"""Plans and models that cannot work: each an error with a code that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from cases.parts import adamw, train_step
from parallel.pairs import net, numbers, world_mesh
from ranks import run_ranks
from wholestep import errors


def code_of(attempt: Callable[[], Any]) -> str:
    """The code of an error that all ranks raise; a rank may quote another's, which came first."""
    try:
        attempt()
    except errors.PeerFailedError as error:
        return str(error).split("Error: [")[1].split("]")[0]
    except errors.WholestepError as error:
        return error.code if error.fix else f"{error.code} does not say what to do"
    return "nothing was raised"


def train(model: nn.Module, plan: Any, step: Callable[..., Any] = train_step, **options: Any) -> None:
    ws.compile(step, parallel=plan, **options)(model, adamw(model), numbers(0, dist.get_rank(), 5, 6))


@pytest.mark.parametrize("plan", [ws.Replicate, ws.FullyShard])
def test_a_plan_needs_a_process_group(plan: Any) -> None:
    with pytest.raises(errors.MeshError, match="init_process_group"):
        plan(None)


def test_plans_that_make_no_sense_are_refused() -> None:
    def code(rank: int) -> dict[str, str]:
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        cube = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
        nameless = init_device_mesh("cpu", (2, 1))
        mesh = world_mesh()
        return {
            "no mesh": code_of(lambda: ws.Replicate("dp")),
            "two axes to replicate": code_of(lambda: ws.Replicate(grid)),
            "three axes": code_of(lambda: ws.FullyShard(cube)),
            "two axes without names": code_of(lambda: ws.FullyShard(nameless)),
            "reduce op": code_of(lambda: ws.Replicate(mesh, reduce_op="max")),
            "divide by zero": code_of(lambda: ws.FullyShard(mesh, gradient_divide_factor=0.0)),
            "buffers": code_of(lambda: ws.FullyShard(mesh, buffers="synced")),
            "modules": code_of(lambda: ws.FullyShard(mesh, modules="0")),
            "policy": code_of(lambda: ws.FullyShard(mesh, mp_policy=torch.bfloat16)),
            "no such module": code_of(lambda: train(net(), ws.FullyShard(mesh, modules=["layers.*"]))),
            "no plan": code_of(lambda: ws.compile(train_step, parallel=mesh)),
        }

    plan_errors = ("reduce op", "divide by zero", "buffers", "modules", "policy", "no such module")
    mesh_errors = ("no mesh", "two axes to replicate", "three axes", "two axes without names")
    expected = dict.fromkeys(plan_errors, "WS-PLAN") | dict.fromkeys(mesh_errors, "WS-MESH") | {"no plan": "WS-OPTION"}
    assert run_ranks(code, 2) == [expected, expected]


def test_models_that_are_parallel_already_are_refused() -> None:
    def code(rank: int) -> list[str]:
        mesh = world_mesh()
        placed = net()
        placed[0].weight = nn.Parameter(distribute_tensor(placed[0].weight.detach(), mesh, [Shard(0)]))
        wrapped = [DistributedDataParallel(net()), fully_shard(net(), mesh=mesh), placed]
        wrapped.append(nn.Sequential(DistributedDataParallel(net())))
        wrapped.append(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
        plans = (ws.Replicate(mesh), ws.FullyShard(mesh))
        return [code_of(partial(train, model, plan)) for model in wrapped for plan in plans]

    assert run_ranks(code, 2) == [["WS-WRAPPED"] * 10] * 2


def test_a_model_that_was_placed_by_one_plan_is_refused_by_another() -> None:
    def code(rank: int) -> str:
        model, mesh = net(), world_mesh()
        train(model, ws.FullyShard(mesh))
        return code_of(lambda: train(model, ws.Replicate(mesh)))

    assert run_ranks(code, 2) == ["WS-PLAN"] * 2


def test_a_mesh_for_another_device_is_refused() -> None:
    def code(rank: int) -> str:
        from wholestep.parallel.plan import check_device

        class OtherMesh:
            device_type = "cuda"

        return code_of(lambda: check_device(OtherMesh(), net(), "model"))  # type: ignore[arg-type]

    assert run_ranks(code, 1) == ["WS-MESH"]


def test_a_model_without_data_is_refused() -> None:
    def code(rank: int) -> list[str]:
        with torch.device("meta"):
            model = net()
        return [code_of(partial(train, model, plan(world_mesh()))) for plan in (ws.Replicate, ws.FullyShard)]

    for codes in run_ranks(code, 2):
        assert all(each.startswith("WS-") for each in codes)


class WritesIntoItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-1, 1)
        return self.inner(x)


class WritesThroughData(WritesIntoItself):
    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data.mul_(0.5)
        return self.inner(x)


def test_writing_into_a_gathered_parameter_is_refused() -> None:
    def code(rank: int) -> list[str]:
        kinds = (WritesIntoItself, WritesThroughData)
        return [code_of(partial(train, kind(), ws.FullyShard(world_mesh()))) for kind in kinds]

    assert run_ranks(code, 2) == [["WS-PARAM-DATA"] * 2] * 2


def test_a_hook_that_the_step_puts_on_a_sharded_parameter_is_refused() -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        handle = next(model.parameters()).register_hook(lambda grad: grad * 0.5)
        loss = train_step(model, optimizer, x)
        handle.remove()
        return loss

    assert (
        run_ranks(lambda rank: code_of(lambda: train(net(), ws.FullyShard(world_mesh()), step)), 2) == ["WS-HOOK"] * 2
    )


def test_optimizers_that_need_all_parameters_at_once_are_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(lambda: loss)
        return loss

    def code(rank: int) -> list[str]:
        found = []
        for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
            model = net()
            compiled = ws.compile(
                train_step if kind is torch.optim.SparseAdam else step, parallel=ws.FullyShard(world_mesh())
            )
            optimizer = kind(model.parameters())
            found.append(code_of(lambda c=compiled, m=model, o=optimizer: c(m, o, numbers(0, rank, 5, 6))))
        return found

    assert run_ranks(code, 2) == [["WS-OPT-CLOSURE", "WS-SHARD-OPT"]] * 2


def test_a_mode_that_acts_on_operators_is_refused_under_a_plan() -> None:
    def code(rank: int) -> list[str]:
        model = net()
        step = ws.compile(train_step, parallel=ws.Replicate(world_mesh()))
        optimizer = adamw(model)
        step(model, optimizer, numbers(0, rank, 5, 6))
        with torch.autograd.set_detect_anomaly(True):
            return [code_of(lambda: step(model, optimizer, numbers(1, rank, 5, 6)))]

    assert run_ranks(code, 2) == [["WS-UNSUPPORTED"]] * 2
