"""What the effects-and-alias analysis says of whole graphs: aliases, order, windows between writes, storages."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from wholestep.ir.effects import (
    GraphEffects,
    WriteWindows,
    alias_roots,
    aliased_inputs,
    find_storages,
    order_edges,
    read_by,
    sharing_with_outputs,
    written_roots,
)
from wholestep.ir.effects.order import ModuleEffects
from wholestep.torch_private.autograd import SET_GRAD_ENABLED

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Build:
    """Calls operators, functions and methods in one graph."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self.graph = fx.Graph()
        self.root = root or nn.Module()

    def input(self, name: str = "x") -> fx.Node:
        return self.graph.placeholder(name)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if isinstance(target, str):
            return self.graph.call_method(target, args, kwargs)
        return self.graph.call_function(target, args, kwargs)

    def edges(self, around_switches: bool = True) -> dict[fx.Node, list[fx.Node]]:
        nodes = list(self.graph.nodes)
        found = order_edges(nodes, around_switches, GraphEffects(nodes, self.root))
        return {node: earlier for node, earlier in found.items() if earlier}


class TestAliasRoots:
    def test_views_of_views_and_elements_of_lists_share_the_root(self) -> None:
        new = Build()
        x, y = new.input("x"), new.input("y")
        part = new(operator.getitem, new(aten.split.Tensor, x, 2), 0)
        flat = new(aten.view.default, part, [-1])
        other = new(aten.add.Tensor, flat, y)
        found = alias_roots(new.graph.nodes, [x, y])
        assert found[flat] == {x}
        assert found[y] == {y}
        assert other not in found

    def test_a_result_may_share_several_roots(self) -> None:
        new = Build()
        x, y = new.input("x"), new.input("y")
        both = new(torch.meshgrid, [x, y], indexing="ij")
        assert alias_roots(new.graph.nodes, [x, y], aliased_inputs)[both] == {x, y}

    def test_writes_through_views_reach_the_input(self) -> None:
        new = Build()
        x, y, z = new.input("x"), new.input("y"), new.input("z")
        new(aten.add_.Tensor, new(aten.select.int, y, 0, 0), x)
        new(aten.add_.Tensor, new(aten.clone.default, z), x)
        assert written_roots(list(new.graph.nodes), [x, y, z]) == [1]

    def test_functions_that_may_return_an_argument_are_followed_on_request(self) -> None:
        new = Build()
        x = new.input()
        new("add_", new("reshape", x, -1), 1)
        assert written_roots(list(new.graph.nodes), [x]) == []
        assert written_roots(list(new.graph.nodes), [x], aliased_inputs) == [0]

    def test_everything_that_an_output_is_a_view_of_leaves_the_graph(self) -> None:
        new = Build()
        x = new.input()
        made = new(aten.add.Tensor, x, 1)
        view = new(aten.t.default, made)
        new.graph.output((view,))
        assert sharing_with_outputs(new.graph) == {view, made}


class TestOrderEdges:
    def test_a_graph_without_effects_has_no_edges(self) -> None:
        new = Build()
        x = new.input()
        new(aten.add.Tensor, new(aten.view.default, x, [-1]), new("reshape", x, -1))
        assert new.edges() == {}

    @pytest.mark.parametrize(
        "calls",
        [
            ((aten.rand.default, [2]), (torch.rand, 2)),
            ((print, "a"), (print, "b")),
        ],
        ids=["draws", "prints"],
    )
    def test_effects_of_one_kind_are_a_chain(self, calls: Any) -> None:
        new = Build()
        first, second = (new(*each) for each in calls)
        assert new.edges() == {second: [first]}

    def test_collectives_are_a_chain(self) -> None:
        new = Build()
        x = new.input()
        first, second = (new(c10d.all_reduce.default, x, "sum", "0") for _ in range(2))
        new(c10d.wait_tensor.default, first)
        assert new.edges() == {second: [first]}

    def test_reads_stay_on_their_side_of_a_write(self) -> None:
        new = Build()
        x = new.input()
        before = new(aten.add.Tensor, x, 1)
        view = new(aten.view.default, x, [-1])
        write = new(aten.mul_.Tensor, x, 2)
        after = new(aten.add.Tensor, view, 3)
        assert new.edges() == {write: [before], after: [write]}

    @pytest.mark.parametrize("target", [torch.einsum, aten.einsum.default])
    def test_a_result_that_may_be_the_argument_is_read_behind_the_write(self, target: Any) -> None:
        new = Build()
        x = new.input()
        same = new(target, "i->i", [x])
        write = new("add_", x, 1)
        after = new(torch.sin, same)
        assert new.edges() == {write: [same], after: [write]}

    def test_nothing_passes_a_switch_of_grad_mode_unless_it_is_repeated(self) -> None:
        new = Build()
        x = new.input()
        before = new(aten.add.Tensor, x, 1)
        switch = new(SET_GRAD_ENABLED, False)
        after = new(aten.add.Tensor, x, 2)
        assert new.edges() == {switch: [before], after: [switch]}
        assert new.edges(around_switches=False) == {}

    def test_one_attribute_got_twice_is_one_memory(self) -> None:
        root = nn.Module()
        root.register_buffer("count", torch.zeros(1))
        root.other = root.count.view(1)
        new = Build(root)
        write = new("add_", new.graph.get_attr("count"), 1)
        again = new(torch.sin, new.graph.get_attr("count"))
        other = new(torch.sin, new.graph.get_attr("other"))
        assert new.edges() == {again: [write], other: [write]}

    def test_reads_of_the_state_of_a_module_keep_their_side_of_its_call(self) -> None:
        root = nn.Module()
        root.norm = nn.BatchNorm1d(2)
        new = Build(root)
        x = new.input()
        called = new.graph.create_node("call_module", "norm", (x,))
        mean = new(torch.sin, new.graph.get_attr("norm.running_mean"))
        assert new.edges() == {mean: [called]}
        root.eval()
        assert new.edges() == {}

    def test_edges_are_found_in_near_linear_time(self) -> None:
        new = Build()
        value = x = new.input()
        for _ in range(20_000):
            value = new(aten.add.Tensor, value, x)
        write = new(aten.mul_.Tensor, x, 2)
        assert len(new.edges()[write]) == 20_000


class TestModules:
    def test_dropout_draws_in_training_and_may_return_its_argument(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        assert ModuleEffects(module).tokens == ("random",)
        assert ModuleEffects(module.eval()).tokens == ()
        assert ModuleEffects(module).may_alias
        assert ModuleEffects(nn.Dropout(0.0)).tokens == ()

    def test_attention_and_recurrent_networks_draw_if_they_have_dropout(self) -> None:
        assert ModuleEffects(nn.LSTM(2, 2, 2, dropout=0.5)).tokens == ("random",)
        assert ModuleEffects(nn.LSTM(2, 2)).tokens == ()

    def test_modules_of_torch_alias_only_if_they_reshape_or_work_in_place(self) -> None:
        assert not ModuleEffects(nn.Linear(2, 2)).may_alias
        assert ModuleEffects(nn.Identity()).may_alias
        assert ModuleEffects(nn.Flatten()).may_alias
        assert ModuleEffects(nn.ReLU(inplace=True)).may_alias
        assert ModuleEffects(None).may_alias

        class Unknown(nn.Module):
            pass

        assert ModuleEffects(Unknown()).may_alias

    def test_modules_update_their_buffers_in_training_and_embeddings_their_weight(self) -> None:
        assert len(ModuleEffects(nn.BatchNorm1d(2)).updates) == 3
        assert ModuleEffects(nn.BatchNorm1d(2).eval()).updates == []
        assert len(ModuleEffects(nn.Embedding(3, 2, max_norm=1.0).eval()).updates) == 1
        assert ModuleEffects(nn.Embedding(3, 2)).updates == []

    def test_a_graph_inside_of_a_module_has_its_effects(self) -> None:
        traced = fx.symbolic_trace(lambda x: (torch.rand_like(x), x.add_(1)))
        effects = ModuleEffects(nn.Sequential(traced))
        assert effects.tokens == ("random",)
        assert effects.writes

    def test_bodies_of_higher_order_operators_do_what_their_graphs_do(self) -> None:
        root = nn.Module()
        root.body = fx.symbolic_trace(lambda x: torch.rand_like(x))
        new = Build(root)
        x = new.input()
        body = new.graph.get_attr("body")
        called = new(torch.ops.higher_order.cond, True, body, body, [x])
        assert GraphEffects(list(new.graph.nodes), root).tokens == {called: ("random",)}


class TestWriteWindows:
    def test_a_read_lies_between_the_writes_of_its_memory(self) -> None:
        new = Build()
        g, other = new.input("g"), new.input("other")
        view = new(aten.view.default, g, [-1])
        new(aten.mul_.Tensor, view, 0.5)
        new(aten.mul_.Tensor, other, 0.5)
        new(c10d.all_reduce.default, g, "sum", "0")
        new(aten.zero_.default, g)
        nodes = list(new.graph.nodes)
        windows = WriteWindows(nodes, len(nodes))
        assert windows.any
        assert windows.around([g], 5) == (3, 6)
        assert windows.around([other], 5) == (4, math.inf)

    def test_only_what_is_written_counts_not_what_the_writer_reads(self) -> None:
        new = Build()
        x, y = new.input("x"), new.input("y")
        new(aten.add_.Tensor, x, y)
        nodes = list(new.graph.nodes)
        assert WriteWindows(nodes, len(nodes)).around([y], 0) == (-1, math.inf)

    def test_unknown_functions_may_return_what_is_written_later(self) -> None:
        new = Build()
        x = new.input()
        value = new(lambda each: each, x)
        new("zero_", x)
        nodes = list(new.graph.nodes)
        assert WriteWindows(nodes, len(nodes)).around([value], 1) == (-1, 2)

    def test_write_backs_and_functional_graphs_have_no_windows(self) -> None:
        new = Build()
        x = new.input()
        new(aten.copy_.default, x, new(operator.add, new(aten.add.Tensor, x, 1), 1))
        nodes = list(new.graph.nodes)
        assert not WriteWindows(nodes, len(nodes) - 1).any


class TestStorages:
    def test_views_writes_and_unsafe_splits_lie_in_the_storage_of_what_they_show(self) -> None:
        new = Build()
        x = new.input()
        made = new(aten.add.Tensor, x, 1)
        split = new(aten.unsafe_split.Tensor, made, 1)
        part = new(operator.getitem, split, 0)
        written = new(aten.mul_.Tensor, made, 2)
        for node in (x, made, part, written):
            node.meta["val"] = torch.empty(4)
        split.meta["val"] = [torch.empty(1)] * 4
        storages = find_storages(new.graph)
        assert len(storages.size) == 2
        assert storages.seen_by[part] == storages.seen_by[written] == storages.made_by[made]
        assert storages.maker == [x, made]

    def test_an_element_needs_only_itself_in_memory(self) -> None:
        new = Build()
        x = new.input()
        both = new(aten.var_mean.correction, x)
        both.meta["val"] = (torch.empty(3), torch.empty(3))
        mean = new(operator.getitem, both, 1)
        assert read_by(mean) == []
        assert read_by(both) == [x]
        storages = find_storages(new.graph)
        assert storages.seen_by[mean] == storages.made_by[both][1:]
