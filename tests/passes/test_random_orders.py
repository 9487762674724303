"""Passes in any order that their contracts allow compute what the step computed; other orders change nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx

from ir.collectives import Build
from ir.step_graphs import aten
from passes.captured_steps import NAMES, four_ranks, fresh
from passes.pretend import run
from passes.random_graphs import communicating_steps
from selection import each_now
from wholestep.errors import IterMoveError, OptionError, PassError, PassOrderError
from wholestep.ir import StepGraph
from wholestep.ir.effects import is_collective
from wholestep.passes import (
    GraphPass,
    applied_passes,
    bucket_all_gather,
    bucket_reduce_scatter,
    collective_matmul,
    comm_fusion_with_concat,
    functionalize_optimizer,
    graph_optimization_pass,
    iter_move_grads_and_optimizers,
    merge_common_subexpressions,
    overlap_communication,
    overlap_optimizer_with_next_forward,
    reinplace_tail,
    remove_copy_from_optimizer,
    remove_dead_collectives,
    remove_duplicate_collectives,
    run_passes,
    schedule_comm_wait,
)
from wholestep.passes.engine.manager import apply_pass
from wholestep.passes.engine.registry import DEFAULT, known_passes
from wholestep.passes.engine.replay import Replay

pytestmark = pytest.mark.fake_group

BUCKETING = (comm_fusion_with_concat, bucket_reduce_scatter, bucket_all_gather)
PASSES: tuple[GraphPass, ...] = (
    *BUCKETING,
    schedule_comm_wait,
    functionalize_optimizer,
    remove_copy_from_optimizer,
    merge_common_subexpressions,
    remove_duplicate_collectives,
    remove_dead_collectives,
    collective_matmul,
    overlap_communication,
    overlap_optimizer_with_next_forward,
    iter_move_grads_and_optimizers,
)
BY_NAME = {each.name: each for each in PASSES}
MIB = st.sampled_from([1e-6, 2e-5, 1e-4, 4e-4, 25.0])

Order = list[tuple[GraphPass, float, int]]
"""Passes, the size of a bucket, and a number to choose nodes by."""

quick = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
"""A graph that fails shrinks for minutes and does not become readable."""

orders = st.lists(st.tuples(st.sampled_from(PASSES), MIB, st.integers(0, 1 << 16)), min_size=1, max_size=7)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with four_ranks():
        yield


def test_every_pass_that_has_a_name_is_among_them() -> None:
    assert set(known_passes()) - {"reinplace_tail", "chunk_head", "fuse_loss"} <= set(BY_NAME)
    # The first ends the form that others need, and the other two are compared with float64 in tests of their own.


def may_run(given_pass: GraphPass, done: list[str]) -> bool:
    """What the contracts say, once more and in other words."""
    contract = given_pass.contract
    if not set(contract.prerequisites) <= set(done):
        return False
    if any(contract.name in BY_NAME[name].contract.apply_after for name in done):
        return False
    return contract.allow_rerun or contract.name not in done


def seen(step: StepGraph) -> tuple[Any, ...]:
    """Everything about a graph that a refused pass must leave."""
    nodes = [
        (n.op, n.name, str(n.target), str(n.args), str(n.kwargs), str(sorted(n.meta.items())))
        for n in step.gm.graph.nodes
    ]
    return nodes, step.signature, applied_passes(step.gm), dict(step.gm.meta)


def arguments(given_pass: GraphPass, step: StepGraph, size: float, number: int) -> tuple[Any, ...]:
    if given_pass in BUCKETING:
        return (size,)
    if given_pass is not iter_move_grads_and_optimizers:
        return ()
    nodes = [n for n in step.gm.graph.nodes if n.op == "call_function"]
    started = [n.name for n in nodes if is_collective(n.target)] or ["none"]
    early = [n.name for n in nodes[: max(1, len(nodes) // 3)]] or ["none"]
    return started[number % len(started)], early[number // 7 % len(early)]


def in_order(step: StepGraph, order: Order) -> list[str]:
    """Run what may run at level 3; what may not raises. Returns the names of what ran."""
    always = applied_passes(step.gm)  # those that run on every captured graph
    done: list[str] = []
    for each, size, number in order:
        before = seen(step)
        args = arguments(each, step, size, number)
        if not may_run(each, done):
            with pytest.raises(PassOrderError, match=r"are the prerequisites of|must be applied after|already ran"):
                apply_pass(each, step, args, {}, level=3)
            assert seen(step) == before
            continue
        try:
            apply_pass(each, step, args, {}, level=3)
        except (IterMoveError, ValueError) as error:
            if each is not iter_move_grads_and_optimizers or isinstance(error, PassError):
                raise
            assert seen(step) == before  # nodes chosen at random
            continue
        done.append(each.name)
        step.verify(2)
    assert applied_passes(step.gm) == (*always, *done)
    return done


def check_tail(step: StepGraph) -> None:
    """The last pass of all: refused on a StepGraph, exact on its graph module."""
    before = seen(step)
    with pytest.raises(OptionError, match="ends the normal form"):
        apply_pass(reinplace_tail, step, (), {}, level=2)
    assert seen(step) == before
    apply_pass(reinplace_tail, step.gm, (), {}, level=3)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@settings(quick, max_examples=15)
@given(step=communicating_steps(), order=orders)
def test_random_steps_in_random_orders(step: StepGraph, order: Order) -> None:
    results, inputs, issued = run(step)
    in_order(step, order)
    now, inputs_now, issued_now = run(step)
    assert same(results, now)
    assert same(inputs, inputs_now)
    assert len(issued_now) <= len(issued)
    check_tail(step)


@st.composite
def updating_steps(draw: st.DrawFn) -> StepGraph:
    """Gathered or whole parameters, gradients that depend on each other's reductions or not, and one optimizer."""
    build, flip, group = Build(), st.booleans(), st.sampled_from("01")
    sizes = draw(st.lists(st.sampled_from([0, 2, 6, 16]), min_size=1, max_size=7))
    dtypes = [torch.float64 if draw(flip) else torch.float32 for _ in sizes]
    described = list(enumerate(zip(sizes, dtypes, strict=True)))
    params = [build.input(f"p{i}", n, 3, dtype=dtype) for i, (n, dtype) in described]
    moments = [build.input(f"m{i}", n, 3, dtype=dtype) for i, (n, dtype) in described]
    shards, values, grads = draw(flip), list(params), []
    if shards:
        values = [build.wait(build.gather(p, draw(group), parameter=p.name)) for p in params]
    loss = build.call(aten.sum.default, values[0])
    for value in reversed(values):
        grad = build.call(aten.mul.Tensor, value, 1.5)
        if grads and draw(st.integers(0, 3)) == 0:
            earlier = build.call(aten.sum.default, draw(st.sampled_from(grads)))
            grad = build.call(aten.add.Tensor, grad, earlier)
        start = build.scatter if shards else build.reduce
        grads.insert(0, build.wait(start(grad, draw(st.sampled_from(["sum", "avg"])), draw(group))))
    news = one_by_one(build, params, moments, grads) if draw(flip) else by_lists(build, params, moments, grads)
    for target, new in news:
        build.write_back(target, new)
    return build.finish(*([loss] if draw(flip) else [loss, grads[0]]))


Updates = list[tuple[fx.Node, fx.Node]]
"""An input and its new value."""


def one_by_one(build: Build, params: list[fx.Node], moments: list[fx.Node], grads: list[fx.Node]) -> Updates:
    found: Updates = []
    for p, m, g in zip(params, moments, grads, strict=True):
        moment = build.call(aten.lerp.Scalar, m, g, 0.1)
        found += [(m, moment), (p, build.call(aten.sub.Tensor, p, moment, alpha=0.1))]
    return found


def by_lists(build: Build, params: list[fx.Node], moments: list[fx.Node], grads: list[fx.Node]) -> Updates:
    found: Updates = []
    for dtype in (torch.float32, torch.float64):
        mine = [i for i, p in enumerate(params) if p.meta["val"].dtype is dtype]
        if not mine:
            continue
        ps, ms, gs = ([nodes[i] for i in mine] for nodes in (params, moments, grads))
        new_ms = parts(build, build.call(aten._foreach_lerp.Scalar, ms, gs, 0.1))
        new_ps = parts(build, build.call(aten._foreach_add.List, ps, new_ms, alpha=-0.1))
        found += [*zip(ms, new_ms, strict=True), *zip(ps, new_ps, strict=True)]
    return found


def parts(build: Build, made: fx.Node) -> list[fx.Node]:
    return [build.call(operator.getitem, made, i) for i in range(len(made.meta["val"]))]


@settings(quick, max_examples=25)
@given(step=updating_steps(), order=orders)
def test_random_updates_in_random_orders(step: StepGraph, order: Order) -> None:
    results, inputs, _ = run(step)
    in_order(step, order)
    now, inputs_now, _ = run(step)
    assert same(results, now)
    assert same(inputs, inputs_now)
    check_tail(step)


@settings(quick, max_examples=12)
@given(name=st.sampled_from(NAMES), order=orders)
def test_captured_steps_in_random_orders(name: str, order: Order) -> None:
    step = fresh(name)
    replay = Replay(step.gm)
    in_order(step, order)
    replay.compare(step.gm, "reassociates")
    check_tail(step)


def with_prerequisites(given_pass: GraphPass) -> Order:
    found: Order = []
    for name in given_pass.contract.prerequisites:
        found += with_prerequisites(BY_NAME[name])
    return [*found, (given_pass, 1e-4, 0)]


@pytest.mark.parametrize("name", each_now(NAMES, *NAMES[::6]))
def test_every_pass_alone_and_the_default_list(name: str) -> None:
    for each in PASSES:
        order = with_prerequisites(each)
        done = in_order(fresh(name), order)
        assert len(done) == len(order) or each is iter_move_grads_and_optimizers
    step = fresh(name)
    before = collectives(step)
    replay = Replay(step.gm)
    run_passes(step, DEFAULT, level=3)
    replay.compare(step.gm, "reassociates")
    assert collectives(step) < before
    run_passes(step, [overlap_optimizer_with_next_forward], level=3)
    check_tail(step)


def test_a_pass_that_runs_another_one_out_of_order_is_undone() -> None:
    @graph_optimization_pass()
    def both(gm: fx.GraphModule) -> None:
        gm.graph.output_node().args = ((),)
        schedule_comm_wait(gm)

    step = fresh(NAMES[0])
    before = seen(step)
    with pytest.raises(PassOrderError, match="are the prerequisites of"):
        both(step)
    assert seen(step) == before


def collectives(step: StepGraph) -> int:
    return sum(is_collective(n.target) for n in step.gm.graph.nodes)
