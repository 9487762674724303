"""The minimum cut compared with all plans, on small random graphs."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from wholestep.ir.meta import NodeMeta, set_node_meta
from wholestep.remat.fit import recompute
from wholestep.remat.measure import peak_of, timeline
from wholestep.remat.problem import RematProblem
from wholestep.remat.search import Anchors, ParetoFront, PricedCut, segment_counts

aten = torch.ops.aten


def make_graph(sizes: list[int], reads: list[tuple[int, int]], used: list[bool]) -> fx.Graph:
    """A forward of additions and products, and a backward that reads some of its values."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    values[0].meta["val"] = torch.empty(4, device="meta")
    for size, (a, b) in zip(sizes, reads, strict=True):
        node = graph.call_function(aten.mul.Tensor, (values[a % len(values)], values[b % len(values)]))
        node.meta["val"] = torch.empty(size, device="meta")
        set_node_meta(node, NodeMeta(phase="forward"))
        values.append(node)
    total = graph.call_function(aten.neg.default, (values[-1],))
    total.meta["val"] = torch.empty(1, device="meta")
    set_node_meta(total, NodeMeta(phase="backward"))
    for value, is_used in reversed(list(zip(values[1:], used, strict=True))):
        if is_used:
            total = graph.call_function(aten.mul.Tensor, (total, value))
            total.meta["val"] = torch.empty(1, device="meta")
            set_node_meta(total, NodeMeta(phase="backward"))
    graph.output((total,))
    return graph


@st.composite
def graphs(draw):
    count = draw(st.integers(2, 7))
    sizes = draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    reads = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=count, max_size=count))
    used = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return make_graph(sizes, reads, used)


def price_of(problem: RematProblem, plan: frozenset[int], price: float) -> float:
    return sum(problem.saved_bytes(i) for i in problem.saved(plan)) + price * problem.cost(plan)


@given(graphs(), st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0, 10.0]))
def test_no_plan_is_cheaper_than_the_cut(graph, price):
    problem = RematProblem.of(graph)
    places = [i for i, needed in enumerate(problem.needed) if needed]
    found = price_of(problem, PricedCut(problem).plan(price), price)
    plans = (frozenset(p) for n in range(len(places) + 1) for p in itertools.combinations(places, n))
    best = min(price_of(problem, plan, price) for plan in plans)
    assert found <= best * (1 + 1e-6) + 1e-6


@given(graphs())
def test_the_estimate_is_the_peak_of_the_rewritten_graph(graph):
    problem = RematProblem.of(graph)
    for candidate in ParetoFront(problem).candidates:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        for old, new in zip(graph.nodes, copy.nodes, strict=True):
            new.meta = dict(old.meta)
        recompute(copy, problem, candidate.plan)
        copy.lint()
        assert timeline(copy).peak == candidate.peak == peak_of(problem, candidate.plan)


@given(graphs())
def test_cheaper_plans_have_higher_peaks(graph):
    front = ParetoFront(RematProblem.of(graph)).candidates
    assert [c.cost for c in front] == sorted((c.cost for c in front), reverse=True)
    assert [c.peak for c in front] == sorted(c.peak for c in front)


def test_anchors_are_where_the_forward_is_narrow():
    sizes = [100, 100, 1, 100, 100, 1, 100, 100, 1]
    problem = RematProblem.of(make_graph(sizes, [(i, i) for i in range(9)], [True] * 9))
    assert 3 in segment_counts(problem) or 2 in segment_counts(problem)
    found = {problem.nodes[i].meta["val"].numel() for i in Anchors(problem).of(3)}
    assert found == {1}
