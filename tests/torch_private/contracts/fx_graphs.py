"""What wholestep relies on in `torch_private/fx_graphs.py`."""

from __future__ import annotations

import copy
import operator
import warnings
from typing import Any

import torch
from torch import fx, nn

from torch_private.contract_table import contracts_of
from wholestep.torch_private import fx_graphs

of = contracts_of("fx_graphs")
aten = torch.ops.aten


def graph_of_two_calls() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    graph.output((graph.call_function(aten.add.Tensor, (doubled, x), {"alpha": 3}),))
    return graph


@of("pytree", "pytree_children")
def containers_of_users_are_taken_apart_one_level_at_a_time() -> None:
    tree = {"a": [1, 2], "b": (3, {"c": None})}
    assert fx_graphs.pytree_children(tree) == [[1, 2], (3, {"c": None})]
    assert fx_graphs.pytree_children(3) is None
    leaves, spec = fx_graphs.pytree.tree_flatten(tree)
    assert leaves == [1, 2, 3, None]
    assert fx_graphs.pytree.tree_unflatten(leaves, spec) == tree
    assert fx_graphs.pytree.tree_map(lambda leaf: leaf and leaf + 1, tree) == {"a": [2, 3], "b": (4, {"c": None})}
    fx_graphs.pytree.register_pytree_node(_Pair, lambda pair: (list(pair.both), None), lambda both, _: _Pair(*both))
    try:
        assert fx_graphs.pytree_children(_Pair(5, 6)) == [5, 6]
    finally:
        fx_graphs.pytree._deregister_pytree_node(_Pair)


class _Pair:
    def __init__(self, *both: int) -> None:
        self.both = both


@of("NODE_ARGUMENTS", "NODE_KEYWORDS", "NODE_SOURCES", "NodeTable")
def the_slots_of_a_node_are_what_its_properties_say() -> None:
    graph = graph_of_two_calls()
    nodes = list(graph.nodes)
    for node in nodes:
        assert fx_graphs.NODE_ARGUMENTS(node) == node.args
        assert fx_graphs.NODE_KEYWORDS(node) == node.kwargs
        assert list(fx_graphs.NODE_SOURCES(node)) == node.all_input_nodes
    table = fx_graphs.NodeTable(nodes)
    assert table.is_current()
    x, _, added, _ = nodes
    assert table.parts(added).kwargs == {"alpha": 3}
    added.args = (x, x)
    assert not table.is_current()
    assert list(table.changed()) == [added]


@of("call_targets")
def a_graph_indexes_its_calls_by_target() -> None:
    graph = graph_of_two_calls()
    assert set(fx_graphs.call_targets(graph)) == {aten.mul.Tensor, aten.add.Tensor}
    added = graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    added.target = aten.sub.Tensor
    assert set(fx_graphs.call_targets(graph)) == {aten.mul.Tensor, aten.sub.Tensor}


class _Nested(nn.Module):
    def forward(self, pair: Any) -> Any:
        return {"sum": pair[0] + pair[1]}


@of("has_plain_codegen", "codegen_of", "keep_calling_convention", "copy_codegen")
def the_code_generator_of_a_graph_has_its_pytrees() -> None:
    plain = fx.GraphModule({}, graph_of_two_calls())
    assert fx_graphs.has_plain_codegen(plain.graph)
    traced = torch.export.export(_Nested(), ([torch.ones(2), torch.ones(2)],)).module()
    assert not fx_graphs.has_plain_codegen(traced.graph)
    copied = fx.Graph()
    copied.output(copied.graph_copy(traced.graph, {}))
    fx_graphs.copy_codegen(traced.graph, copied)
    other = fx.GraphModule(traced, copied)
    assert fx_graphs.codegen_of(copied).pytree_info == fx_graphs.codegen_of(traced.graph).pytree_info
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own specs warn when they are copied
        bare = fx.GraphModule(traced, copy.deepcopy(copied))
    fx_graphs.keep_calling_convention(traced, bare)
    bare.recompile()
    for module in (other, bare):
        assert module([torch.ones(2), torch.ones(2)])["sum"].tolist() == [2, 2]
    before = bare.graph
    fx_graphs.keep_calling_convention(plain, bare)
    assert bare.graph is before


@of("lazy_graph_module", "light_graph_module")
def graph_modules_generate_code_at_the_first_call() -> None:
    lazy = fx_graphs.lazy_graph_module({}, graph_of_two_calls(), "Mine")
    light = fx_graphs.light_graph_module(graph_of_two_calls(), training=False)
    usual = fx.GraphModule({}, graph_of_two_calls())
    assert type(lazy).__name__ == "Mine"
    assert set(vars(usual)) - {"_code", "_lineno_map", "_prologue_start"} == set(vars(light))
    assert not light.training
    for module in (lazy, light):
        assert "_code" not in vars(module)
        assert module(torch.ones(1))[0].tolist() == [5]
        assert module.code == usual.code
    assert copy.deepcopy(light)(torch.ones(1))[0].tolist() == [5]


@of("ASSERTIONS")
def checks_of_a_condition_are_these_functions() -> None:
    for function in fx_graphs.ASSERTIONS:
        function(torch.tensor(True), "never")
    graph = graph_of_two_calls()
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch._assert, (True, "never"))
    assert not graph.eliminate_dead_code()


@of("name_of_target", "qualified_name")
def targets_have_a_short_and_a_long_name() -> None:
    graph = fx.Graph()
    for target in (aten.view.default, operator.getitem, torch.sin):
        made = graph.call_function(target, ())
        assert fx_graphs.name_of_target(target).replace(".", "_") == made.name
    assert fx_graphs.qualified_name(aten.view.default) == "torch.ops.aten.view.default"
    assert fx_graphs.qualified_name(operator.getitem) == "_operator.getitem"


@of("GraphWriter")
def a_written_graph_is_the_one_that_create_node_makes() -> None:
    graph, writer = graph_of_two_calls(), fx_graphs.GraphWriter()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
        new[node] = writer.add(node.op, node.target, args, kwargs, node.name, node.type, {"val": 3})
    assert str(writer.graph) == str(graph)
    assert len(writer.graph.nodes) == len(graph.nodes)
    assert all(node.meta == {"val": 3} for node in writer.graph.nodes)
    writer.graph.lint()
    assert [n.name for n in writer.graph.find_nodes(op="call_function", target=aten.add.Tensor)] == ["add_tensor"]
    again = writer.add("call_function", aten.add.Tensor, (), {}, "add_tensor", None, None)
    assert again.name == "add_tensor_1"
    assert list(new[next(iter(graph.nodes))].users) == [new[n] for n in list(graph.nodes)[1:3]]
    assert fx.GraphModule({}, writer.graph)(torch.ones(1))[0].tolist() == [5]


@of("mark_impure", "is_marked_impure")
def calls_of_a_marked_module_are_not_dead() -> None:
    root = nn.Module()
    root.child = nn.Identity()
    assert not fx_graphs.is_marked_impure(root.child)
    fx_graphs.mark_impure(root.child)
    assert fx_graphs.is_marked_impure(root.child)
    graph = fx.Graph()
    graph.call_module("child", (graph.placeholder("x"),))
    graph.output(None)
    gm = fx.GraphModule(root, graph)
    assert not gm.graph.eliminate_dead_code()
    gm.child._is_impure = False
    assert gm.graph.eliminate_dead_code()
