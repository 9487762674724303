"""Equal computations become one, what a step computes stays the same to the last bit, and nothing else changes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from ir.collectives import Build, comm
from ir.step_graphs import aten
from passes.optimizers import OPTIMIZERS, name_of, optimizer_step
from passes.pretend import run, shared_pairs
from passes.random_graphs import communicating_steps
from wholestep.ir import NodeMeta, StepGraph, set_node_meta, update_node_meta, verify
from wholestep.ir.reinplace import reinplaced
from wholestep.passes import common_subexpressions
from wholestep.passes.common_subexpressions import EqualNodes, merge_common_subexpressions, plan_merges
from wholestep.passes.engine.replay import Replay


def count(step: StepGraph, target: Any) -> int:
    return len(step.gm.graph.find_nodes(op="call_function", target=target))


def check(step: StepGraph, merged: int) -> StepGraph:
    """Run the pass; what the step does stays the same, and the pass finds nothing more to do."""
    verify(step)
    before, nodes = run(step), len(step.gm.graph.nodes)
    assert len(plan_merges(step.gm.graph)) == merged
    merge_common_subexpressions(step)
    verify(step, 2)
    after = run(step)
    for old, new in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert torch.equal(old, new) or (old.isnan() & new.isnan() | (old == new)).all()
        assert old.stride() == new.stride()
    assert shared_pairs(after[0]) == shared_pairs(before[0])
    assert after[2] == before[2], "the same collectives"
    assert nodes - len(step.gm.graph.nodes) >= merged
    assert plan_merges(step.gm.graph) == []
    return step


def twice(target: Any, *args: Any, **kwargs: Any) -> tuple[Build, fx.Node, fx.Node]:
    build = Build()
    x = build.input("x", 4, 2)
    nodes = [build.call(target, x, *args, **kwargs) for _ in range(2)]
    return build, nodes[0], nodes[1]


def test_two_equal_nodes_become_the_first() -> None:
    build, a, b = twice(aten.neg.default)
    step = build.finish(build.call(aten.add.Tensor, a, b))
    assert plan_merges(step.gm.graph) == [EqualNodes(b, a)]
    check(step, merged=1)
    assert a in step.gm.graph.nodes


def test_chains_of_equal_nodes_become_one_chain() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    ends = [build.call(aten.exp.default, build.call(aten.view.default, x, [8])) for _ in range(3)]
    step = check(build.finish(build.call(aten.add.Tensor, ends[0], ends[1]), build.call(aten.neg.default, ends[2])), 4)
    assert count(step, aten.exp.default) == count(step, aten.view.default) == 1


@pytest.mark.parametrize("other", [(2,), (1.0,), (True,), (-1,)], ids=str)
def test_other_arguments_are_other_values(other: tuple[Any, ...]) -> None:
    build = Build()
    x = build.input("x", 4, 2)
    a, b = build.call(aten.add.Tensor, x, 1), build.call(aten.add.Tensor, x, *other)
    check(build.finish(build.call(aten.add.Tensor, a, b)), merged=0)


def test_keywords_and_zeros_with_signs_count() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    values = [build.call(aten.add.Tensor, x, x, alpha=alpha) for alpha in (1, 2, 0.0, -0.0)]
    values += [build.call(aten._to_copy.default, x, dtype=dtype) for dtype in (torch.float64, torch.float16)]
    check(build.finish(*[build.call(aten.neg.default, value) for value in values]), merged=0)


def test_random_draws_are_never_merged() -> None:
    build, a, b = twice(aten.bernoulli.p, 0.5)
    check(build.finish(build.call(aten.add.Tensor, a, b)), merged=0)
    build, a, b = twice(aten.native_dropout.default, 0.5, True)
    build.graph.output(tuple(build.graph.call_function(operator.getitem, (drawn, 0)) for drawn in (a, b)))
    assert plan_merges(build.graph) == []


def test_uninitialised_memory_and_data_dependent_shapes_are_not_merged() -> None:
    for target in (aten.empty_like.default, aten.nonzero.default, aten._local_scalar_dense.default):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(
            tuple(graph.call_function(aten.neg.default, (graph.call_function(target, (x,)),)) for _ in range(2))
        )
        assert plan_merges(graph) == []


def test_collectives_waits_and_what_has_not_arrived_are_left_to_dedup() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    done = []
    for _ in range(2):
        started = build.call(comm.all_reduce_coalesced.default, [x, x], "sum", "0")
        for i in (0, 1, 1):
            part = build.graph.call_function(operator.getitem, (started, i))
            part.meta["val"] = started.meta["val"][i]
            done.append(build.call(aten.neg.default, build.wait(part)))
    check(build.finish(*done), merged=0)


def test_operators_of_other_packages_are_not_merged() -> None:
    with torch.library._scoped_library("wholestep_test_cse", "FRAGMENT") as library:
        library.define("tick(Tensor x) -> Tensor")
        library.impl("tick", lambda x: x + 1, "CompositeExplicitAutograd")
        build, a, b = twice(torch.ops.wholestep_test_cse.tick.default)
        check(build.finish(build.call(aten.add.Tensor, a, b)), merged=0)


def test_a_recomputation_is_not_merged_with_what_it_recomputes() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    a = build.call(aten.exp.default, x)
    used = build.call(aten.neg.default, a)
    again = [build.call(aten.exp.default, x, recompute=True) for _ in range(2)]
    between = build.call(aten.add.Tensor, build.call(aten.add.Tensor, *again), used)
    nested = build.call(aten.exp.default, x, recompute=True)
    step = check(build.finish(build.call(aten.add.Tensor, between, nested)), merged=1)
    assert count(step, aten.exp.default) == 3, "the forward, its recomputation, and the recomputation of that"


def test_what_runs_in_the_next_iteration_is_not_merged_with_what_runs_in_this() -> None:
    build, a, b = twice(aten.neg.default)
    update_node_meta(b, move=1)
    check(build.finish(build.call(aten.add.Tensor, a, b)), merged=0)


def test_results_that_leave_the_graph_stay_two_tensors() -> None:
    build, a, b = twice(aten.neg.default)
    check(build.finish(a, b), merged=0)
    build, a, b = twice(aten.neg.default)
    check(build.finish(a, build.call(aten.view.default, b, [8])), merged=0)
    build, a, b = twice(aten.neg.default)
    check(build.finish(build.call(aten.exp.default, a), b), merged=1)


def test_lists_of_results_that_leave_stay_two() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    results = []
    for _ in range(2):
        pair = build.call(aten.sort.default, x)
        part = build.graph.call_function(operator.getitem, (pair, 0))
        part.meta["val"] = pair.meta["val"][0]
        results.append(part)
    check(build.finish(*results), merged=0)


def test_of_three_equal_results_of_which_two_leave_one_goes() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    values = [build.call(aten.neg.default, x) for _ in range(3)]
    check(build.finish(build.call(aten.exp.default, values[0]), values[1], values[2]), merged=1)


@pytest.mark.parametrize("both", [False, True])
def test_nodes_that_write_backs_name_keep_their_names(both: bool) -> None:
    build = Build()
    p, q, x = (build.input(name, 4, 2) for name in "pqx")
    first, second, third = (build.call(aten.exp.default, x) for _ in range(3))
    read = build.call(aten.neg.default, build.call(aten.add.Tensor, first, third))
    if both:
        build.write_back(q, first)
    build.write_back(p, second)
    signature = build.write_backs
    step = check(build.finish(read), merged=1 if both else 2)
    assert step.signature.write_backs == tuple(signature)


def test_the_operator_that_eager_ran_in_place_is_not_forgotten() -> None:
    build = Build()
    p, x = build.input("p", 4, 2), build.input("x", 4, 2)
    read = build.call(aten.neg.default, build.call(aten.add.Tensor, p, x))
    update = build.call(aten.add.Tensor, p, x)
    set_node_meta(update, NodeMeta(in_place=aten.add_.Tensor))
    build.write_back(p, update)
    step = check(build.finish(read), merged=1)
    targets = [node.target for node in reinplaced(step).graph.nodes if node.op == "call_function"]
    assert aten.add_.Tensor in targets
    assert aten.copy_.default not in targets


def test_constants_are_one() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = [graph.call_function(aten.add.Tensor, (x, graph.get_attr("table"))) for _ in range(2)]
    graph.output((graph.call_function(aten.mul.Tensor, tuple(sums)),))
    gm = fx.GraphModule({"table": torch.ones(3)}, graph)
    merge_common_subexpressions(gm)
    assert len(gm.graph.nodes) == 5
    assert torch.equal(gm(torch.ones(3))[0], torch.full((3,), 4.0))


def writing(code: list[tuple[str, int, int]]) -> fx.GraphModule:
    """A graph that is not in normal form: it writes in the middle."""
    graph = fx.Graph()
    values = [graph.placeholder("p"), graph.placeholder("q")]
    for kind, i, j in code:
        a, b = values[i % len(values)], values[j % len(values)]
        if kind == "write":
            graph.call_function(aten.copy_.default, (a, b))
        elif kind == "add_":
            graph.call_function(aten.add_.Tensor, (a, 1))
        elif kind == "view":
            values.append(graph.call_function(aten.view.default, (a, [4])))
        elif kind == "part":
            values.append(
                graph.call_function(aten.select.int, (graph.call_function(aten.expand.default, (a, [2, 4])), 0, 1))
            )
        elif kind == "split":
            pieces = graph.call_function(aten.split.Tensor, (a, 2))
            left, right = (graph.call_function(operator.getitem, (pieces, k)) for k in range(2))
            values.append(graph.call_function(aten.cat.default, ([right, left],)))
        elif kind == "neg":
            values.append(graph.call_function(aten.neg.default, (a,)))
        elif kind == "zeros":
            values.append(graph.call_function(aten.zeros_like.default, (a,)))
        else:
            values.append(graph.call_function(aten.add.Tensor, (a, b)))
    graph.output(tuple(values[-3:]))
    return fx.GraphModule({}, graph)


KINDS = st.sampled_from(["write", "add_", "view", "part", "split", "neg", "neg", "add", "add", "zeros", "zeros"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(KINDS, st.integers(0, 5), st.integers(0, 5)), max_size=14))
def test_graphs_that_write_compute_the_same(code: list[tuple[str, int, int]]) -> None:
    gm = writing(code)
    inputs = [torch.arange(4.0), torch.ones(4)]
    runs = []
    for merged in (False, True):
        if merged:
            merge_common_subexpressions(gm)
        own = [value.clone() for value in inputs]
        results = gm(*own)
        runs.append(([*results, *own], shared_pairs([*results, *own])))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1] == runs[1][1]


def test_what_is_written_later_or_before_is_not_merged() -> None:
    gm = writing([("zeros", 0, 0), ("zeros", 0, 0), ("add_", 2, 0)])
    assert plan_merges(gm.graph) == []
    gm = writing([("neg", 0, 0), ("add_", 0, 0), ("neg", 0, 0), ("add", 2, 3)])
    assert plan_merges(gm.graph) == []


@settings(max_examples=100, deadline=None)
@given(communicating_steps())
def test_any_step_computes_the_same(step: StepGraph) -> None:
    check(step, merged=len(plan_merges(step.gm.graph)))
    again = StepGraph.from_json(step.to_json())
    assert again.fingerprint() == step.fingerprint()


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS[::2], ids=name_of)
@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.long)])
def test_captured_steps_compute_the_same_in_and_out_of_place(name: str, options: dict[str, Any], first: bool) -> None:
    step = optimizer_step(name, options, first=first, clip=True, average=True)
    before, write_backs = Replay(step.gm), step.signature.write_backs
    merge_common_subexpressions(step)
    step.verify(2)
    before.compare(step.gm, "exact")
    before.compare(reinplaced(step), "exact")
    assert step.signature.write_backs == write_backs


RULES: dict[str, tuple[str, Any, list[tuple[str, int, int]]]] = {
    "what is written is left alone": (
        "_written_memory",
        lambda *_: set(),
        [("zeros", 0, 0), ("zeros", 0, 0), ("add_", 2, 0), ("add", 2, 3), ("neg", 4, 0), ("neg", 5, 0)],
    ),
    "results stay two tensors": ("sharing_with_outputs", lambda *_: set(), [("neg", 0, 0), ("neg", 0, 0)]),
    "nothing merges across a write": (
        "writes",
        lambda node: False,
        [("neg", 0, 0), ("add_", 0, 0), ("neg", 0, 0), ("add", 2, 3), ("neg", 4, 0), ("neg", 5, 0)],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_superfluous(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a graph computes something else."""
    name, replacement, code = RULES[rule]
    test_graphs_that_write_compute_the_same.hypothesis.inner_test(code)  # type: ignore[attr-defined]
    monkeypatch.setattr(common_subexpressions, name, replacement)
    with pytest.raises(AssertionError):
        test_graphs_that_write_compute_the_same.hypothesis.inner_test(code)  # type: ignore[attr-defined]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).tanh()


def test_a_checkpointed_step_still_recomputes() -> None:
    def train(model: nn.Module, x: Tensor) -> Tensor:
        loss = checkpoint(model, x, use_reentrant=False).square().sum()
        loss.backward()
        return loss

    step = ws.capture(train, Block(), torch.randn(3, 4))
    computed, before = count(step, aten.tanh.default), Replay(step.gm)
    assert computed > 2
    merge_common_subexpressions(step)
    assert count(step, aten.tanh.default) == computed
    before.compare(step.gm, "exact")


def test_fifty_thousand_nodes() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(12_500):
        a, b = (graph.call_function(aten.neg.default, (node,)) for _ in range(2))
        c = graph.call_function(aten.add.Tensor, (a, b))
        node = graph.call_function(aten.view.default, (c, [4]))
    graph.output((node,))
    assert len(plan_merges(graph)) == 12_500
