"""Equal collectives become one, what a step computes stays the same to the last bit, and nothing else changes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, fx, nn

import wholestep as ws
from ir.collectives import Build, comm
from ir.step_graphs import aten
from passes.pretend import run, shared_pairs
from passes.random_graphs import communicating_steps
from ranks import run_ranks
from wholestep.ir import StepGraph, communication, verify
from wholestep.passes.redundant_collectives import Merge, dedup_collectives, plan_merges


def count(step: StepGraph, target: Any) -> int:
    return len(step.gm.graph.find_nodes(op="call_function", target=target))


def check(step: StepGraph, removed: int) -> StepGraph:
    """Run the pass; what the step does stays the same, and the pass finds nothing more to do."""
    verify(step)
    before = run(step)
    aliases = shared_pairs(before[0])
    assert dedup_collectives(step.gm) == removed
    verify(step)
    after = run(step)
    assert len(before[2]) - len(after[2]) == removed
    for old, new in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert torch.equal(old, new)
        assert old.stride() == new.stride()
    assert shared_pairs(after[0]) == aliases
    code = step.gm.code
    assert dedup_collectives(step.gm) == 0
    assert step.gm.code == code
    return step


def gather_twice(**second: Any) -> Build:
    build = Build()
    w = build.input("w", 4, 2)
    first = build.wait(build.gather(w))
    build.used = [build.call(aten.neg.default, first)]  # type: ignore[attr-defined]
    again = build.wait(build.gather(w, **second))
    build.used.append(build.call(aten.add.Tensor, again, first))  # type: ignore[attr-defined]
    return build


def test_two_equal_collectives_become_one_with_one_wait() -> None:
    build = gather_twice()
    step = check(build.finish(*build.used), removed=1)
    assert count(step, comm.all_gather_into_tensor.default) == count(step, comm.wait_tensor.default) == 1


def test_the_plan_names_the_collective_and_its_wait() -> None:
    build = gather_twice()
    step = build.finish(*build.used)
    gathers = step.gm.graph.find_nodes(op="call_function", target=comm.all_gather_into_tensor.default)
    waits = step.gm.graph.find_nodes(op="call_function", target=comm.wait_tensor.default)
    assert plan_merges(step.gm.graph) == [Merge(gathers[1], gathers[0]), Merge(waits[1], waits[0])]


@pytest.mark.parametrize("second", [{"group": "1"}, {"size": 2, "group": "7"}, {"recompute": True}])
def test_another_group_or_a_gather_repeated_on_purpose_is_not_merged(second: dict[str, Any]) -> None:
    build = gather_twice(**second)
    check(build.finish(*build.used), removed=0)


def test_other_reduce_ops_operands_and_operators_are_kept() -> None:
    build = Build()
    a, b = build.input("a", 4, 2), build.input("b", 4, 2)
    started = [build.reduce(a), build.reduce(a, "avg"), build.reduce(b), build.gather(a), build.scatter(a)]
    started.append(build.call(comm.broadcast.default, a, 2, "0"))  # the arguments of the gather
    check(build.finish(*[build.wait(each) for each in started]), removed=0)


def test_a_gather_that_is_repeated_twice_is_repeated_once() -> None:
    build = Build()
    w = build.input("w", 4, 2)
    first = build.wait(build.gather(w))
    again = [build.wait(build.gather(w, recompute=True)) for _ in range(2)]
    step = check(build.finish(build.call(aten.neg.default, first), build.call(aten.add.Tensor, *again)), removed=1)
    assert count(step, comm.all_gather_into_tensor.default) == 2


def test_the_first_wait_stays_even_if_it_was_the_seconds() -> None:
    build = Build()
    w = build.input("w", 4, 2)
    first, second = build.gather(w), build.gather(w)
    early = build.call(aten.neg.default, build.wait(second))
    late = build.call(aten.add.Tensor, build.wait(first), early)
    step = check(build.finish(early, late), removed=1)
    assert [node.target for node in step.gm.graph.nodes if node.op == "call_function"] == [
        comm.all_gather_into_tensor.default,
        comm.wait_tensor.default,
        aten.neg.default,
        aten.add.Tensor,
    ]


def test_collectives_of_merged_results_merge_too() -> None:
    build = Build()
    w = build.input("w", 4, 2)
    twice = [build.wait(build.reduce(build.wait(build.reduce(w)), group="1")) for _ in range(2)]
    check(build.finish(build.call(aten.add.Tensor, *twice)), removed=2)


def test_the_same_view_cast_and_padding_of_a_parameter_is_the_same_operand() -> None:
    build = Build()
    w = build.input("w", 3, 2)
    gathered = []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float64):
        view = build.call(aten.view.default, w, [3, 2])
        padded = build.call(aten.constant_pad_nd.default, view, [0, 0, 0, 1])
        cast = build.call(aten._to_copy.default, padded, dtype=dtype)
        gathered.append(build.wait(build.gather(cast)))
    results = [build.call(aten.neg.default, whole) for whole in gathered]
    step = check(build.finish(*results), removed=1)
    assert count(step, aten._to_copy.default) == count(step, aten.constant_pad_nd.default) == 2, "no cast is left over"


def test_what_was_computed_twice_or_drawn_twice_is_not_the_same_operand() -> None:
    build = Build()
    w = build.input("w", 4, 2)
    drawn = [build.call(aten.bernoulli.default, build.call(aten.sigmoid.default, w)) for _ in range(2)]
    check(build.finish(*[build.wait(build.reduce(each)) for each in drawn]), removed=0)


def test_lists_merge_part_by_part() -> None:
    build = Build()
    a, b = build.input("a", 4), build.input("b", 2)
    results = []
    for _ in range(2):
        started = build.call(comm.all_reduce_coalesced.default, [a, b], "sum", "0")
        for i in (1, 0):
            part = build.graph.call_function(operator.getitem, (started, i))
            part.meta["val"] = started.meta["val"][i]
            results.append(build.call(aten.neg.default, build.wait(build.call(aten.view.default, part, [-1]))))
    step = check(build.finish(*results), removed=1)
    assert count(step, comm.wait_tensor.default) == count(step, operator.getitem) == 2


def test_results_that_leave_the_graph_stay_two_tensors() -> None:
    """Two gradients in one memory would change together."""
    build = Build()
    w = build.input("w", 4, 2)
    first, second = build.wait(build.reduce(w)), build.wait(build.reduce(w))
    view = build.call(aten.slice.Tensor, second, 0, 0, 2)
    third = build.wait(build.reduce(w))
    step = check(build.finish(first, view, third), removed=2)
    assert count(step, aten.clone.default) == 2


def test_a_result_that_leaves_and_one_that_is_read_need_no_copy() -> None:
    build = Build()
    w = build.input("w", 4, 2)
    read, leaves = build.call(aten.neg.default, build.wait(build.reduce(w))), build.wait(build.reduce(w))
    step = check(build.finish(read, leaves), removed=1)
    assert count(step, aten.clone.default) == 0


def test_of_three_results_of_which_two_leave_one_is_copied() -> None:
    build = Build()
    w = build.input("w", 4, 2)
    read = build.call(aten.neg.default, build.wait(build.reduce(w)))
    step = check(build.finish(read, *[build.wait(build.reduce(w)) for _ in range(2)]), removed=2)
    assert count(step, aten.clone.default) == 1


def test_a_later_result_that_is_written_back_takes_the_place_of_the_first() -> None:
    build = Build()
    p, x = build.input("p", 4, 2), build.input("x", 4, 2)
    results = []
    for _ in range(3):
        done = build.wait(build.reduce(x))
        results.append(build.call(aten.neg.default, done))
    named = results[1].all_input_nodes[0]
    build.write_back(p, named)
    step = check(build.finish(*results), removed=2)
    assert [write.value for write in step.signature.write_backs] == [named.name]
    assert count(step, aten.clone.default) == 0


def all_to_all(build: Build, operand: fx.Node) -> fx.Node:
    """DTensor's own collective, whose result is there at once; made by hand, for it has no kernel without a group."""
    node = build.graph.call_function(torch.ops._dtensor.shard_dim_alltoall.default, (operand, 0, 1, "0"))
    node.meta["val"] = torch.empty(8, 1, device="meta")
    return node


def test_a_collective_that_needs_no_wait_is_merged_too() -> None:
    build = Build()
    p, x = build.input("p", 8, 1), build.input("x", 4, 2)
    views = [build.call(aten.view.default, x, [4, 2]) for _ in range(3)]
    first, second, third = (all_to_all(build, view) for view in views)
    read = build.call(aten.neg.default, first)
    build.write_back(p, second)
    step = build.finish(read, third)
    assert dedup_collectives(step.gm) == 2
    verify(step)
    assert [node.name for node in step.gm.graph.find_nodes(op="call_function", target=third.target)] == [second.name]
    assert step.gm.graph.output_node().args == ((read, second),)
    assert count(step, aten.view.default) == 1


@pytest.mark.parametrize("both", [False, True])
def test_nodes_that_write_backs_name_keep_their_names(both: bool) -> None:
    build = Build()
    p, q, x = build.input("p", 4, 2), build.input("q", 4, 2), build.input("x", 4, 2)
    first, second, third = (build.wait(build.reduce(x)) for _ in range(3))
    read = build.call(aten.neg.default, first)
    if both:
        build.write_back(p, first)
    build.write_back(q, third)
    step = check(build.finish(read, second), removed=2)
    assert count(step, aten.clone.default) == both
    assert {write.value for write in step.signature.write_backs} == {first.name, third.name} if both else {third.name}


def test_a_write_back_between_two_collectives_keeps_them_apart() -> None:
    """No StepGraph of ours reads after its epilogue; a graph that does is not broken by this pass."""
    build = Build()
    p, x = build.input("p", 4, 2), build.input("x", 4, 2)
    before = build.wait(build.gather(p))
    build.write_back(p, x)
    after = [build.wait(build.gather(p)) for _ in range(2)]
    results = [build.call(aten.neg.default, each) for each in (before, *after)]
    step = build.finish(*results)
    expected = run(step)
    assert dedup_collectives(step.gm) == 1
    for old, new in zip(expected[0], run(step)[0], strict=True):
        assert torch.equal(old, new)


def test_a_graph_that_is_not_in_normal_form_is_left_alone() -> None:
    build = gather_twice()
    build.call(aten.add_.Tensor, build.used[0], 1)
    assert dedup_collectives(build.finish(*build.used).gm) == 0


@pytest.mark.skipif(not hasattr(comm, "isend"), reason="a torch without functional sends")
def test_sends_are_never_merged() -> None:
    build = Build()
    x = build.input("x", 4)
    build.wait(build.call(comm.isend.default, x, 1, 0, "0"))
    build.wait(build.call(comm.isend.default, x, 1, 0, "0"))
    assert dedup_collectives(build.finish().gm) == 0


@settings(max_examples=100, deadline=None)
@given(communicating_steps())
def test_any_step_computes_the_same(step: StepGraph) -> None:
    started = [node for node in step.gm.graph.nodes if node.name in {c.node for c in communication(step.gm)}]
    repeated = len(started) - len({(n.target, str(n.args), n.meta["wholestep"].recompute) for n in started})
    verify(step)
    before = run(step)
    removed = dedup_collectives(step.gm)
    assert removed >= repeated, "at least those that are written the same"
    verify(step)
    after = run(step)
    assert len(before[2]) - len(after[2]) == removed
    for old, new in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert torch.equal(old, new) or (old.isnan() & new.isnan() | (old == new)).all()
    assert shared_pairs(after[0]) == shared_pairs(before[0])
    assert dedup_collectives(step.gm) == 0
    again = StepGraph.from_json(step.to_json())
    assert again.fingerprint() == step.fingerprint()


def test_ten_thousand_nodes() -> None:
    build = Build()
    w = node = build.input("w", 4)
    for _ in range(1_700):
        cast = build.call(aten._to_copy.default, w, dtype=torch.float64)
        node = build.call(aten.add.Tensor, node, build.wait(build.reduce(cast)))
        node = build.call(aten.neg.default, build.wait(build.reduce(node, group="1")))
    step = build.finish(node)
    assert len(step.gm.graph.nodes) > 10_000
    assert dedup_collectives(step.gm) == 1_699
    assert count(step, aten._to_copy.default) == 1
    verify(step)


class Twice(nn.Module):
    """Uses one weight two times; each read gathers it."""

    def __init__(self, shard: Tensor) -> None:
        super().__init__()
        self.shard = nn.Parameter(shard)

    def whole(self) -> Tensor:
        size, name = dist.get_world_size(), dist.group.WORLD.group_name
        return comm.wait_tensor(comm.all_gather_into_tensor(self.shard.detach(), size, name))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.whole()).relu() @ self.whole() + self.shard.sum()


def test_captured_ranks_send_half_as_much_and_compute_the_same() -> None:
    def code(rank: int) -> tuple[bool, list[str]]:
        torch.manual_seed(rank)
        model = Twice(torch.randn(2, 4))
        x = torch.randn(3, 4)
        step = ws.capture(lambda model, x: model(x), model, x)  # capture runs the pass
        inputs = [model.shard.detach() if spec.path.startswith("model") else x for spec in step.signature.inputs]
        equal = torch.equal(step.gm(*inputs)[0], model(x))
        left = [found.text for found in communication(step.gm, step.signature)]
        return equal and dedup_collectives(step.gm) == 0, left

    for equal, left in run_ranks(code, 2):
        assert equal
        assert len(left) == 1
        assert left[0].startswith("all_gather_into_tensor(group 0 of 2) of ")
