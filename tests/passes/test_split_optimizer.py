"""Two halves of an optimizer do to the last bit what the whole did."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import wholestep as ws
from ir.step_graphs import aten
from passes.optimizers import OPTIMIZERS, name_of, optimizer_step, training_step
from passes.test_optimizer_blocks import the_block
from wholestep.ir import StepGraph
from wholestep.ir.reinplace import reinplaced
from wholestep.passes.common_subexpressions import merge_common_subexpressions
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.engine.replay import Replay
from wholestep.passes.functionalize_optimizer import remove_copy_from_optimizer
from wholestep.passes.optimizer_blocks import FusedOptimizerBlock, get_all_fused_optimizer_blocks
from wholestep.passes.split_optimizer import plan_split, split_fused_optimizer, split_optimizer


def same(left: FusedOptimizerBlock, right: FusedOptimizerBlock) -> bool:
    fields = ("params", "grads", "ops", "lanes", "nodes", "members")
    return all(getattr(left, field) == getattr(right, field) for field in fields)


def check_parts(step: StepGraph, parts: list[FusedOptimizerBlock], whole: list[fx.Node]) -> None:
    """The parts are what a fresh look at the graph finds, and together they are the whole."""
    step.verify(2)
    found = {block.optim.optim_node: block for block in get_all_fused_optimizer_blocks(step.gm)}
    assert len(found) == len(parts)
    for part in parts:
        assert same(found[part.optim.optim_node], part)
        assert part.optim.param_outputs == found[part.optim.optim_node].optim.param_outputs
        assert [c.args[0] for c in part.optim.param_outputs] == part.params
    assert sorted(p.name for part in parts for p in part.params) == sorted(p.name for p in whole)


MORE: list[dict[str, Any]] = [{"clip": True, "average": True}, {}, {"scaled": True}, {"first": True}]


def with_more(optimizers: list[Any], more: list[dict[str, Any]]) -> list[Any]:
    """Each optimizer with one of the additions in turn; with the others they are long."""
    return [
        pytest.param(*each, other, id=f"{name_of(each[0])}-{name_of(each[1])}-{name_of(other)}", marks=marks)
        for i, each in enumerate(optimizers)
        for j, other in enumerate(more)
        for marks in [() if (i + j) % len(more) == 0 else pytest.mark.long]
    ]


@pytest.mark.parametrize(("name", "options", "more"), with_more(OPTIMIZERS, MORE))
def test_both_halves_are_the_whole(name: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    step = optimizer_step(name, options, **more)
    block = the_block(step)
    before, in_place = (
        Replay(step.gm),
        len(reinplaced(step).graph.find_nodes(op="call_function", target=aten.copy_.default)),
    )
    signature, whole, chosen = step.signature, block.params, {block.grads[0], block.grads[3]}
    first, second = split_fused_optimizer(step.gm, block, chosen)
    assert first.grads == [g for g in block.grads if g in chosen]
    assert second.grads == [g for g in block.grads if g not in chosen]
    assert step.signature is signature
    check_parts(step, [first, second], whole)
    before.compare(step.gm, "exact")
    after = len(reinplaced(step).graph.find_nodes(op="call_function", target=aten.copy_.default))
    assert after == in_place, "updates that were in place still are"


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=name_of)
def test_training_continues_as_in_eager(name: str, options: dict[str, Any]) -> None:
    """Real steps: the split graph, run on the tensors of the model, next to eager."""
    step_function, args = training_step(name, options)
    eager = copy.deepcopy(args)
    step = optimizer_step(name, options)
    block = the_block(step)
    split_fused_optimizer(step.gm, block, set(block.grads[1:3]))
    executable = reinplaced(step)
    model, updates, x, *_ = args
    values = {"x": x}
    for group, params in ((updates.param_groups[0], dict(model.named_parameters())),):
        for path, parameter in params.items():
            values[f"model.{path}"] = parameter.detach()
            values |= {f"updates.state[model.{path}].{k}": v for k, v in updates.state[parameter].items()}
        values |= {f"updates.param_groups[0].{k}": v for k, v in group.items() if k != "params"}
        values |= {f"updates.param_groups[0].betas[{i}]": b for i, b in enumerate(group.get("betas", ()))}
    inputs = [values[spec.path] for spec in step.signature.inputs]
    for _ in range(5):
        (loss,) = executable(*inputs)
        assert torch.equal(loss, step_function(*eager))
    for ours, theirs in zip(model.parameters(), eager[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, value in eager[1].state[theirs].items():
            assert value is None or torch.equal(updates.state[ours][key], value)


@graph_optimization_pass(prerequisites=[remove_copy_from_optimizer])
def halve(gm: fx.GraphModule) -> None:
    """Every optimizer becomes two."""
    for block in get_all_fused_optimizer_blocks(gm):
        split_fused_optimizer(gm, block, set(block.grads[::2]))


@pytest.mark.parametrize(("name", "options", "more"), with_more(OPTIMIZERS[::2], MORE[:3]))
def test_compiled_training_is_eager_training(name: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    step, args = training_step(name, options, first=True, **more)
    eager = copy.deepcopy(args)
    compiled = ws.compile(step, passes=[merge_common_subexpressions, remove_copy_from_optimizer, halve], verify=3)
    for _ in range(4):
        assert torch.equal(compiled(*args), step(*eager))
    for ours, theirs in zip(
        [*args[0].parameters(), *args[3].parameters()], [*eager[0].parameters(), *eager[3].parameters()], strict=True
    ):
        assert torch.equal(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_number_of_parts_in_any_order(data: st.DataObject) -> None:
    name, options = data.draw(st.sampled_from(OPTIMIZERS))
    step = optimizer_step(name, options, scaled=data.draw(st.booleans()))
    block = the_block(step)
    before, whole, n = Replay(step.gm), block.params, len(block.grads)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    used = sorted(set(part_of) - {0})
    groups = [{g for g, part in zip(block.grads, part_of, strict=True) if part == number} for number in used]
    if len(set(part_of)) < 2 or 0 not in part_of:
        return
    parts = split_optimizer(step.gm, block, groups)
    check_parts(step, parts, whole)
    before.compare(step.gm, "exact")
    splittable = [part for part in parts if len(part.grads) > 1]
    if splittable:
        again = splittable[0]
        halves = split_fused_optimizer(step.gm, again, {again.grads[-1]})
        check_parts(step, [*(p for p in parts if p is not again), *halves], whole)
        before.compare(step.gm, "exact")


def test_an_empty_half_raises_and_changes_nothing() -> None:
    step = optimizer_step("Adam", {"fused": True})
    block, code = the_block(step), step.gm.code
    with pytest.raises(ValueError, match="split_gradients is empty"):
        split_fused_optimizer(step.gm, block, set())
    for wrong in (set(block.grads), {block.params[0]}):
        with pytest.raises(ValueError, match="At least one split optimizer does not have input"):
            split_fused_optimizer(step.gm, block, wrong)
    step.gm.recompile()
    assert step.gm.code == code


def test_gradients_of_other_optimizers_are_ignored() -> None:
    step = optimizer_step("Adam", {"fused": True})
    block = the_block(step)
    first, _ = split_fused_optimizer(step.gm, block, {block.grads[2], block.params[0]})
    assert first.grads == [block.grads[2]]


def test_the_plan_names_operators_and_indices() -> None:
    step = optimizer_step("SGD", {"foreach": True, "momentum": 0.9})
    block = the_block(step)
    plan = plan_split(block, [{block.grads[4], block.grads[1]}])
    assert plan.lanes == ((1, 4), (0, 2, 3, 5))
    assert [split.op for split in plan.splits] == block.ops
    assert {split.parts for split in plan.splits} == {((1, 4), (0, 2, 3, 5))}


def test_lanes_follow_the_data_and_not_the_index() -> None:
    """Step counts in another order than the parameters."""
    step = optimizer_step("Adam", {"fused": True})
    block = the_block(step)
    assert block.step is not None
    add = block.step.add_node
    add.args = (list(reversed(add.args[0])), *add.args[1:])  # type: ignore[arg-type]
    for node in list(add.users):
        node.args = (add, 5 - node.args[1])  # type: ignore[operator]
    step.gm.recompile()
    before, block = Replay(step.gm), the_block(step)
    assert block.step is not None
    assert block.lanes[block.step.add_node] == [5, 4, 3, 2, 1, 0]
    first, second = split_fused_optimizer(step.gm, block, {block.grads[0]})
    assert first.step is not None
    assert second.step is not None
    assert [count.name for count in first.step.add_node.args[0]] == ["updates_state_model_0_weight_step"]  # type: ignore[union-attr]
    before.compare(step.gm, "exact")


def test_a_list_that_is_read_as_a_whole_is_refused() -> None:
    step = optimizer_step("SGD", {"foreach": True})
    block = the_block(step)
    op = block.optim.optim_node
    with step.gm.graph.inserting_after(op):
        step.gm.graph.call_function(operator.getitem, (op, slice(0, 2)))
    with pytest.raises(ValueError, match="reads a whole list"):
        split_fused_optimizer(step.gm, block, {block.grads[0]})


def test_half_of_the_values_is_known_of_half_an_operator() -> None:
    step = optimizer_step("AdamW", {"fused": True, "amsgrad": True})
    block = the_block(step)
    for part in split_fused_optimizer(step.gm, block, {block.grads[0]}):
        value = part.optim.optim_node.meta["val"]
        assert [len(each) for each in value] == [len(part.params)] * 5


def test_many_parts_of_a_large_optimizer() -> None:
    """One split for all buckets costs what one does."""
    graph = fx.Graph()
    params = [graph.placeholder(f"p{i}") for i in range(1_000)]
    grads = [graph.placeholder(f"g{i}") for i in range(1_000)]
    new = graph.call_function(aten._foreach_add.List, (params, grads))
    for i, param in enumerate(params):
        graph.call_function(aten.copy_.default, (param, graph.call_function(operator.getitem, (new, i))))
    graph.output(())
    gm = fx.GraphModule({}, graph)
    (block,) = get_all_fused_optimizer_blocks(gm)
    parts = split_optimizer(gm, block, [set(grads[i : i + 10]) for i in range(0, 990, 10)])
    assert len(parts) == 100
    assert all(len(part.params) == 10 for part in parts)
