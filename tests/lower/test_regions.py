"""Which nodes become regions, and the order of execution: random graphs compute the same, collectives stay in place."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lower.graphs import aten, graph_of, interpreted, report, run_graph
from wholestep.ir.effects import is_communication
from wholestep.lower import LowerOptions, partial_lower, plan_regions
from wholestep.lower.compiled_region import RegionCache
from wholestep.lower.regions import Region, RegionPlan, is_free

__all__ = ["interpreted"]

UNARY = (aten.cos.default, aten.neg.default, aten.abs.default, aten.sin.default)
VIEWS = ((aten.t.default,), (aten.view.default, [2, 2]), (aten.slice.Tensor, 0, 0, 2), (aten.expand.default, [2, 2]))
reduce_ = torch.ops._c10d_functional.all_reduce.default
wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Drawn:
    gm: fx.GraphModule
    refused: frozenset[str]
    smallest: int

    def accepts(self, node: fx.Node) -> bool:
        return node.name not in self.refused


@st.composite
def drawn_graphs(draw: st.DrawFn, communicates: bool = False, writes: bool = False) -> Drawn:
    """Operators, views, splits and random draws; with collectives, or with writes into values."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        fake = torch.empty(2, 2)
    values: list[fx.Node] = []
    pending: list[fx.Node] = []
    owned: list[fx.Node] = []

    def add(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            value = fake if is_communication(target) else target(*fx.map_arg(args, lambda n: n.meta["val"]))
        node.meta["val"] = value
        return node

    for i in range(draw(st.integers(1, 3))):
        values.append(graph.placeholder(f"x{i}"))
        values[-1].meta["val"] = fake
    inputs = len(values)
    kinds = ["unary", "binary", "unary", "binary", "view", "split", "draw"]
    kinds += ["reduce", "wait"] * communicates + ["write"] * 2 * writes
    for _ in range(draw(st.integers(1, 24))):
        pick = st.sampled_from(values[-7:])
        kind = draw(st.sampled_from(kinds))
        if kind == "wait" and pending:
            values.append(add(wait, pending.pop(0)))
        elif kind == "reduce":
            pending.append(add(reduce_, draw(pick), "sum", "0"))
        elif kind == "write" and owned:
            values.append(add(aten.add_.Tensor, draw(st.sampled_from(owned[-5:])), draw(pick)))
        elif kind == "view":
            target, *args = draw(st.sampled_from(VIEWS))
            values.append(add(target, draw(pick), *args))
        elif kind == "split":
            made = add(aten.split.Tensor, draw(pick), 1)
            parts = [add(operator.getitem, made, i) for i in range(2)]
            values.append(add(aten.cat.default, parts))
        elif kind == "draw":
            values.append(add(aten.rand_like.default, draw(pick)))
        elif kind == "binary":
            values.append(add(aten.add.Tensor, draw(pick), draw(pick)))
            owned.append(values[-1])
        else:
            values.append(add(draw(st.sampled_from(UNARY)), draw(pick)))
            owned.append(values[-1])
    values += [add(wait, node) for node in pending]
    graph.output(tuple(values[inputs:]))
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    refused = draw(st.sets(st.sampled_from(names), max_size=len(names) // 2)) if names else set()
    gm = fx.GraphModule(torch.nn.Module(), graph)
    return Drawn(gm, frozenset(refused), draw(st.integers(1, 4)))


def order_of_plan(plan: RegionPlan) -> list[fx.Node]:
    return [node for group in plan.groups for node in group.nodes] + plan.tail


@given(drawn_graphs(communicates=True))
def test_no_collective_waits_for_more_than_before(drawn: Drawn) -> None:
    plan = plan_regions(drawn.gm.graph, drawn.accepts, min_aten_ops=drawn.smallest)
    before = [node for node in drawn.gm.graph.nodes if node.op == "call_function"]
    after = order_of_plan(plan)
    assert set(after) == set(before)
    assert len(after) == len(before)
    for node in before:
        if is_communication(node.target):
            earlier = set(before[: before.index(node)])
            now = {n for n in after[: after.index(node)] if n.target is not operator.getitem}
            assert now <= earlier
    sent = [node for node in before if is_communication(node.target)]
    assert [node for node in after if is_communication(node.target)] == sent


@given(drawn_graphs(communicates=True))
def test_regions_have_no_collectives_and_run_after_what_they_read(drawn: Drawn) -> None:
    plan = plan_regions(drawn.gm.graph, drawn.accepts, min_aten_ops=drawn.smallest)
    done = set(drawn.gm.graph.find_nodes(op="placeholder"))
    for group in plan.groups:
        if isinstance(group, Region):
            assert not any(is_communication(node.target) for node in group.nodes)
            assert group.operators >= drawn.smallest
            assert set(group.inputs) <= done
            assert not any(is_free(node) for node in (*group.inputs, *group.outputs))
        done |= set(group.nodes)


@given(drawn_graphs())
def test_random_ops_keep_their_order(drawn: Drawn) -> None:
    plan = plan_regions(drawn.gm.graph, drawn.accepts, min_aten_ops=drawn.smallest)
    draws = list(drawn.gm.graph.find_nodes(op="call_function", target=aten.rand_like.default))
    assert [node for node in order_of_plan(plan) if node.target is aten.rand_like.default] == draws


def _assert_computes_the_same(drawn: Drawn) -> None:
    original = copy.deepcopy(drawn.gm)
    with mock.patch("wholestep.lower.compiled_region.compile_inductor", run_graph):
        options = LowerOptions(min_aten_ops=drawn.smallest, strict=True)
        partial_lower(drawn.gm, drawn.accepts, options=options)
    inputs = [torch.randn(2, 2) for _ in original.graph.find_nodes(op="placeholder")]
    copies = [value.clone() for value in inputs]
    torch.manual_seed(7)
    try:
        expected = original(*inputs)
    except RuntimeError as error:
        assume("single memory location" not in str(error))  # eager refuses to add a tensor to its own transpose
        raise
    torch.manual_seed(7)
    actual = drawn.gm(*copies)
    for got, want in zip((*actual, *copies), (*expected, *inputs), strict=True):
        assert torch.equal(got, want)


@given(drawn_graphs())
def test_a_lowered_graph_computes_what_it_did(drawn: Drawn) -> None:
    _assert_computes_the_same(drawn)


@given(drawn_graphs(writes=True))
def test_a_lowered_graph_with_writes_computes_what_it_did(drawn: Drawn) -> None:
    _assert_computes_the_same(drawn)


def test_nodes_outside_run_first_so_that_the_rest_is_one_region() -> None:
    nodes = {
        "a": (aten.neg.default, "x"),
        "outside": (aten.sin.default, "x"),
        "b": (aten.add.Tensor, "a", "outside"),
        "c": (aten.exp.default, "b"),
    }
    gm = graph_of(nodes, x=torch.ones(3))
    plan = plan_regions(gm.graph, lambda node: node.target is not aten.sin.default, min_aten_ops=1)
    assert [[node.target for node in group.nodes] for group in plan.groups] == [
        [aten.sin.default],
        [aten.neg.default, aten.add.Tensor, aten.exp.default],
    ]


@pytest.mark.usefixtures("interpreted")
def test_only_whole_tensors_cross_the_boundary_of_a_region() -> None:
    nodes = {
        "turned": (aten.t.default, "x"),
        "a": (aten.add.Tensor, "turned", "turned"),
        "outside": (aten.sin.default, "turned"),
        "back": (aten.t.default, "outside"),
        "b": (aten.exp.default, "back"),
    }
    gm = graph_of(nodes, x=torch.randn(2, 3))
    options = LowerOptions(min_aten_ops=1, strict=True)
    original = copy.deepcopy(gm)
    partial_lower(gm, lambda node: node.target is not aten.sin.default, options=options)
    x = torch.randn(2, 3)
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    assert all(not is_free(source) for call in calls for source in call.args)
    for got, want in zip(gm(x), original(x), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


@pytest.mark.fake_group
@pytest.mark.usefixtures("interpreted")
def test_equal_layers_between_collectives_are_compiled_once() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:

        def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                h = (x @ weight).relu() * 2
                x = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(h, "sum", "0")) + x
            return x

        inputs = (torch.randn(4, 4), torch.randn(4, 4))
        gm = make_fx(layers, tracing_mode="fake")(*inputs)
        cache = RegionCache()
        partial_lower(gm, options=LowerOptions(min_aten_ops=1, strict=True), cache=cache)
        targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        assert targets.count(reduce_) == targets.count(wait) == 8
        found = report(gm)
        assert len(found.regions) == 9
        assert {reason for _, _, reason in found.outside} == {"communicates between ranks"}
        assert cache.hits == 6  # the first has no sum before it, the last nothing behind it
        torch.testing.assert_close(gm(*inputs), layers(*inputs))
    finally:
        dist.destroy_process_group()
