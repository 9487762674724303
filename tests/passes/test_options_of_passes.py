"""Options, names and order of passes: what is wrong is said when it is written, not when a graph is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.errors import OptionError, PassError, PassOrderError
from wholestep.passes import (
    applied_passes,
    comm_fusion_with_concat,
    graph_optimization_pass,
    iter_move_grads_and_optimizers,
    run_passes,
    schedule_comm_wait,
)
from wholestep.passes.engine.registry import DEFAULT, known_passes, resolve

aten = torch.ops.aten


def step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def traced() -> fx.GraphModule:
    gm: fx.GraphModule = make_fx(step, tracing_mode="fake")(torch.ones(2))
    return gm


def test_an_order_that_cannot_be_is_refused_by_compile() -> None:
    with pytest.raises(PassOrderError, match="are the prerequisites of schedule_comm_wait"):
        ws.compile(step, passes=["schedule_comm_wait", "comm_fusion_with_concat"])
    with pytest.raises(PassOrderError, match="are the prerequisites of schedule_comm_wait"):
        ws.compile(step, passes="default", disable_passes=["comm_fusion_with_concat"])
    with pytest.raises(PassOrderError, match="already ran"):
        ws.compile(step, passes=["default", "comm_fusion_with_concat"])


def test_options_that_a_pass_does_not_take_are_refused_where_they_are_written() -> None:
    with pytest.raises(
        OptionError, match=r"comm_fusion_with_concat: got an unexpected keyword argument .bucket_size."
    ) as info:
        comm_fusion_with_concat(bucket_size=3)
    assert "bucket_size_mb" in info.value.fix
    with pytest.raises(OptionError, match="too many positional"):
        schedule_comm_wait(1, 2, 3)
    with pytest.raises(OptionError, match="bucket_size_mb=-3"):
        comm_fusion_with_concat(bucket_size_mb=-3)
    with pytest.raises(OptionError, match="bucket_size_mb=-3"):
        comm_fusion_with_concat(traced(), -3)


def test_a_pass_that_needs_options_says_which() -> None:
    with pytest.raises(
        OptionError, match=r"iter_move_grads_and_optimizers: missing a required argument: .target_comm_node."
    ):
        ws.compile(step, passes=[iter_move_grads_and_optimizers])
    bound = iter_move_grads_and_optimizers(target_comm_node="a", target_dest_node="b")
    assert repr(bound) == "iter_move_grads_and_optimizers(target_comm_node='a', target_dest_node='b')"


def test_every_pass_of_ours_is_known_by_name() -> None:
    found = {value.name for value in vars(ws.passes).values() if isinstance(value, ws.passes.GraphPass)}
    assert found - {"iter_move_grads_and_optimizers"} == set(known_passes())  # which has to know what to move


def test_the_default_list_can_be_part_of_a_list() -> None:
    names = [each.name for each in resolve(["default", "overlap_optimizer_with_next_forward"])]
    assert names == [*(each.name for each in DEFAULT), "overlap_optimizer_with_next_forward"]


def test_passes_are_run_by_name() -> None:
    gm = traced()
    run_passes(gm, "default")
    assert applied_passes(gm) == tuple(each.name for each in DEFAULT)
    run_passes(gm, ["remove_dead_collectives"])
    assert applied_passes(gm)[-1] == "remove_dead_collectives"


@graph_optimization_pass(numerics="exact")
def doubles(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.args = (node.args[0], 2)


def test_a_direct_call_is_verified_at_the_level_that_is_asked_for() -> None:
    with pytest.raises(PassError, match="other values"):
        doubles(traced(), verify=3)
    with pytest.raises(PassError, match="other values"):
        doubles(verify=3)(traced())
    with pytest.raises(PassError, match="other values"):
        run_passes(traced(), [doubles(verify=3)])
    doubles(traced())
    run_passes(traced(), [doubles(verify=1)], level=3)


def test_verify_is_an_option_like_any_other_where_a_pass_has_one() -> None:
    got: list[Any] = []

    @graph_optimization_pass()
    def own(gm: fx.GraphModule, verify: str = "") -> None:
        got.append(verify)

    own(traced(), verify="carefully")
    assert got == ["carefully"]


def test_a_graph_by_keyword_is_a_graph() -> None:
    gm = traced()
    comm_fusion_with_concat(gm=gm, bucket_size_mb=5)
    assert applied_passes(gm) == ("comm_fusion_with_concat",)
    with pytest.raises(OptionError, match="got an object of type Linear"):
        comm_fusion_with_concat(gm=nn.Linear(2, 2))


def test_one_prerequisite_need_not_be_a_list() -> None:
    for given in ("comm_fusion_with_concat", comm_fusion_with_concat):
        declare = graph_optimization_pass(prerequisites=given)  # type: ignore[call-overload]
        assert declare(lambda gm: None).contract.prerequisites == ("comm_fusion_with_concat",)


def test_a_pass_may_be_declared_without_brackets() -> None:
    @graph_optimization_pass
    def plain(gm: fx.GraphModule) -> None:
        """Nothing."""

    gm = traced()
    plain(gm)
    assert applied_passes(gm) == ("plain",)


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError])
def test_a_bug_in_a_pass_arrives_with_the_name_of_the_pass(kind: type[Exception]) -> None:
    @graph_optimization_pass()
    def buggy(gm: fx.GraphModule) -> None:
        raise kind("3 is not in list")

    with pytest.raises(PassError, match=rf"buggy raised {kind.__name__}: '?3 is not in list"):
        buggy(traced())
