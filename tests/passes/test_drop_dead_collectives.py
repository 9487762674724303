"""Collectives whose results no node reads are erased, with what was computed only for them; everything else stays."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings

from ir.collectives import Build, comm
from ir.step_graphs import aten
from passes.pretend import run
from passes.random_graphs import communicating_steps
from wholestep.ir import StepGraph, verify
from wholestep.passes.redundant_collectives import drop_dead_collectives


def targets(step: StepGraph) -> list[object]:
    return [node.target for node in step.gm.graph.nodes if node.op == "call_function"]


def test_a_reduced_gradient_that_was_dropped_is_not_sent() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    scattered = build.wait(build.scatter(build.call(aten.mul.Tensor, x, 2)))
    build.wait(build.reduce(build.call(aten.neg.default, scattered), group="1"))
    step = build.finish(build.call(aten.sum.default, x))
    assert drop_dead_collectives(step.gm) == 2
    assert targets(step) == [aten.sum.default]
    verify(step)
    assert drop_dead_collectives(step.gm) == 0


def test_what_is_read_stays_with_all_its_waits() -> None:
    build = Build()
    a, b = build.input("a", 4), build.input("b", 2)
    started = build.call(comm.all_reduce_coalesced.default, [a, b], "sum", "0")
    waits = []
    for i in range(2):
        part = build.graph.call_function(operator.getitem, (started, i))
        part.meta["val"] = started.meta["val"][i]
        waits.append(build.wait(part))
    step = build.finish(build.call(aten.neg.default, waits[1]))
    assert drop_dead_collectives(step.gm) == 0
    verify(step)


def test_a_value_that_is_written_back_is_read() -> None:
    build = Build()
    p, x = build.input("p", 4), build.input("x", 4)
    build.write_back(p, build.wait(build.reduce(x)))
    assert drop_dead_collectives(build.finish().gm) == 0


def test_dead_lists_and_views_go_whole() -> None:
    build = Build()
    x = build.input("x", 4)
    started = build.call(comm.all_reduce_coalesced.default, [x, x], "sum", "0")
    part = build.graph.call_function(operator.getitem, (started, 0))
    part.meta["val"] = started.meta["val"][0]
    build.wait(build.call(aten.view.default, part, [2, 2]))
    step = build.finish(build.call(aten.neg.default, x))
    assert drop_dead_collectives(step.gm) == 1
    assert targets(step) == [aten.neg.default]


def test_random_numbers_are_drawn_as_before() -> None:
    build = Build()
    x = build.input("x", 4)
    probability = build.call(aten.sigmoid.default, x)
    build.wait(build.reduce(build.call(aten.neg.default, build.call(aten.bernoulli.default, probability))))
    step = build.finish(build.call(aten.bernoulli.default, probability))
    before = run(step)
    assert drop_dead_collectives(step.gm) == 1
    assert targets(step) == [aten.sigmoid.default, aten.bernoulli.default, aten.bernoulli.default]
    assert torch.equal(before[0][0], run(step)[0][0])


def test_in_place_collectives_stay() -> None:
    build = Build()
    x = build.input("x", 4)
    build.wait(build.call(comm.all_reduce_.default, build.call(aten.neg.default, x), "sum", "0"))
    assert drop_dead_collectives(build.finish(x).gm) == 0


@pytest.mark.skipif(not hasattr(comm, "isend"), reason="a torch without functional sends")
def test_sends_are_never_removed() -> None:
    build = Build()
    x = build.input("x", 4)
    build.wait(build.call(comm.isend.default, x, 1, 0, "0"))
    assert drop_dead_collectives(build.finish(x).gm) == 0


@settings(max_examples=100, deadline=None)
@given(communicating_steps())
def test_any_step_computes_the_same(step: StepGraph) -> None:
    before = run(step)
    dropped = drop_dead_collectives(step.gm)
    verify(step)
    after = run(step)
    assert len(before[2]) - len(after[2]) == dropped
    for old, new in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert torch.equal(old, new)
    assert drop_dead_collectives(step.gm) == 0
    for node in step.gm.graph.find_nodes(op="call_function", target=comm.all_gather_into_tensor.default):
        assert any(wait.users for wait in node.users)


def test_ten_thousand_nodes() -> None:
    build = Build()
    x = node = build.input("x", 4)
    for _ in range(3_400):
        node = build.call(aten.neg.default, build.wait(build.reduce(node)))
    step = build.finish(x)
    assert len(step.gm.graph.nodes) > 10_000
    for unread in reversed(list(step.gm.graph.nodes)):
        if unread.target is aten.neg.default and not unread.users:
            step.gm.graph.erase_node(unread)
    assert drop_dead_collectives(step.gm) == 3_400
    assert targets(step) == []
