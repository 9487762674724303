"""Balanced cuts are optimal and never separate nodes that must stay together; errors name the node."""

from __future__ import annotations

import math
import operator
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from partition.random_graphs import Drawn, drawn_graphs
from wholestep.errors import CutError, PartitionError
from wholestep.partition import balanced_cut, split_module
from wholestep.partition.balanced_cut import find_pieces
from wholestep.partition.bottleneck import fewest_runs, fits


class AllCuts:
    """Every cut of a graph into runs of nodes, and what it costs, straight from the definition."""

    def __init__(self, gm, cost, size, seconds_per_byte):
        self.inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.cost, self.size, self.seconds_per_byte = cost, size, seconds_per_byte

    def entering(self, start):
        def is_used_later(node):
            return any(self.place.get(user, -1) >= start for user in node.users)

        return sum(self.size[node] for node in self.nodes[:start] if is_used_later(node))

    def kept(self, start, end):
        run = self.nodes[start:end]
        used = [node for node in self.inputs if any(user in run for user in node.users)]
        return self.entering(start) + sum(self.size[node] for node in (*run, *used))

    def value(self, bounds):
        entering = [self.entering(start) for start in bounds[:-1]]
        sums = [sum(self.cost[node] for node in self.nodes[start:end]) for start, end in pairwise(bounds)]
        costs = [s + self.seconds_per_byte * e for s, e in zip(sums, entering, strict=True)]
        return max(costs), sum(entering)

    def best(self, k, max_bytes=math.inf):
        last = len(self.nodes)
        cuts = [(0, *chosen, last) for chosen in combinations(range(1, last), k - 1)]
        fitting = [cut for cut in cuts if all(self.kept(a, b) <= max_bytes for a, b in pairwise(cut))]
        return min((self.value(cut) for cut in fitting), default=None)


@st.composite
def cases(draw):
    drawn = draw(drawn_graphs(largest=9))
    nodes = list(drawn.gm.graph.nodes)
    amounts = st.integers(0, 9)
    cost = {node: float(draw(amounts)) for node in nodes}
    size = {node: draw(amounts) for node in nodes}
    calls = sum(node.op.startswith("call") for node in nodes)
    return drawn.gm, cost, size, draw(st.integers(1, min(4, calls))), draw(st.sampled_from([0.0, 0.5, 2.0]))


@given(cases())
def test_the_cut_is_optimal_and_ties_are_broken_by_bytes(case):
    gm, cost, size, k, seconds_per_byte = case
    found = balanced_cut(gm, k, cost, seconds_per_byte=seconds_per_byte, value_bytes=size.__getitem__)
    every = AllCuts(gm, cost, size, seconds_per_byte)
    assert (found.slowest, sum(found.bytes_crossing)) == every.best(k)
    assert [node for part in found.partitions for node in part] == every.nodes
    starts = [0, *(every.place[node] for node in found.cuts), len(every.nodes)]
    assert every.value(starts) == (found.slowest, sum(found.bytes_crossing))
    assert [tuple(every.nodes[a:b]) for a, b in pairwise(starts)] == list(found.partitions)


@given(cases(), st.integers(0, 60))
def test_no_partition_holds_more_than_max_bytes_and_the_cut_is_optimal(case, max_bytes):
    gm, cost, size, k, seconds_per_byte = case
    every = AllCuts(gm, cost, size, seconds_per_byte)
    best = every.best(k, max_bytes)
    options = {"seconds_per_byte": seconds_per_byte, "value_bytes": size.__getitem__}
    if best is not None:
        found = balanced_cut(gm, k, cost, max_bytes, **options)
        assert (found.slowest, sum(found.bytes_crossing)) == best
        starts = [0, *(every.place[node] for node in found.cuts), len(every.nodes)]
        assert list(found.bytes_kept) == [every.kept(a, b) for a, b in pairwise(starts)]
        assert max(found.bytes_kept) <= max_bytes
        return
    with pytest.raises(CutError) as error:
        balanced_cut(gm, k, cost, max_bytes, **options)
    needed = int(error.value.fix.split("smallest max_bytes is ")[1].split(";")[0].rstrip("."))
    assert every.best(k, needed) is not None
    assert every.best(k, needed - 1) is None
    if "works" in error.value.fix:
        advised = int(error.value.fix.split("k=")[-1].split()[0])
        assert every.best(advised, max_bytes) is not None
        assert all(every.best(fewer, max_bytes) is None for fewer in range(1, advised))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=7), st.integers(1, 7))
def test_the_fewest_runs_within_a_reach_equal_those_of_brute_force(steps, k):
    reach = np.array([min(i + step, len(steps)) for i, step in enumerate(steps)])

    def possible(count):
        inner = combinations(range(1, len(steps)), count - 1)
        return any(all(b <= reach[a] for a, b in pairwise((0, *cut, len(steps)))) for cut in inner)

    assert fits(reach, k) == possible(k)
    assert fewest_runs(reach) == next((count for count in range(1, len(steps) + 1) if possible(count)), None)


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=9), st.integers(1, 3))
def test_arbitrary_float_costs_give_the_optimum_up_to_rounding(costs, k):
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in costs:
        value = graph.call_function(torch.sin, (value,))
    graph.output(value)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = balanced_cut(graph, k, dict(zip(calls, costs, strict=True)))
    inner = combinations(range(1, len(costs)), k - 1)
    best = min(max(sum(costs[a:b]) for a, b in pairwise((0, *cut, len(costs)))) for cut in inner)
    assert found.slowest == pytest.approx(best, rel=1e-9, abs=1e-9)


@given(drawn_graphs(tuples=True, effects=True), st.integers(1, 4))
def test_the_cut_is_a_callback_for_split_module_and_results_are_equal(drawn, k):
    expected = drawn.run()
    k = min(k, len(find_pieces(list(drawn.gm.graph.nodes))))
    found = balanced_cut(drawn.gm, k, lambda node: 1.0)
    split = split_module(drawn.gm, drawn.gm, found)
    torch.testing.assert_close(Drawn(split, drawn.supported, drawn.inputs).run(), expected, rtol=0, atol=0)
    for node in drawn.gm.graph.nodes:
        assert all(found(source) <= found(node) for source in node.all_input_nodes if source.op != "placeholder")
        if node.target is operator.getitem:
            assert found(node) == found(node.args[0])


def traced(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def layers(count=8, width=16):
    model = nn.Sequential(*(each for _ in range(count) for each in (nn.Linear(width, width), nn.ReLU())))
    weights = dict(model.named_parameters())
    return traced(lambda weights, x: functional_call(model, weights, x), weights, torch.randn(4, width))


def test_equal_layers_are_cut_into_equal_stages_and_sizes_come_from_the_values():
    gm = layers()
    found = balanced_cut(gm, 4, lambda node: 1.0 if "mm" in node.name else 0.0)
    assert found.costs == (2.0, 2.0, 2.0, 2.0)
    assert found.bytes_crossing == (4 * 16 * 4,) * 3


def test_a_cut_goes_where_few_bytes_cross_if_bytes_have_a_cost():
    def fn(x):
        wide = x.repeat(1, 100).sin()
        return wide.sum(1).cos().exp()

    gm = traced(fn, torch.randn(4, 4))
    heavy = {node.name: 4.0 if node.name == "sin" else 1.0 for node in gm.graph.nodes}
    free = balanced_cut(gm, 2, heavy)
    assert (free.costs, free.bytes_crossing) == ((5.0, 3.0), (6400,))
    priced = balanced_cut(gm, 2, heavy, seconds_per_byte=1e-3)
    assert (priced.costs, priced.bytes_crossing) == ((6.0, 2.016), (16,))


def test_a_value_that_skips_a_partition_crosses_both_cuts():
    graph = fx.Graph()
    x = graph.placeholder("x")
    skip = graph.call_function(torch.sin, (x,))
    middle = graph.call_function(torch.cos, (x,))
    graph.output(graph.call_function(torch.add, (skip, middle)))
    found = balanced_cut(graph, 3, lambda node: 1.0, value_bytes=lambda node: 100 if node is skip else 1)
    assert found.bytes_crossing == (100, 101)


def test_costs_can_be_a_mapping_by_node_or_by_name():
    gm = layers(2)
    by_name = {node.name: float(i) for i, node in enumerate(gm.graph.nodes)}
    by_node = {node: by_name[node.name] for node in gm.graph.nodes}
    assert balanced_cut(gm, 2, by_name) == balanced_cut(gm, 2, by_node) == balanced_cut(gm, 2, by_node.__getitem__)


def test_a_tuple_is_not_cut_from_distant_nodes_that_unpack_it():
    def fn(x):
        values, places = x.max(0)
        return values.sin().cos().exp() + places

    gm = traced(fn, torch.randn(4, 4))
    part = next(node for node in gm.graph.nodes if node.target is operator.getitem and node.args[1] == 1)
    gm.graph.output_node().prev.prepend(part)
    for k in range(1, 6):
        found = balanced_cut(gm, k, lambda node: 1.0)
        assert found(part) == found(part.args[0]) == 0
    with pytest.raises(CutError, match=r"at most 5 partitions, not 6; .* 3 nodes, max_1 to getitem_1"):
        balanced_cut(gm, 6, lambda node: 1.0)


def test_a_collective_and_its_wait_stay_together():
    comm, aten = torch.ops._c10d_functional, torch.ops.aten
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.sin.default, (x,))
    started = graph.call_function(comm.all_reduce.default, (first, "sum", "0"))
    between = graph.call_function(aten.cos.default, (x,))
    done = graph.call_function(comm.wait_tensor.default, (started,))
    graph.output((done, graph.call_function(aten.add.Tensor, (between, done))))
    found = balanced_cut(graph, 3, lambda node: 1.0)
    assert [len(part) for part in found.partitions] == [1, 3, 1]
    with pytest.raises(CutError, match="at most 3 partitions"):
        balanced_cut(graph, 4, lambda node: 1.0)


@pytest.mark.parametrize("mode", ["grad", "autocast"])
def test_a_region_of_a_mode_is_cut_only_if_asked_for(mode):
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.sin, (x,))
    if mode == "grad":
        graph.call_function(torch._C._set_grad_enabled, (False,))
    else:
        entered = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    b = graph.call_function(torch.cos, (a,))
    c = graph.call_function(torch.exp, (b,))
    if mode == "grad":
        graph.call_function(torch._C._set_grad_enabled, (True,))
    else:
        graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
    graph.output(graph.call_function(torch.neg, (c,)))
    found = balanced_cut(graph, 3, lambda node: 1.0)
    assert [len(part) for part in found.partitions] == [1, 4, 1]
    assert len(balanced_cut(graph, 6, lambda node: 1.0, cut_inside_modes=True).partitions) == 6


def test_parameters_of_modules_and_constants_count_once_for_each_partition():
    shared = nn.Linear(8, 8)
    gm = fx.symbolic_trace(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 4)))
    sizes = {"value_bytes": lambda node: 0}
    weights, last = (64 + 8) * 4, (32 + 4) * 4
    assert balanced_cut(gm, 1, lambda node: 1.0, 10**6, **sizes).bytes_kept == (weights + last,)
    found = balanced_cut(gm, 2, lambda node: 1.0, weights, **sizes)
    assert found.bytes_kept == (weights, last)
    with pytest.raises(CutError, match=f"smallest max_bytes is {weights}"):
        balanced_cut(gm, 2, lambda node: 1.0, weights - 1, **sizes)


def test_a_piece_larger_than_max_bytes_is_named():
    gm = layers(2, width=64)
    with pytest.raises(
        CutError,
        match=r"addmm\S* and the nodes that are not cut from it hold \d+ alone(.|\n)*smallest max_bytes is \d+",
    ):
        balanced_cut(gm, 2, lambda node: 1.0, 1000)


def test_an_infeasible_k_suggests_a_feasible_one():
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(6):
        value = graph.call_function(torch.sin, (value,))
    graph.output(value)
    with pytest.raises(CutError, match="with this max_bytes, k=6 works"):
        balanced_cut(graph, 2, lambda node: 1.0, 20, value_bytes=lambda node: 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be a number of partitions"),
        ({"k": 2.0}, "k must be a number of partitions"),
        ({"k": True}, "k must be a number of partitions"),
        ({"max_bytes": -1}, "max_bytes must be"),
        ({"seconds_per_byte": math.nan}, "seconds_per_byte must be"),
        ({"seconds_per_byte": "fast"}, "seconds_per_byte must be"),
        ({"cost": 3.0}, "cost must be a function"),
        ({"cost": lambda node: -1.0}, r"cost of sin is -1.0(.|\n)*node  sin"),
        ({"cost": lambda node: math.nan}, "cost of sin is nan"),
        ({"cost": lambda node: math.inf}, "cost of sin is inf"),
        ({"cost": lambda node: 10**400}, "cost of sin is 10000"),
        ({"cost": lambda node: None}, "cost of sin is None"),
        ({"cost": lambda node: 1 / 0}, "cost raised ZeroDivisionError"),
        ({"cost": {"sin": 1.0}}, "cost has no entry for cos"),
        ({"cost": lambda node: 1e308}, "overflows a float"),
        ({"value_bytes": lambda node: -4}, "value_bytes returned -4 for sin"),
        ({"value_bytes": lambda node: 1 / 0}, "value_bytes raised ZeroDivisionError"),
        ({"seconds_per_byte": 1.0}, "the size of sin is not known"),
        ({"max_bytes": 100}, "the size of sin is not known"),
    ],
)
def test_invalid_arguments_are_refused_and_the_node_named(options, message):
    gm = fx.symbolic_trace(lambda x: x.sin().cos().exp())
    with pytest.raises(PartitionError, match=message):
        balanced_cut(gm, **{"k": 2, "cost": lambda node: 1.0, **options})


def test_a_malformed_graph_is_refused():
    gm = fx.symbolic_trace(lambda x: x.sin().cos())
    next(node for node in gm.graph.nodes if node.name == "cos").append(
        next(node for node in gm.graph.nodes if node.name == "sin")
    )
    with pytest.raises(PartitionError, match="cos uses sin"):
        balanced_cut(gm, 2, lambda node: 1.0)


def test_a_graph_without_nodes_cannot_be_cut():
    with pytest.raises(CutError, match="at most 0 partitions"):
        balanced_cut(fx.symbolic_trace(lambda x: x), 1, lambda node: 1.0)
