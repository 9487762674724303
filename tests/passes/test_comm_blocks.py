"""Blocks are found by operator and data flow, for every functional collective, wherever its wait is."""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any

import pytest
import torch
from torch import fx

from ir.collectives import Build, comm
from ir.step_graphs import aten
from wholestep.errors import WholestepError
from wholestep.passes.comm_blocks import get_all_comm_blocks, get_comm_block


class CommType(str, Enum):  # noqa: UP042 (as in the old API)
    ALLREDUCE = "allreduce_"
    ALLGATHER = "allgather_"
    REDUCESCATTER = "reduce_scatter_"


def everything() -> tuple[Build, dict[str, fx.Node]]:
    build = Build()
    x = build.input("x", 4, 2)
    started = {
        "all_reduce": build.reduce(x),
        "all_gather_into_tensor": build.gather(x),
        "reduce_scatter_tensor": build.scatter(x),
        "broadcast": build.call(comm.broadcast.default, x, 0, "0"),
        "all_to_all_single": build.call(comm.all_to_all_single.default, x, [2, 2], [2, 2], "0"),
    }
    return build, started


def element(build: Build, source: fx.Node, index: int) -> fx.Node:
    node = build.graph.call_function(operator.getitem, (source, index))
    node.meta["val"] = source.meta["val"][index]
    return node


def test_a_block_has_inputs_waits_views_and_outputs() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    started = build.reduce(x)
    far = x
    for _ in range(50):
        far = build.call(aten.neg.default, far)
    done = build.wait(started)
    flat = build.call(aten.view.default, done, [-1])
    half = build.call(aten.slice.Tensor, flat, 0, 0, 4)
    used = build.call(aten.neg.default, half)
    step = build.finish(used, far)
    block = get_comm_block(started)
    assert block.comm_node is started
    assert block.shape == torch.Size([4, 2])
    assert block.inputs == [x]
    assert block.wait_nodes == [done]
    assert block.node_list == [started, done, flat, half]
    assert block.outputs == {half}
    assert [b.comm_node for b in get_all_comm_blocks(step.gm, "all_reduce")] == [started]


def test_a_node_that_is_read_and_has_views_is_an_output_and_its_views_are_in_the_block() -> None:
    build = Build()
    done = build.wait(build.reduce(build.input("x", 4, 2)))
    read = build.call(aten.neg.default, done)
    view = build.call(aten.view.default, done, [-1])
    step = build.finish(read, build.call(aten.neg.default, view), done)
    block = get_all_comm_blocks(step.gm, ("all_reduce",))[0]
    assert block.outputs == {done, view}
    assert view in block.node_list


def test_every_functional_collective_has_a_block() -> None:
    build, started = everything()
    step = build.finish(*[build.call(aten.neg.default, build.wait(each)) for each in started.values()])
    for name, node in started.items():
        assert [block.comm_node for block in get_all_comm_blocks(step.gm, name)] == [node]
    found = get_all_comm_blocks(step.gm, tuple(started))
    assert [block.comm_node for block in found] == list(started.values())


def test_coalesced_collectives_are_one_block_with_all_their_parts() -> None:
    build = Build()
    a, b = build.input("a", 4), build.input("b", 2)
    started = build.call(comm.all_reduce_coalesced.default, [a, b, a], "sum", "0")
    parts = [element(build, started, i) for i in range(3)]
    waits = [build.wait(part) for part in parts]
    step = build.finish(*[build.call(aten.neg.default, wait) for wait in waits])
    (block,) = get_all_comm_blocks(step.gm, "all_reduce")
    assert block.inputs == [a, b, a]
    assert block.shape == torch.Size([4])
    assert set(block.wait_nodes) == block.outputs == set(waits)
    assert set(block.node_list) == {started, *parts, *waits}


@pytest.mark.parametrize(
    "wanted",
    ["all_reduce", CommType.ALLREDUCE, "allreduce_", comm.all_reduce.default, comm.all_reduce, [comm.all_reduce]],
)
def test_collectives_are_named_by_prefix_by_the_old_types_or_by_operator(wanted: Any) -> None:
    build, started = everything()
    step = build.finish(*[build.wait(each) for each in started.values()])
    assert [block.comm_node for block in get_all_comm_blocks(step.gm, wanted)] == [started["all_reduce"]]


def test_the_old_types_name_the_other_collectives_too() -> None:
    build, started = everything()
    step = build.finish(*[build.wait(each) for each in started.values()])
    found = get_all_comm_blocks(step.gm, (CommType.ALLGATHER, CommType.REDUCESCATTER))
    assert [b.comm_node for b in found] == [started["all_gather_into_tensor"], started["reduce_scatter_tensor"]]


def test_a_node_that_is_only_called_like_a_collective_is_none() -> None:
    build = Build()
    x = build.input("x", 4)
    node = build.call(aten.neg.default, x)
    node._rename("all_reduce_1")
    assert get_all_comm_blocks(build.finish(node).gm, "all_reduce") == []


def test_a_collective_without_a_wait_raises_and_says_which() -> None:
    build = Build()
    started = build.reduce(build.input("x", 4))
    gm = build.finish(build.call(aten.neg.default, started)).gm
    with pytest.raises(RuntimeError, match=f"{started.name} has no wait") as raised:
        get_all_comm_blocks(gm, "all_reduce")
    assert isinstance(raised.value, WholestepError)
    with pytest.raises(RuntimeError, match="is not a collective"):
        get_comm_block(started.args[0])  # type: ignore[arg-type]


def test_a_collective_that_leaves_the_graph_under_way_has_no_block_and_the_others_have() -> None:
    build = Build()
    leaves, stays = build.reduce(build.input("x", 4)), build.reduce(build.input("y", 4))
    gm = build.finish(leaves, build.wait(stays)).gm
    assert [block.comm_node for block in get_all_comm_blocks(gm, "all_reduce")] == [stays]
    with pytest.raises(RuntimeError, match=f"{leaves.name} has no wait"):
        get_comm_block(leaves)


def test_shapes_may_be_symbolic_or_unknown() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: comm.wait_tensor(comm.all_reduce(x * 2, "sum", "0")).neg(), tracing_mode="symbolic")(
        torch.randn(6, 2)
    )
    (block,) = get_all_comm_blocks(gm, "all_reduce")
    assert block.shape is not None
    assert isinstance(block.shape[0], torch.SymInt)
    for node in gm.graph.nodes:
        node.meta.clear()
    assert get_all_comm_blocks(gm, "all_reduce")[0].shape is None


def test_ten_thousand_nodes() -> None:
    build = Build()
    node = build.input("x", 4)
    for _ in range(2_500):
        node = build.call(aten.neg.default, build.call(aten.view.default, build.wait(build.reduce(node)), [4]))
    step = build.finish(node)
    assert len(step.gm.graph.nodes) > 10_000
    assert len(get_all_comm_blocks(step.gm, "all_reduce")) == 2_500
