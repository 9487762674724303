"""What torch's tests of `split_module` and of the partitioner ask for, with the prefix of the imports changed."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.infra import partitioner as torchs
from torch.fx.passes.operator_support import OperatorSupport

from wholestep.compat.fx.partitioner import CapabilityBasedPartitioner, Partition, fuse_by_partitions
from wholestep.compat.fx.split_module import split_module, split_module_simple
from wholestep.errors import PartitionError


class Adds(OperatorSupport):
    """Additions, views and items."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and node.target in (operator.add, operator.getitem, torch.transpose)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        add = a + b
        linear = self.linear(add)
        add_1 = linear + c
        add_2 = add_1 + self.weight
        add_3 = add_1 + linear
        add_4 = add_2 + add_3
        relu = add_4.relu()
        return (add_4 + relu) + 1


def forked(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = a + b
    y = x + c
    left, right = (x + 1).relu(), (y + 2) + x
    return (left + right) + 1


def chain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    for other in (b, c, b, c):
        a = a + other
    return a


def alone(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (((a + b).relu() + c).relu() * c).relu() + (b + c + b)


GRAPHS: dict[str, Any] = {"layers": Layers(), "forked": forked, "chain": chain, "alone": alone}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", ["layers", "chain", "alone"])
def test_partitions_are_those_of_torch_in_its_order(name: str, single: bool) -> None:
    traced = fx.symbolic_trace(GRAPHS[name])
    found = CapabilityBasedPartitioner(traced, Adds(), allows_single_node_partition=single).propose_partitions()
    theirs = torchs.CapabilityBasedPartitioner(traced, Adds(), allows_single_node_partition=single).propose_partitions()
    assert [list(each.nodes) for each in found] == [list(each.nodes) for each in theirs]
    assert all(isinstance(each, Partition) for each in found)


def test_a_node_that_is_free_to_choose_goes_into_the_earlier_partition() -> None:
    """torch puts it into the later one; there are as many partitions, the last of the graph first."""
    traced = fx.symbolic_trace(forked)
    found = CapabilityBasedPartitioner(traced, Adds()).propose_partitions()
    theirs = torchs.CapabilityBasedPartitioner(traced, Adds()).propose_partitions()
    assert len(found) == len(theirs) == 2
    assert [[node.name for node in each.nodes] for each in found] == [
        ["add_5", "add_6"],
        ["add", "add_1", "add_2", "add_3", "add_4"],
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_fused_graphs_compute_the_same(name: str) -> None:
    traced = fx.symbolic_trace(GRAPHS[name])
    expected = copy.deepcopy(traced)(*inputs())
    partitioner = CapabilityBasedPartitioner(traced, Adds())
    count = len(partitioner.propose_partitions())
    fused = partitioner.partition_and_fuse()
    assert fused is traced
    assert sum(str(node.target).startswith("fused_") for node in fused.graph.nodes) == count
    torch.testing.assert_close(fused(*inputs()), expected)


def turned(a: Tensor, b: Tensor) -> Tensor:
    a = torch.transpose(a, 0, 1)
    total = torch.transpose(a, 0, 1) + b
    return torch.transpose(total + a, 0, 1)


def test_nodes_that_do_not_compute_leave_the_borders_of_a_partition() -> None:
    traced = fx.symbolic_trace(turned)
    options: dict[str, Any] = {"non_compute_ops": ["torch.transpose"]}
    ours = CapabilityBasedPartitioner(traced, Adds(), **options)
    theirs = torchs.CapabilityBasedPartitioner(traced, Adds(), **options)
    found, wanted = ours.propose_partitions(), theirs.propose_partitions()
    assert [list(each.nodes) for each in found] == [list(each.nodes) for each in wanted]
    ours.remove_bookend_non_compute_ops(found)
    theirs.remove_bookend_non_compute_ops(wanted)
    assert [set(each.nodes) for each in found] == [set(each.nodes) for each in wanted]
    assert [node.name for node in found[0].nodes] == ["add", "add_1"]
    expected = turned(*inputs()[:2])
    torch.testing.assert_close(ours.fuse_partitions(found)(*inputs()[:2]), expected)


def test_a_node_may_stand_alone_where_that_is_allowed() -> None:
    def one(a: Tensor) -> Tensor:
        return (a + 1).relu()

    traced = fx.symbolic_trace(one)
    assert CapabilityBasedPartitioner(traced, Adds()).propose_partitions() == []
    allowed = CapabilityBasedPartitioner(traced, Adds(), allowed_single_node_partition_ops=["_operator.add"])
    assert len(allowed.propose_partitions()) == 1


def test_partitions_may_be_edited() -> None:
    graph = fx.symbolic_trace(chain).graph
    adds = [node for node in graph.nodes if node.op == "call_function"]
    partition = Partition(id=3, nodes=adds[:2], node_orders=[7, 8])
    partition.add_node(adds[2])
    partition.remove_node(adds[0])
    assert partition.size() == 2
    assert partition.nodes == {adds[1]: 8, adds[2]: None}
    assert str(partition) == str(partition.nodes)
    with pytest.raises(AssertionError, match="same length"):
        Partition(nodes=adds, node_orders=[1])


@pytest.mark.parametrize("always", [False, True])
def test_nodes_are_fused_by_any_sets_of_them(always: bool) -> None:
    traced = fx.symbolic_trace(forked)
    expected = forked(*inputs())
    by_name = {node.name: node for node in traced.graph.nodes}
    sets = [{by_name["add_3"]: None, by_name["add_4"]: None}, dict.fromkeys([by_name["add"], by_name["add_1"]])]
    fused = fuse_by_partitions(traced, sets, prefix="part_", always_return_tuple=always)
    assert [str(node.target) for node in fused.graph.nodes if node.op == "call_module"] == ["part_1", "part_0"]
    torch.testing.assert_close(fused(*inputs()), expected)
    single = fused.part_0(*inputs()[:2])
    assert isinstance(single, tuple) is always


def test_sets_that_need_each_other_are_refused() -> None:
    traced = fx.symbolic_trace(forked)
    by_name = {node.name: node for node in traced.graph.nodes}
    with pytest.raises(PartitionError, match="found dependency cycles"):
        fuse_by_partitions(traced, [[by_name["add_2"], by_name["add_5"]]])


def test_a_graph_is_split_by_a_callback_and_names_are_mapped() -> None:
    traced = fx.symbolic_trace(Layers())
    names: dict[str, str] = {}
    counts: dict[str, int] = {}

    def by_turns(node: fx.Node) -> int:
        counts["nodes"] = counts.get("nodes", 0) + 1
        return min(counts["nodes"] // 3, 2)

    split = split_module(traced, Layers(), by_turns, names, keep_original_order=True)
    assert sorted(name for name, _ in split.named_children()) == ["submod_0", "submod_1", "submod_2"]
    assert names == {"submod_0.linear": "linear"}
    torch.testing.assert_close(split(*inputs()), traced(*inputs()))


def test_a_graph_is_split_by_a_mapping() -> None:
    traced = fx.symbolic_trace(chain)
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    split = split_module_simple(traced, {node: i // 2 for i, node in enumerate(calls)}, partition_affix="part")
    assert [name for name, _ in split.named_children()] == ["submod_part_0", "submod_part_1"]
    torch.testing.assert_close(split(*inputs()), chain(*inputs()))
