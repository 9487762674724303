"""Collectives however they are written: arguments by keyword, metadata of ShapeProp, none at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from ir.collectives import comm
from passes.pretend import Pretend
from wholestep.errors import PassError
from wholestep.ir.effects import is_collective
from wholestep.passes import applied_passes, comm_fusion_with_concat, schedule_comm_wait
from wholestep.passes.engine.manager import apply_pass
from wholestep.passes.plain_collectives import arguments_by_position


def reductions(how: list[str], form: str) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(how))]
    started = []
    for x, op in zip(inputs, how, strict=True):
        rest: dict[str, Any] = {"reduce_op": op, "group_name": "0"}
        args, kwargs = {
            "by position": ((x, op, "0"), {}),
            "some by keyword": ((x,), rest),
            "all by keyword": ((), {"input": x, **rest}),
        }[form]
        started.append(graph.call_function(comm.all_reduce.default, args, kwargs))
    waits = [
        graph.call_function(comm.wait_tensor.default, (), {"tensor": node})
        if form == "all by keyword"
        else graph.call_function(comm.wait_tensor.default, (node,))
        for node in started
    ]
    graph.output(tuple(waits))
    return fx.GraphModule(nn.Module(), graph)


def with_values(gm: fx.GraphModule) -> fx.GraphModule:
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(3, device="meta")
    return gm


def started(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    return [node.args[1:] for node in gm.graph.nodes if is_collective(node.target)]


@pytest.mark.parametrize("form", ["by position", "some by keyword", "all by keyword"])
def test_arguments_by_keyword_are_arguments(form: str) -> None:
    gm = with_values(reductions(["sum", "max", "sum", "max"], form))
    apply_pass(comm_fusion_with_concat, gm, (), {}, level=3)
    assert sorted(started(gm)) == [("max", "0"), ("sum", "0")]
    apply_pass(schedule_comm_wait, gm, (), {}, level=3)
    given = [torch.randn(3) for _ in range(4)]
    plain = with_values(reductions(["sum", "max", "sum", "max"], "by position"))
    expected = Pretend(plain).run(*copy.deepcopy(given))
    assert all(map(torch.equal, Pretend(gm).run(*given), expected))


def test_arguments_come_in_the_order_of_the_schema_up_to_the_last_one_given() -> None:
    op = torch.ops.aten.add.Tensor
    assert arguments_by_position(op, (1,), {"other": 2}) == (1, 2)
    assert arguments_by_position(torch.ops.aten.sum.dim_IntList, (1,), {"keepdim": True, "dim": [0]}) == (1, [0], True)
    assert arguments_by_position(op, (1, 2), {}) == (1, 2)


def test_what_shape_prop_noted_is_enough_to_bucket() -> None:
    gm = reductions(["sum", "sum"], "by position")
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert "val" not in node.meta
    _RunAlone(gm).propagate(torch.ones(3), torch.ones(3))
    comm_fusion_with_concat(gm)
    assert len(started(gm)) == 1


class _RunAlone(ShapeProp):
    """As if there were one rank, without a process group."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (comm.all_reduce.default, comm.wait_tensor.default):
            return args[0].clone()
        return super().call_function(target, args, kwargs)


def test_collectives_of_unknown_size_are_refused_by_name_and_the_pass_is_not_noted() -> None:
    gm = reductions(["sum", "sum"], "by position")
    with pytest.raises(
        PassError, match="x0 has no `val`: what all_reduce_default communicates has no known size"
    ) as info:
        comm_fusion_with_concat(gm)
    assert "FakeTensorProp" in info.value.fix
    assert "fault of the pass" not in str(info.value)
    assert applied_passes(gm) == ()
    alone = reductions(["sum"], "by position")
    comm_fusion_with_concat(alone)
    assert len(started(alone)) == 1
