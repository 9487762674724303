from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ir.collectives import Build, comm
from ir.step_graphs import aten
from wholestep.ir import Communication, GroupSpec, InputKind, StepGraph, communication


def step_of(
    *, how: str = "avg", group: str = "1", rows: int = 4, parameter: str = "", dtype: torch.dtype = torch.float32
) -> StepGraph:
    """Gather a parameter, scatter its gradient, sum up a loss in another group."""
    build = Build()
    shard, x = build.input("shard", rows, 8, path="model.fc.weight", dtype=dtype), build.input("x", 8, dtype=dtype)
    whole = build.wait(build.gather(build.call(aten.view.default, shard, [rows, 8]), group))
    gradient = build.call(aten.mul.Tensor, whole, x)
    mine = build.wait(build.scatter(gradient, how, group, parameter=parameter))
    total = build.wait(build.reduce(build.call(aten.sum.default, mine), "sum", "other"))
    return build.finish(mine, total)


def look(step: StepGraph) -> list[Communication]:
    return communication(step.gm, step.signature)


def test_collectives_come_in_order_with_what_a_person_wants_to_know() -> None:
    step = step_of(parameter="model.fc.weight")
    groups = (GroupSpec("1", "dp", 2), GroupSpec("other", "tp", 4))
    assert [found.text for found in communication(step.gm, replace(step.signature, groups=groups))] == [
        "all_gather_into_tensor(dp of 2) of model.fc.weight: f32[4, 8] -> f32[8, 8], train.py:4 in step",
        "reduce_scatter_tensor(avg, dp of 2) of model.fc.weight: f32[8, 8] -> f32[4, 8], train.py:7 in step",
        "all_reduce(sum, tp of 4): f32[] -> f32[], train.py:10 in step",
    ]


def test_they_name_their_nodes_and_waits_are_left_out() -> None:
    step = step_of()
    nodes = {node.name: node for node in step.gm.graph.nodes}
    assert [nodes[found.node].target for found in look(step)] == [
        comm.all_gather_into_tensor.default,
        comm.reduce_scatter_tensor.default,
        comm.all_reduce.default,
    ]


@pytest.mark.parametrize(
    ("other", "first"),
    [
        (lambda: step_of(how="sum"), 1),
        (lambda: step_of(parameter="model.fc.bias"), 1),
        (lambda: step_of(rows=8), 0),
        (lambda: step_of(dtype=torch.float64), 0),
    ],
)
def test_what_differs_shows_in_the_digest_of_that_collective(other: Callable[[], StepGraph], first: int) -> None:
    pairs = zip(look(step_of()), look(other()), strict=True)
    assert [ours.digest == theirs.digest for ours, theirs in pairs].index(False) == first


def test_the_name_of_a_group_does_not_matter_but_its_number_axis_and_size_do() -> None:
    def digests(group: str, *groups: GroupSpec) -> list[str]:
        step = step_of(group=group)
        return [found.digest for found in communication(step.gm, replace(step.signature, groups=groups))]

    assert digests("1") == digests("7")
    assert digests("1", GroupSpec("1", "dp", 2)) == digests("7", GroupSpec("7", "dp", 2))
    assert digests("1", GroupSpec("1", "dp", 2)) != digests("1", GroupSpec("1", "tp", 2))
    assert digests("1", GroupSpec("1", "dp", 2)) != digests("1", GroupSpec("1", "dp", 4))
    assert digests("1")[2] != digests("other")[2], "the second group of one graph is the first of the other"


def test_names_of_nodes_lines_and_local_compute_do_not_matter() -> None:
    step, other = step_of(), step_of()
    multiplied = next(node for node in other.gm.graph.nodes if node.target is aten.mul.Tensor)
    multiplied.target = aten.add.Tensor
    for node in other.gm.graph.nodes:
        node.meta.pop("wholestep", None)
    assert [found.digest for found in look(step)] == [found.digest for found in look(other)]


def test_the_parameter_is_found_through_casts_padding_views_and_earlier_collectives() -> None:
    build = Build()
    shard = build.input("shard", 3, 2, path="model.fc.weight")
    padded = build.call(aten.constant_pad_nd.default, shard, [0, 0, 0, 1])
    cast = build.call(aten._to_copy.default, padded, dtype=torch.bfloat16)
    once = build.wait(build.gather(cast, "0"))
    twice = build.wait(build.gather(build.call(aten.slice.Tensor, once, 0, 0, 6), "1"))
    computed = build.wait(build.reduce(build.call(aten.neg.default, twice)))
    noted = build.wait(build.scatter(build.call(aten.neg.default, twice), parameter="model.fc.weight"))
    again = build.wait(build.reduce(noted))
    texts = [found.text for found in look(build.finish(computed, again))]
    assert ["of model.fc.weight:" in text for text in texts] == [True, True, False, True, True]


def test_lists_and_other_scalars_are_shown() -> None:
    build = Build()
    a, b = build.input("a", 2), build.input("b", 4)
    build.call(comm.all_reduce_coalesced.default, [a, b], "sum", "0")
    build.call(comm.all_to_all_single.default, b, [1, 3], [2, 2], "0")
    build.call(comm.broadcast.default, b, 1, group_name="0")
    texts = [found.text.split(", train.py")[0] for found in look(build.finish())]
    assert texts == [
        "all_reduce_coalesced(sum, group 0) of model.a, model.b: [f32[2], f32[4]] -> [f32[2], f32[4]]",
        "all_to_all_single(output_split_sizes=[1, 3], input_split_sizes=[2, 2], group 0) of model.b: f32[4] -> f32[4]",
        "broadcast(src=1, group 0) of model.b: f32[4] -> f32[4]",
    ]


@pytest.mark.skipif(not hasattr(comm, "isend"), reason="a torch without functional sends")
def test_messages_between_two_ranks_are_not_compared() -> None:
    build = Build()
    sent = build.call(comm.isend.default, build.input("a", 2), 1, 0, "0")
    assert look(build.finish(sent)) == []


def test_without_a_signature_inputs_go_by_the_names_of_their_placeholders() -> None:
    step = step_of()
    assert communication(step.gm)[0].text.startswith("all_gather_into_tensor(group 0 of 2) of shard:")
    assert step.signature.inputs[0].kind is InputKind.PARAMETER


def test_ten_thousand_nodes_are_looked_at_once() -> None:
    build = Build()
    node = build.input("x", 4)
    for _ in range(1_300):
        for _ in range(3):
            node = build.call(aten.view.default, node, [4])
        build.reduce(node)
        node = build.wait(build.reduce(node))
    found = look(build.finish(node))
    assert len(found) == 2_600
    assert found[-1].text.startswith("all_reduce(sum, group 0) of model.x:")
