"""What level 1 sees of a pass that breaks its promise, and that it has nothing to say against correct ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from ir.collectives import Build, comm
from wholestep.errors import PassError
from wholestep.ir import StepGraph
from wholestep.passes import graph_optimization_pass, run_passes
from wholestep.passes.engine.contract import Numerics

aten = torch.ops.aten
Edit = Callable[[fx.GraphModule], Any]


def two_updates() -> StepGraph:
    """p1 += avg(g1), p2 += avg(g2), and the maximum of x over the ranks."""
    build = Build()
    p1, p2, g1, g2, x = (build.input(name, 4) for name in ("p1", "p2", "g1", "g2", "x"))
    first = build.wait(build.reduce(build.call(aten.neg.default, g1), "avg"))
    second = build.wait(build.reduce(build.call(aten.neg.default, g2), "avg"))
    most = build.wait(build.reduce(x, "max"))
    new1, new2 = build.call(aten.add.Tensor, p1, first), build.call(aten.add.Tensor, p2, second)
    result = build.call(aten.neg.default, most)
    build.write_back(p1, new1)
    build.write_back(p2, new2)
    return build.finish(result)


def nodes(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def apply(edit: Edit, numerics: Numerics, level: int = 1) -> StepGraph:
    @graph_optimization_pass(numerics=numerics)
    def edits(gm: fx.GraphModule) -> None:
        edit(gm)

    step = two_updates()
    run_passes(step, [edits], level=level)
    return step


def swap_write_backs(gm: fx.GraphModule) -> None:
    one, other = nodes(gm, aten.copy_.default)
    one.args, other.args = (one.args[0], other.args[1]), (other.args[0], one.args[1])


def write_one_value_twice(gm: fx.GraphModule) -> None:
    one, other = nodes(gm, aten.copy_.default)
    one.args = (one.args[0], other.args[1])


def swap_gradients(gm: fx.GraphModule) -> None:
    one, other = nodes(gm, aten.add.Tensor)
    one.args, other.args = (one.args[0], other.args[1]), (other.args[0], one.args[1])


def use_one_gradient_twice(gm: fx.GraphModule) -> None:
    first, second, _ = nodes(gm, comm.wait_tensor.default)
    first.replace_all_uses_with(second)


def reduce_otherwise(gm: fx.GraphModule) -> None:
    nodes(gm, comm.all_reduce.default)[0].update_arg(1, "max")


def forget_to_divide(gm: fx.GraphModule) -> None:
    nodes(gm, comm.all_reduce.default)[0].update_arg(1, "sum")


def make_another_reduction(gm: fx.GraphModule) -> None:
    old = nodes(gm, comm.all_reduce.default)[0]
    with gm.graph.inserting_before(old):
        old.replace_all_uses_with(gm.graph.call_function(old.target, (old.args[0], "max", old.args[2])))  # type: ignore[arg-type]
    gm.graph.erase_node(old)


def swap_operands(gm: fx.GraphModule) -> None:
    one, other = nodes(gm, aten.neg.default)[:2]
    one.args, other.args = other.args, one.args


SEEN = [
    swap_write_backs,
    write_one_value_twice,
    swap_gradients,
    use_one_gradient_twice,
    reduce_otherwise,
    forget_to_divide,
    make_another_reduction,
]
CASES: list[tuple[Edit, Numerics]] = [(edit, "reassociates") for edit in SEEN]
CASES += [(edit, "exact") for edit in (*SEEN, swap_operands)]  # the terms of a sum may change places


@pytest.mark.parametrize(("edit", "numerics"), CASES)
def test_broken_promises_are_seen_at_level_1(edit: Edit, numerics: Numerics) -> None:
    with pytest.raises(PassError, match="edits left a graph that breaks a rule"):
        apply(edit, numerics)
    apply(edit, "changes")


def write_the_batch(gm: fx.GraphModule) -> None:
    x = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_before(nodes(gm, aten.copy_.default)[0]):
        zeros = gm.graph.call_function(aten.zeros_like.default, (x,))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(aten.copy_.default, (x, zeros))


def use_a_group_that_does_not_exist(gm: fx.GraphModule) -> None:
    nodes(gm, comm.all_reduce.default)[0].update_arg(2, "77")


@pytest.mark.parametrize("edit", [write_the_batch, use_a_group_that_does_not_exist])
def test_no_pass_writes_what_the_step_does_not_write_or_invents_groups(edit: Edit) -> None:
    with pytest.raises(PassError, match=r"x is written now, and the step does not|'77', which does not exist"):
        apply(edit, "changes")


def divide_a_sum(gm: fx.GraphModule) -> None:
    for started in nodes(gm, comm.all_reduce.default)[:2]:
        started.update_arg(1, "sum")
        (wait,) = started.users
        with gm.graph.inserting_after(wait):
            mean = gm.graph.call_function(aten.div.Tensor, (wait, 2))
        wait.replace_all_uses_with(mean)
        mean.args = (wait, 2)


def add_in_another_order(gm: fx.GraphModule) -> None:
    for add in nodes(gm, aten.add.Tensor):
        add.args = (add.args[1], add.args[0])


def copy_before_it_is_written(gm: fx.GraphModule) -> None:
    for copy in nodes(gm, aten.copy_.default):
        with gm.graph.inserting_before(nodes(gm, aten.copy_.default)[0]):
            copy.args = (copy.args[0], gm.graph.call_function(aten.clone.default, (copy.args[1],)))


@pytest.mark.parametrize("edit", [divide_a_sum, add_in_another_order, copy_before_it_is_written])
@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_said_against_correct_passes(edit: Edit, level: int) -> None:
    apply(edit, "reassociates", level)


def test_equal_values_may_be_merged() -> None:
    build = Build()
    p1, p2, g = (build.input(name, 4) for name in ("p1", "p2", "g"))
    values = [build.call(aten.neg.default, build.call(aten.exp.default, g)) for _ in range(2)]
    result = build.call(aten.sum.default, g)
    build.write_back(p1, values[0])
    build.write_back(p2, values[1])
    step = build.finish(result)

    @graph_optimization_pass(numerics="exact")
    def merges(gm: fx.GraphModule) -> None:
        one, other = nodes(gm, aten.copy_.default)
        other.args = (other.args[0], one.args[1])

    run_passes(step, [merges], level=3)
    assert len(nodes(step.gm, aten.neg.default)) == 1
