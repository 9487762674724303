"""Orphan copies of an optimizer go; weight updates, live temporaries and the user's own copies stay."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ir.collectives import Build, comm
from ir.step_graphs import aten
from passes.optimizers import OPTIMIZERS, name_of, optimizer_step
from wholestep.ir import NodeMeta, set_node_meta
from wholestep.passes.engine.contract import applied_passes
from wholestep.passes.functionalize_optimizer import plan_orphans, remove_copy_from_optimizer


def copies(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=aten.copy_.default)


class Traced:
    """A fused SGD as an old tracer left it: all three lists that it returns are copied."""

    def __init__(self) -> None:
        self.build = Build()
        self.p, self.m, self.x = (self.build.input(name, 4) for name in "pmx")
        self.g = self.call(aten.mul.Tensor, self.x, self.p)
        numbers = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        new = self.build.graph.call_function(
            aten._fused_sgd.default, ([self.p], [self.g], [self.m]), {**numbers, **flags}
        )
        self.new = [self.element(self.element(new, which), 0) for which in range(3)]

        for node in self.build.graph.nodes:
            node.meta.pop("val", None)  # torch has no meta kernel for it

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.build.graph.call_function(target, args)

    def element(self, source: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, source, index)

    def copy(self, target: fx.Node, value: fx.Node) -> fx.Node:
        return self.call(aten.copy_.default, target, value)

    def finish(self, *results: fx.Node) -> fx.GraphModule:
        self.build.graph.output(results)
        return fx.GraphModule({}, self.build.graph)


def run(gm: fx.GraphModule) -> list[Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(4) for _ in gm.graph.find_nodes(op="placeholder")]
    return [*gm(*inputs), *inputs]


def check(gm: fx.GraphModule, kept: list[fx.Node]) -> None:
    before = run(gm)
    remove_copy_from_optimizer(gm)
    assert copies(gm) == kept
    assert applied_passes(gm) == ("remove_copy_from_optimizer",)
    for old, new in zip(before, run(gm), strict=True):
        assert torch.equal(old, new)


def test_the_copy_of_unscaled_gradients_goes_and_updates_stay() -> None:
    traced = Traced()
    traced.copy(traced.g, traced.new[1])
    kept = [traced.copy(traced.p, traced.new[0]), traced.copy(traced.m, traced.new[2])]
    gm = traced.finish(traced.x)
    check(gm, kept)
    assert len(gm.graph.find_nodes(op="call_function", target=operator.getitem)) == 4, "the unread elements went too"


def test_a_temporary_that_is_read_later_is_no_orphan() -> None:
    for read in ("itself", "a view", "the copy", "the output"):
        traced = Traced()
        view = traced.call(aten.view.default, traced.g, [2, 2])
        copy = traced.copy(traced.g, traced.new[1])
        what = {"itself": traced.g, "a view": view, "the copy": copy, "the output": traced.g}[read]
        result = what if read == "the output" else traced.call(aten.neg.default, what)
        check(traced.finish(result), [copy])


def test_a_copy_into_a_view_of_a_temporary_is_an_orphan_too_and_into_a_view_of_an_input_never() -> None:
    for base, is_orphan in (("g", True), ("p", False)):
        traced = Traced()
        view = traced.call(aten.slice.Tensor, getattr(traced, base), 0, 0, 2)
        copy = traced.copy(view, traced.call(aten.slice.Tensor, traced.new[0], 0, 0, 2))
        check(traced.finish(traced.x), [] if is_orphan else [copy])


def test_a_constant_of_the_module_is_state() -> None:
    traced = Traced()
    gm = fx.GraphModule({"kept": torch.zeros(4)}, fx.Graph())
    constant = traced.build.graph.get_attr("kept")
    traced.copy(constant, traced.new[0])
    traced.build.graph.output(())
    gm.graph = traced.build.graph
    assert plan_orphans(gm.graph) == []


def test_the_users_own_copy_stays() -> None:
    traced = Traced()
    buffer = traced.call(aten.neg.default, traced.x)
    own = traced.copy(buffer, traced.call(aten.exp.default, traced.x))
    computed = traced.copy(traced.call(aten.neg.default, traced.p), traced.call(aten.mul.Tensor, traced.new[0], 2))
    check(traced.finish(traced.x), [own, computed])


def test_in_a_captured_step_only_copies_of_the_optimizer_go() -> None:
    for phase, kept in (("update", True), ("optimizer", False)):
        traced = Traced()
        set_node_meta(traced.new[0], NodeMeta(phase="optimizer"))
        copy = traced.copy(traced.g, traced.new[1])
        set_node_meta(copy, NodeMeta(phase=phase))
        check(traced.finish(traced.x), [copy] if kept else [])


def test_of_two_copies_into_one_temporary_both_go() -> None:
    traced = Traced()
    traced.copy(traced.g, traced.new[1])
    traced.copy(traced.g, traced.new[0])
    check(traced.finish(traced.x), [])


def test_casts_and_views_of_results_are_results() -> None:
    traced = Traced()
    cast = traced.build.graph.call_function(aten._to_copy.default, (traced.new[1],), {"dtype": torch.float64})
    traced.copy(traced.g, traced.call(aten.view.default, cast, [4]))
    check(traced.finish(traced.x), [])


def test_elements_of_one_bucket_do_not_hold_each_other() -> None:
    """Gradients are views of one flat tensor; the fused operator read them before."""
    traced = Traced()
    parts = traced.call(aten.split.Tensor, traced.call(aten.cat.default, [traced.x, traced.x]), 4)
    for i in range(2):
        traced.copy(traced.element(parts, i), traced.new[1])
    check(traced.finish(traced.x), [])


@pytest.mark.parametrize("taken", ["before", "after"])
def test_a_view_is_read_when_something_reads_it(taken: str) -> None:
    traced = Traced()
    view = traced.call(aten.view.default, traced.g, [4]) if taken == "before" else None
    copy = traced.copy(traced.g, traced.new[1])
    view = view if view is not None else traced.call(aten.view.default, traced.g, [4])
    check(traced.finish(traced.call(aten.neg.default, view)), [copy])


def test_a_copy_whose_result_is_used_is_not_planned_even_if_nothing_reads_it() -> None:
    traced = Traced()
    traced.call(aten.view.default, traced.copy(traced.g, traced.new[1]), [4])
    assert plan_orphans(traced.finish(traced.x).graph) == []


def test_a_reshape_may_be_a_copy_and_so_reads() -> None:
    traced = Traced()
    crossed = traced.call(aten.t.default, traced.call(aten.reshape.default, traced.g, [2, 2]))
    copy = traced.copy(traced.g, traced.new[1])
    check(traced.finish(traced.call(aten.neg.default, traced.call(aten.reshape.default, crossed, [4]))), [copy])


def test_what_the_orphans_needed_goes_but_not_draws_or_collectives() -> None:
    build = Build()
    x = build.input("x", 4)
    drawn = build.call(aten.bernoulli.default, x)
    done = build.wait(build.reduce(x))
    new = build.call(aten._foreach_add.List, [drawn, done], [build.call(aten.neg.default, x), x])
    element = build.graph.call_function(operator.getitem, (new, 0))
    build.graph.call_function(aten.copy_.default, (build.call(aten.exp.default, x), element))
    gm = build.finish(x).gm
    remove_copy_from_optimizer(gm)
    targets = {node.target for node in gm.graph.nodes if node.op == "call_function"}
    assert targets == {aten.bernoulli.default, comm.all_reduce.default, comm.wait_tensor.default}


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS[::3], ids=name_of)
def test_a_captured_step_has_no_orphans(name: str, options: dict[str, Any]) -> None:
    step = optimizer_step(name, options)
    code = step.gm.code
    remove_copy_from_optimizer(step)
    assert step.gm.code == code


def test_a_step_traced_by_make_fx_keeps_its_updates() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor) -> Tensor:
        grad = g * 2
        new = aten._fused_sgd.default(
            [p],
            [grad],
            [m],
            weight_decay=0.0,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        for target, value in zip((p, grad, m), new, strict=True):
            target.copy_(value[0])
        return g.sum()

    gm = make_fx(step, tracing_mode="fake")(torch.randn(4), torch.randn(4), torch.randn(4))
    assert len(copies(gm)) == 3
    gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
    gm.recompile()
    check(gm, [c for c in copies(gm) if c.args[0].op == "placeholder"])  # type: ignore[union-attr]
    assert len(copies(gm)) == 2


def test_ten_thousand_nodes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    grads = [graph.call_function(aten.neg.default, (x,)) for _ in range(3_400)]
    new = graph.call_function(aten._foreach_add.Scalar, (grads, 1))
    for i, grad in enumerate(grads):
        graph.call_function(aten.copy_.default, (grad, graph.call_function(operator.getitem, (new, i))))
    graph.output((x,))
    gm = fx.GraphModule({}, graph)
    assert len(graph.nodes) > 10_000
    remove_copy_from_optimizer(gm)
    assert len(gm.graph.nodes) == 2
