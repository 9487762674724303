"""Meshes: HSDP, a process group instead of a mesh, one rank; and how gradients of ranks become one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import wholestep as ws
from parallel.pairs import (
    Case,
    Compiled,
    Side,
    all_of,
    apart,
    beside,
    compare,
    in_float64,
    world_mesh,
)
from ranks import run_ranks
from selection import each_now


def test_two_by_two_ranks_agree_with_fully_shard_on_the_same_mesh() -> None:
    def check(case: Case) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        both = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        both = both if case.name == "mixed" else {}
        torchs = Side(case, lambda model: fully_shard(model, mesh=mesh, **both))
        ours = Compiled(case, ws.FullyShard(mesh, **both))
        lines = beside(torchs, ours)
        expected = {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 4, "all_reduce": 4}
        return lines if ours.collectives == expected else [*lines, str(ours.collectives)]

    one_by_one = {"passes": None}
    all_of(check, [Case("plain", compile=one_by_one), Case("mixed", steps=4, compile=one_by_one)], ranks=4)


@pytest.mark.parametrize("options", [{"reduce_op": "sum"}, {"gradient_divide_factor": 3.0}])
def test_gradients_are_summed_or_divided_as_asked_for(options: dict[str, object]) -> None:
    factor = float(options.get("gradient_divide_factor", 1.0))  # type: ignore[arg-type]

    def check(case: Case) -> list[str]:
        mesh = world_mesh()

        def wrap(model: torch.nn.Module) -> torch.nn.Module:
            sharded = fully_shard(model, mesh=mesh)
            sharded.set_gradient_divide_factor(factor)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no sum of scaled addends
            return sharded

        lines = beside(Side(case, wrap), Compiled(case, ws.FullyShard(mesh, **options)))
        exact = in_float64(case)
        sharded, whole = Compiled(exact, ws.FullyShard(mesh, **options)), Compiled(exact, ws.Replicate(mesh, **options))
        sharded.run_all()
        whole.run_all()
        return lines + apart(whole, sharded, rtol=0)

    sgd = Case("SGD", optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    all_of(check, [sgd])


def test_a_process_group_is_taken_where_a_mesh_is() -> None:
    def code(rank: int) -> list[str]:
        group, lines = dist.new_group([0, 1]), []
        for plan in (ws.Replicate, ws.FullyShard):
            case = Case(plan.__name__, steps=3)
            by_mesh, by_group = Compiled(case, plan(world_mesh())), Compiled(case, plan(group))
            by_mesh.run_all()
            by_group.run_all()
            lines += apart(by_mesh, by_group, rtol=0)
        return lines

    assert run_ranks(code, 2) == [[], []]


def test_one_rank_trains_without_collectives() -> None:
    def code(rank: int) -> list[str]:
        lines = []
        for plan in (ws.Replicate, ws.FullyShard):
            case = Case(plan.__name__, steps=3)
            alone, ours = Side(case), Compiled(case, plan(world_mesh()))
            alone.run_all()
            ours.run_all()
            lines += apart(alone, ours, rtol=0)
            lines += [f"{plan.__name__}: {ours.collectives}"] * bool(ours.collectives)
        return lines

    assert run_ranks(code, 1) == [[]]


@pytest.mark.parametrize("sharded", each_now([False, True], "True"))
def test_a_mesh_of_a_part_of_the_world_trains_apart_from_the_rest(sharded: bool) -> None:
    def check(case: Case) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "dp"))["dp"]
        plan = ws.FullyShard(mesh) if sharded else ws.Replicate(mesh)
        ours = Compiled(case, plan)
        reference = Side(case, lambda model: fully_shard(model, mesh=mesh))
        if sharded:
            return compare(reference.run_all(), ours.run_all())
        reference.run_all()
        ours.run_all()
        return apart(reference, ours, rtol=0)

    all_of(check, [Case("axis", steps=4)], ranks=4)
