from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ir.collectives import Build, comm
from ir.step_graphs import aten, sgd_step
from ranks import run_ranks
from wholestep.ir import GroupSpec, StepGraph, group_table, node_digests, rebind_groups
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.groups import group_of, renamed_groups


def two_axes(dp: str, tp: str) -> StepGraph:
    build = Build()
    shard = build.input("shard", 4, 2)
    whole = build.wait(build.gather(shard, dp))
    total = build.wait(build.call(comm.all_reduce.default, whole, "sum", group_name=tp))
    mine = build.wait(build.scatter(total, "avg", dp))
    step = build.finish(mine)
    groups = group_table(step.gm, {dp: "dp", tp: "tp"})
    step.signature = replace(step.signature, groups=groups)
    return step


def test_groups_come_in_the_order_of_first_appearance_with_the_size_that_a_collective_states() -> None:
    assert two_axes("3", "1").signature.groups == (GroupSpec("3", "dp", 2), GroupSpec("1", "tp", 0))
    assert group_table(two_axes("3", "1").gm) == (GroupSpec("3", "", 2), GroupSpec("1", "", 0))


def test_a_graph_without_communication_has_none() -> None:
    assert group_table(sgd_step().gm) == ()


def test_ranks_that_name_their_groups_differently_agree() -> None:
    rank0, rank1, crossed = two_axes("1", "3"), two_axes("2", "3"), two_axes("3", "1")
    assert rank0.fingerprint() == rank1.fingerprint() == crossed.fingerprint()
    assert node_digests(rank0.gm) == node_digests(rank1.gm) == node_digests(crossed.gm)
    assert rank0.to_json() != rank1.to_json(), "a file keeps the names"


def test_a_graph_from_another_rank_is_bound_to_the_groups_of_this_one() -> None:
    theirs, ours = StepGraph.from_json(two_axes("1", "2").to_json()), two_axes("2", "1")
    theirs.rebind_groups({"1": "2", "2": "1"})
    assert theirs.signature == ours.signature
    assert [group_of(node) for node in theirs.gm.graph.nodes] == [group_of(node) for node in ours.gm.graph.nodes]
    assert theirs.gm.code == ours.gm.code
    assert theirs.to_json() == ours.to_json()


def test_names_that_a_rebinding_does_not_mention_stay() -> None:
    step = two_axes("1", "2")
    assert rebind_groups(step.gm, {"2": "5", "9": "1"}) == 1
    assert renamed_groups(step.signature.groups, {"2": "5"}) == (GroupSpec("1", "dp", 2), GroupSpec("5", "tp", 0))
    assert [spec.name for spec in group_table(step.gm)] == ["1", "5"]


def test_a_printed_graph_says_which_group_is_which() -> None:
    text = two_axes("3", "1").print_readable(print_output=False)
    assert "; groups: '3' is dp of 2, '1' is tp of ?\n" in text


@pytest.mark.parametrize("namespace", [comm, torch.ops._dtensor, torch.ops._c10d_functional_autograd], ids=str)
def test_every_operator_of_torch_that_communicates_says_in_which_group(namespace: object) -> None:
    others = {"wait_tensor", "_wrap_tensor_autograd"}
    found = 0
    for name in sorted({*dir(namespace), "all_reduce_", "broadcast_", "reduce_scatter_tensor_coalesced"} - others):
        packet = getattr(namespace, name, None)
        if name.startswith("__") or inspect.ismethod(packet) or not hasattr(packet, "overloads"):
            continue
        graph = Build().graph
        op = packet.default
        arguments = [f"the {argument.name}" for argument in op._schema.arguments]
        assert group_of(graph.call_function(op, tuple(arguments))) == "the group_name", op
        assert group_of(graph.call_function(op, (), {"group_name": "by keyword"})) == "by keyword", op
        found += 1
    assert found >= 3 or namespace is not comm


def test_a_collective_that_writes_to_copies_is_seen() -> None:
    build = Build()
    x = build.input("x", 2)
    node = build.graph.call_function(call_on_copies, (comm.all_reduce_.default, (0,), x, "sum", "4"))
    assert group_of(node) == "4"
    assert group_of(build.call(aten.neg.default, x)) is None


def test_the_groups_of_a_mesh_have_their_real_sizes_on_every_rank() -> None:
    def code(rank: int) -> tuple[str, list[str], list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        names = {axis: mesh.get_group(axis).group_name for axis in ("dp", "tp")}
        step = two_axes(names["dp"], names["tp"])
        return step.fingerprint(), list(names.values()), [spec.size for spec in step.signature.groups]

    ranks = run_ranks(code, 4)
    assert len({str(names) for _, names, _ in ranks}) > 1, "the names differ, or this tests nothing"
    assert len({fingerprint for fingerprint, _, _ in ranks}) == 1
    assert all(sizes == [2, 2] for _, _, sizes in ranks)
    assert not dist.is_initialized()
