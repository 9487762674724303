"""Partitions of supported nodes: no cycles, a minimal number, and equal results when fused."""

from __future__ import annotations

import inspect
import operator
from itertools import combinations

import pytest
import torch
from hypothesis import given
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

import wholestep as ws
from cases.parts import train_step
from partition.random_graphs import Drawn, drawn_graphs, quotient_has_cycle
from wholestep.errors import PartitionError
from wholestep.partition import SupportedPartitions, fuse_partitions, partition_by_support, split_module


class Support(OperatorSupportBase):
    def __init__(self, supported):
        self.supported = supported

    def is_node_supported(self, submodules, node):
        return node in self.supported


def torchs(drawn: Drawn, **options) -> list[list[fx.Node]]:
    options.setdefault("allows_single_node_partition", True)
    found = CapabilityBasedPartitioner(drawn.gm, Support(drawn.supported), **options).propose_partitions()
    return [list(partition.nodes) for partition in found]


def ours(drawn: Drawn, **options) -> SupportedPartitions:
    return partition_by_support(drawn.gm, drawn.supported.__contains__, **options)


def groups(partitions) -> dict[fx.Node, int]:
    return {node: i for i, nodes in enumerate(partitions) for node in nodes}


def assert_sound(drawn: Drawn, found: SupportedPartitions) -> None:
    graph = drawn.gm.graph
    inside = [node for partition in found for node in partition.nodes]
    assert len(inside) == len(set(inside))
    assert not quotient_has_cycle(graph, groups(partition.nodes for partition in found))
    # The numbers of all groups, supported or not, are an order in which they can run.
    for node in graph.nodes:
        assert all(found(source) <= found(node) for source in node.all_input_nodes)
    for partition in found:
        assert {found(node) for node in partition.nodes} == {partition.id}
        assert list(partition.nodes) == [node for node in graph.nodes if node in set(partition.nodes)]
    assert {node for node in graph.nodes if found(node) in found.supported_ids and node.op.startswith("call")} == set(
        inside
    )


def fewest(drawn: Drawn) -> int:
    """The smallest number of partitions without a cycle, by trying all of them."""
    nodes = [node for node in drawn.gm.graph.nodes if node in drawn.supported]

    def place(i: int, parts: list[list[fx.Node]], best: int) -> int:
        if len(parts) >= best:
            return best
        if i == len(nodes):
            return best if quotient_has_cycle(drawn.gm.graph, groups(parts)) else len(parts)
        for j in range(len(parts) + 1):
            tried = [list(part) for part in parts] + ([[]] if j == len(parts) else [])
            tried[j].append(nodes[i])
            best = place(i + 1, tried, best)
        return best

    return place(0, [], len(nodes) + 1) if nodes else 0


@given(drawn_graphs())
def test_every_supported_node_is_in_one_partition_and_there_are_no_cycles(drawn):
    found = ours(drawn)
    assert_sound(drawn, found)
    assert {node for partition in found for node in partition.nodes} == drawn.supported


@given(drawn_graphs())
def test_there_are_no_more_partitions_than_torch_finds(drawn):
    assert len(ours(drawn)) <= len(torchs(drawn))


@given(drawn_graphs(largest=8))
def test_the_number_of_partitions_is_minimal(drawn):
    assert len(ours(drawn)) == fewest(drawn)


@given(drawn_graphs())
def test_no_two_partitions_could_be_merged(drawn):
    parts = [partition.nodes for partition in ours(drawn)]
    for a, b in combinations(parts, 2):
        merged = [part for part in parts if part not in (a, b)] + [a + b]
        assert quotient_has_cycle(drawn.gm.graph, groups(merged))


@given(drawn_graphs(tuples=True))
def test_nodes_that_unpack_a_tuple_stay_with_its_producer(drawn):
    found = ours(drawn)
    assert_sound(drawn, found)
    inside = {node for partition in found for node in partition.nodes}
    for node in drawn.gm.graph.nodes:
        if node.target is operator.getitem:
            assert found(node) == found(node.args[0])
            assert (node in inside) == (node.args[0] in drawn.supported)
        elif node.op.startswith("call"):
            assert (node in inside) == (node in drawn.supported)
    theirs = torchs(drawn)
    if not quotient_has_cycle(drawn.gm.graph, groups(theirs)):
        assert len(found) <= len(theirs)


@given(drawn_graphs(tuples=True))
def test_a_fused_graph_computes_the_same(drawn):
    expected = drawn.run()
    found = ours(drawn)
    fuse_partitions(drawn.gm, found)
    drawn.gm.graph.lint()
    assert sum(node.op == "call_module" for node in drawn.gm.graph.nodes) == len(found)
    torch.testing.assert_close(drawn.run(), expected, rtol=0, atol=0)


@given(drawn_graphs(effects=True))
def test_writes_reads_and_random_ops_keep_their_order_when_fused(drawn):
    expected = drawn.run()
    found = ours(drawn)
    assert_sound(drawn, found)
    fuse_partitions(drawn.gm, found)
    torch.testing.assert_close(drawn.run(), expected, rtol=0, atol=0)


@given(drawn_graphs(tuples=True))
def test_partitions_without_horizontal_fusion_are_connected(drawn):
    found = ours(drawn, skip_horizontal_fusion=True)
    assert_sound(drawn, found)
    for partition in found:
        inside = set(partition.nodes)
        reached, stack = set(), [partition.nodes[0]]
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack += [other for other in (*node.users, *node.all_input_nodes) if other in inside]
        assert reached == inside


@given(drawn_graphs(tuples=True, effects=True))
def test_without_horizontal_fusion_effects_keep_their_order_too(drawn):
    expected = drawn.run()
    found = ours(drawn, skip_horizontal_fusion=True)
    assert_sound(drawn, found)
    fuse_partitions(drawn.gm, found)
    torch.testing.assert_close(drawn.run(), expected, rtol=0, atol=0)


@given(drawn_graphs())
def test_groups_can_run_in_order_after_partitions_are_dissolved(drawn):
    found = ours(drawn, min_nodes=3)
    assert_sound(drawn, found)
    assert all(len(partition.nodes) >= 3 for partition in found)
    large = {node for p in ours(drawn) if len(p.nodes) >= 3 for node in p.nodes}
    assert {node for partition in found for node in partition.nodes} == large


@given(drawn_graphs(tuples=True))
def test_the_result_is_a_callback_for_torchs_split_module(drawn):
    from torch.fx.passes.split_module import split_module

    expected = drawn.run()
    split = split_module(drawn.gm, drawn.gm, ours(drawn))
    torch.testing.assert_close(Drawn(split, drawn.supported, drawn.inputs).run(), expected, rtol=0, atol=0)


@given(drawn_graphs(tuples=True, effects=True))
def test_the_result_is_a_callback_for_our_split_module(drawn):
    expected = drawn.run()
    found = ours(drawn)
    split = split_module(drawn.gm, drawn.gm, found)
    torch.testing.assert_close(Drawn(split, drawn.supported, drawn.inputs).run(), expected, rtol=0, atol=0)


def test_write_backs_of_a_captured_step_come_after_all_reads():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    step = ws.capture(ws.compile(train_step), model, optimizer, torch.randn(3, 4))
    found = partition_by_support(step, lambda node: "mm" not in node.name)
    calls = [node for node in step.gm.graph.nodes if node.op == "call_function"]
    inside = {node for partition in found for node in partition.nodes if node.op == "call_function"}
    glued = {node for node in calls if node.target is operator.getitem}
    assert inside - glued == {node for node in calls if "mm" not in node.name} - glued
    assert not quotient_has_cycle(step.gm.graph, groups(partition.nodes for partition in found))
    writes = [node for node in calls if node.target is torch.ops.aten.copy_.default]
    for write in writes:
        readers = [user for user in write.args[0].users if user is not write and user.op == "call_function"]
        assert all(found(reader) <= found(write) for reader in readers)
    assert writes


def traced(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def by_name(gm, *names):
    nodes = {node.name: node for node in gm.graph.nodes}
    return [nodes[name] for name in names]


def names(found):
    return [[node.name for node in partition.nodes] for partition in found]


def test_an_unsupported_node_separates_two_partitions_and_its_bypass_joins_one():
    def fn(x):
        a = x.sin()
        return a.tan().cos() + a.exp()

    gm = traced(fn, torch.randn(3))
    found = partition_by_support(gm, lambda node: "tan" not in node.name)
    assert names(found) == [["sin", "exp"], ["cos", "add"]]
    assert [partition.id for partition in found] == [0, 2]
    assert found(by_name(gm, "tan")[0]) == 1


def test_nodes_that_depend_on_inputs_alone_move_to_their_first_user():
    def fn(x, w):
        return x.sin().tan().cos() @ w.to(torch.float64)

    gm = traced(fn, torch.randn(3, 3).double(), torch.randn(3, 3))
    found = partition_by_support(gm, lambda node: "tan" not in node.name)
    assert names(found) == [["sin"], ["cos", "_to_copy", "mm"]]


def test_the_predicate_is_called_once_per_node_except_inputs_and_output():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    asked = []
    partition_by_support(gm, lambda node: bool(asked.append(node.name)))
    assert asked == ["_0", "_1"]


def test_torchs_operator_support_is_accepted_and_sees_the_submodules():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))

    class Linears(OperatorSupportBase):
        def is_node_supported(self, submodules, node):
            return node.op == "call_module" and isinstance(submodules[node.target], nn.Linear)

    assert names(partition_by_support(gm, Linears())) == [["_0"], ["_2"]]


@pytest.mark.parametrize("min_nodes", [0, 2])
def test_single_nodes_are_kept_or_dissolved_as_by_torch(min_nodes):
    def fn(x):
        return x.sin().cos().tan().neg().tan().exp().log()

    gm = traced(fn, torch.randn(3))
    supported = frozenset(n for n in gm.graph.nodes if n.op == "call_function" and "tan" not in n.name)
    drawn = Drawn(gm, supported, 1)
    theirs = torchs(drawn, allows_single_node_partition=min_nodes == 0)
    assert sorted(names(ours(drawn, min_nodes=min_nodes))) == sorted([n.name for n in part] for part in theirs)


def test_named_targets_do_not_count_as_nodes_that_compute():
    gm = traced(lambda x: x.sin().cos().tan().exp().log(), torch.randn(3))
    kept = partition_by_support(
        gm, lambda node: "tan" not in node.name, min_nodes=2, non_compute_ops=[torch.ops.aten.cos]
    )
    assert names(kept) == [["exp", "log"]]


def test_without_horizontal_fusion_independent_nodes_stay_apart():
    gm = traced(lambda x, y: (x.sin().cos(), y.exp().log()), torch.randn(3), torch.randn(3))
    assert len(partition_by_support(gm, lambda node: True)) == 1
    apart = partition_by_support(gm, lambda node: True, skip_horizontal_fusion=True)
    assert names(apart) == [["sin", "cos"], ["exp", "log"]]


@pytest.mark.skipif(
    "skip_horizontal_fusion" not in inspect.signature(CapabilityBasedPartitioner.__init__).parameters,
    reason="this torch has no such option",
)
def test_without_horizontal_fusion_a_value_joins_its_only_user():
    def fn(x):
        return x.sin().exp().tan().cos() + x.neg().exp()

    gm = traced(fn, torch.randn(3))
    supported = frozenset(n for n in gm.graph.nodes if n.op == "call_function" and "tan" not in n.name)
    drawn = Drawn(gm, supported, 1)
    assert len(ours(drawn, skip_horizontal_fusion=True)) <= len(torchs(drawn, skip_horizontal_fusion=True)) == 2


def test_collectives_keep_their_order_without_data_flow():
    comm = torch.ops._c10d_functional
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    a = graph.call_function(torch.ops.aten.sin.default, (x,))
    first = graph.call_function(comm.all_reduce.default, (a, "sum", "0"))
    done = graph.call_function(comm.wait_tensor.default, (first,))
    second = graph.call_function(comm.all_reduce.default, (y, "sum", "0"))
    late = graph.call_function(comm.wait_tensor.default, (second,))
    b = graph.call_function(torch.ops.aten.cos.default, (late,))
    graph.output((done, b))
    found = partition_by_support(graph, lambda node: node in (a, b, second))
    assert found(first) < found(second)
    # Without the order the second all-reduce would have come with `a`, before the first one.
    assert [list(partition.nodes) for partition in found] == [[a], [second], [b]]


def test_a_read_of_a_view_does_not_move_past_the_write():
    def fn(x):
        a = x.clone()
        row = a[0]
        before = row.sin()
        a.add_(1.0)
        return before.cos() + row.exp()

    gm = traced(fn, torch.randn(2, 3))
    expected = gm(torch.ones(2, 3))
    found = partition_by_support(gm, lambda node: node.target is not torch.ops.aten.add_.Tensor)
    write = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.add_.Tensor)
    assert found(by_name(gm, "sin")[0]) < found(write) < found(by_name(gm, "exp")[0])
    assert torch.equal(fuse_partitions(gm, found)(torch.ones(2, 3)), expected)


def test_no_node_moves_past_a_grad_mode_switch():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.sin, (x,))
    off = graph.call_function(torch._C._set_grad_enabled, (False,))
    b = graph.call_function(torch.cos, (x,))
    on = graph.call_function(torch._C._set_grad_enabled, (True,))
    c = graph.call_function(torch.exp, (x,))
    graph.output((a, b, c))
    gm = fx.GraphModule(nn.Module(), graph)
    found = partition_by_support(gm, lambda node: node in (a, b, c))
    assert [found(node) for node in (a, off, b, on, c)] == [0, 1, 2, 3, 4]
    grads = [result.requires_grad for result in fuse_partitions(gm, found)(torch.randn(2, requires_grad=True))]
    assert grads == [True, False, True]


@pytest.mark.parametrize("effect", [nn.Dropout(0.5), nn.BatchNorm1d(3), nn.ReLU(inplace=True)])
def test_modules_with_effects_fuse_to_the_same_result(effect):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.effect, self.other = effect, nn.Dropout(0.3)

        def forward(self, x):
            a = x.sin()
            b = self.effect(a)
            return self.other(x).cos() + a.exp() + b

    gm = fx.symbolic_trace(Model())
    x = torch.randn(4, 3)
    torch.manual_seed(1)
    expected = gm(x)
    found = partition_by_support(gm, lambda node: node.target != "effect")
    torch.manual_seed(1)
    assert torch.equal(fuse_partitions(gm, found)(x), expected)


def test_a_partition_that_only_writes_is_kept_and_marked_as_having_effects():
    def fn(x, y):
        x.copy_(y.sin())
        return y.tan()

    gm = make_fx(fn)(torch.randn(3), torch.randn(3))
    found = partition_by_support(gm, lambda node: "tan" not in node.name)
    fuse_partitions(gm, found)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    x, y = torch.zeros(3), torch.randn(3)
    gm(x, y)
    assert torch.equal(x, y.sin())


def test_fused_modules_carry_values_and_share_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    gm = make_fx(model, tracing_mode="real")(torch.randn(2, 3))
    x = torch.randn(2, 3)
    expected = gm(x)
    fuse_partitions(gm, partition_by_support(gm, lambda node: "tanh" not in node.name), prefix="part_")
    assert [node.name for node in gm.graph.nodes if node.op == "call_module"] == ["part_0", "part_1"]
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_module")
    assert torch.equal(gm(x), expected)


def test_a_graph_without_supported_nodes_has_no_partition():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    found = partition_by_support(gm, lambda node: False)
    assert len(found) == 0
    assert set(found.assignment.values()) == {0}
    assert set(found.assignment) == set(gm.graph.nodes)


def test_errors_of_the_predicate_name_the_node():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    def raising(node):
        raise KeyError("no rule")

    with pytest.raises(PartitionError, match=r"KeyError: 'no rule'(.|\n)*node  _0"):
        partition_by_support(gm, raising)
    with pytest.raises(PartitionError, match=r"returned None for _0"):
        partition_by_support(gm, lambda node: None)
    with pytest.raises(PartitionError, match="must be a function of a node"):
        partition_by_support(gm, "relu")
    with pytest.raises(PartitionError, match="min_nodes"):
        partition_by_support(gm, lambda node: True, min_nodes=-1)
    with pytest.raises(PartitionError, match="an object of type list has no graph to cut"):
        partition_by_support([], lambda node: True)


def test_a_malformed_graph_is_refused_and_the_node_named():
    gm = fx.symbolic_trace(lambda x: x.sin().cos())
    sin, cos = by_name(gm, "sin", "cos")
    cos.append(sin)
    with pytest.raises(PartitionError, match="cos uses sin, which is not defined before it"):
        partition_by_support(gm, lambda node: True)


def test_fusing_refuses_a_taken_name_and_partitions_of_another_graph():
    gm = fx.symbolic_trace(lambda x: x.sin().cos())
    other = fx.symbolic_trace(lambda x: x.sin().cos())
    found = partition_by_support(gm, lambda node: True)
    with pytest.raises(PartitionError, match="another graph"):
        fuse_partitions(other, found)
    gm.fused_0 = nn.ReLU()
    with pytest.raises(PartitionError, match="attribute fused_0 already"):
        fuse_partitions(gm, found)


@pytest.mark.parametrize("cond_is_supported", [True, False])
def test_bodies_of_cond_are_read_where_they_are_called(cond_is_supported):
    """A body is not a value: no partition takes or returns it, whatever the predicate returns."""

    def f(x):
        y = (x * 2).tanh()
        return torch.cond(x.sum() > 0, lambda a: (a + 1).sin(), lambda a: a.cos(), (y,)) + 1

    gm = make_fx(f, tracing_mode="fake")(torch.randn(3))
    found = partition_by_support(gm, lambda n: cond_is_supported or n.target is not torch.ops.higher_order.cond)
    assert all(node.op == "call_function" for partition in found for node in partition.nodes)
    fuse_partitions(gm, found)
    gm.graph.lint()
    graphs = [gm.graph, *(child.graph for name, child in gm.named_children() if name.startswith("fused_"))]
    (cond,) = (n for g in graphs for n in g.find_nodes(op="call_function", target=torch.ops.higher_order.cond))
    assert [arg.op for arg in cond.args[1:3]] == ["get_attr", "get_attr"]
    assert (cond.graph is gm.graph) is not cond_is_supported
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(gm(x), f(x))
