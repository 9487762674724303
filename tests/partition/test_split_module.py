"""split_module agrees with torch's in children, names, wiring and options, except where torch's is wrong."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module as torchs_split_module

import wholestep as ws
from partition.splitting import (
    TORCHS_OPTIONS,
    assert_like_torchs,
    by_name,
    call_order,
    children,
    snapshot,
    tensors,
    torchs,
)
from wholestep.partition import Partition, split_module

aten = torch.ops.aten


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.rand(4, 2))
        self.linear = nn.Linear(2, 5)
        self.inner = nn.ModuleList([nn.Linear(2, 5)])

    def forward(self, x, y):
        z = self.linear(x + self.param).clamp(min=0.0, max=1.0)
        return z + self.inner[0](y).clamp(min=0.0, max=1.0)


def every_third():
    count = -1

    def callback(node: fx.Node) -> int:
        nonlocal count
        count += 1
        return count % 3

    return callback


def in_runs(length: int):
    seen: dict[fx.Node, int] = {}
    return lambda node: seen.setdefault(node, len(seen) // length)


def test_the_function_is_exported_with_torchs_signature():
    assert ws.split_module is split_module
    ours, theirs = inspect.signature(split_module).parameters, inspect.signature(torchs_split_module).parameters
    assert [p for p in ours if p in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


OPTIONS = [
    {},
    {"keep_original_order": True},
    {"keep_original_node_name": True},
    {"keep_original_input_name": False},
    {"partition_affix": "pp"},
    {"tuple_return": True},
    {"keep_original_order": True, "keep_original_node_name": True, "partition_affix": "x", "tuple_return": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 100])
def test_children_and_wiring_equal_those_of_torch(options, length):
    if not set(options) <= TORCHS_OPTIONS:
        pytest.skip("this torch has no such option")
    gm = fx.symbolic_trace(Branches())
    for node in gm.graph.nodes:
        node.meta["mark"] = node.name
    callback = in_runs(length)
    ours = split_module(gm, None, callback, **options)
    assert_like_torchs(ours, torchs(gm, callback, **options))
    x, y = tensors(2)
    assert torch.equal(ours(x, y), gm(x, y))
    for child in children(ours).values():
        assert all("mark" in node.meta for node in child.graph.nodes if node.op != "output")


def test_the_callback_is_called_once_per_node():
    gm = fx.symbolic_trace(Branches())
    asked = []
    split = split_module(gm, None, lambda node: asked.append(node) or 0)
    assert asked == [node for node in gm.graph.nodes if node.op.startswith("call")]
    x, y = tensors(2)
    assert torch.equal(split(x, y), gm(x, y))
    assert torch.equal(split_module(gm, None, every_third())(x, y), gm(x, y))


def test_the_callback_is_called_once_per_node_in_graphs_with_mode_switches():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    y = graph.call_function(torch.sin, (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(y)
    asked = []
    split_module(fx.GraphModule({}, graph), None, lambda node: asked.append(node) or len(asked))
    assert len(asked) == len(set(asked)) == 3


def test_the_original_graph_is_not_changed():
    gm = fx.symbolic_trace(Branches())
    before = snapshot(gm)
    split_module(gm, None, in_runs(2), keep_original_node_name=True)
    assert snapshot(gm) == before


def test_placeholders_of_children_can_be_named_by_position():
    class Sums(nn.Module):
        def forward(self, x, a0, a1, b0, b1):
            x = x + (a0**2) + (a1 / 2)
            return x + (b0**2) + (b1 / 2)

    split = split_module(fx.symbolic_trace(Sums()), None, in_runs(4), keep_original_input_name=False)
    args = [torch.tensor(float(i)) for i in (2, 3, 4)]
    assert torch.equal(split.submod_0(*args), split.submod_1(*args))
    for child in children(split).values():
        assert [n.target for n in child.graph.nodes if n.op == "placeholder"] == ["arg_0", "arg_1", "arg_2"]


def test_qualname_map_has_the_original_name_of_each_module():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.inner = nn.ModuleDict({"lin": nn.Linear(4, 4)})

        def forward(self, x):
            x = self.inner["lin"](torch.mm(x, self.weight))
            return self.inner["lin"](torch.mm(x, self.weight))

    qualname_map: dict[str, str] = {}
    gm = fx.symbolic_trace(Twice())
    part = 0

    def callback(node: fx.Node) -> int:
        nonlocal part
        part += node.op == "call_module"
        return part

    split_module(gm, None, callback, qualname_map)
    assert qualname_map == {"submod_1.inner_lin": "inner.lin", "submod_2.inner_lin": "inner.lin"}


def test_a_partition_without_users_is_kept_and_returns_an_empty_tuple():
    def dead(x):
        kept = x * 2
        x + 2
        return kept

    gm = fx.symbolic_trace(dead)
    split = split_module(gm, None, by_name(mul=1, add=2))
    assert call_order(split) == ["submod_1", "submod_2"]
    assert split.submod_2.graph.output_node().args == ((),)
    assert_like_torchs(split, torchs(gm, by_name(mul=1, add=2)))
    assert torch.equal(split(torch.ones(3)), torch.full((3,), 2.0))


def test_default_arguments_and_annotations_of_placeholders_are_preserved():
    def scaled(x, by=3.0):
        return x * by

    scaled.__annotations__ = {"x": torch.Tensor, "by": float}
    gm = fx.symbolic_trace(scaled)
    for options in OPTIONS[:3]:
        split = split_module(gm, None, lambda node: 0, **options)
        assert torch.equal(split(torch.ones(2)), torch.full((2,), 3.0))
        assert [n.type for n in split.graph.nodes if n.op == "placeholder"] == [torch.Tensor, float]


@pytest.mark.parametrize("keep_original_node_name", [False, True])
def test_keyword_arguments_are_expanded(keep_original_node_name):
    class Keywords(nn.Module):
        def forward(self, x, **kwargs):
            return x + kwargs["foo"]

    gm = fx.symbolic_trace(Keywords())
    split = split_module(gm, None, in_runs(1), keep_original_node_name=keep_original_node_name)
    assert len(children(split)) == 2
    x, foo = tensors(2)
    assert torch.equal(split(x, foo=foo), x + foo)


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_a_graph_without_calls_is_unchanged(keep_original_order):
    gm = make_fx(lambda x: (x,))(torch.randn(3))
    split = split_module(gm, None, lambda node: 0, keep_original_order=keep_original_order)
    assert [node.op for node in split.graph.nodes] == ["placeholder", "output"]
    assert torch.equal(split(torch.ones(3))[0], torch.ones(3))


def test_a_function_that_returns_nothing_has_a_child_with_an_output():
    def add_one(x):
        x.add_(1)

    gm = make_fx(add_one)(torch.randn(3))
    split = split_module(gm, None, lambda node: 1)
    assert split.submod_1.graph.output_node().op == "output"
    x = torch.zeros(3)
    assert split(x) is None
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_modules_read_by_a_child_come_after_its_placeholders(keep_original_order):
    root = nn.Module()
    root.outer = nn.Module()
    root.outer.branch = fx.symbolic_trace(nn.ReLU())
    graph = fx.Graph()
    x = graph.placeholder("x")
    branch = graph.get_attr("outer.branch")
    y = graph.placeholder("y")
    first = graph.call_function(lambda a, b: b(a), (x, branch))
    graph.output(graph.call_function(torch.add, (first, y)))
    gm = fx.GraphModule(root, graph)
    split = split_module(gm, None, lambda node: 0, keep_original_order=keep_original_order)
    assert [n.op for n in split.submod_0.graph.nodes][:3] == ["placeholder", "placeholder", "get_attr"]
    assert split.submod_0.outer.branch is root.outer.branch
    a, b = tensors(2)
    assert torch.equal(split(a, b), a.relu() + b)


def test_attributes_keep_their_names_types_and_persistence():
    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.weight = nn.Parameter(torch.ones(2))
            self.inner.register_buffer("kept", torch.ones(2))
            self.inner.register_buffer("lost", torch.ones(2), persistent=False)

        def forward(self, x):
            return x * self.inner.weight + self.inner.kept - self.inner.lost

    model = State()
    gm = fx.symbolic_trace(model)
    gm.inner.register_buffer("lost", gm.inner.lost, persistent=False)
    split = split_module(gm, None, in_runs(1))
    assert split.inner.weight is model.inner.weight
    assert dict(split.named_parameters()).keys() == {"inner.weight"}
    assert dict(split.named_buffers()).keys() == {"inner.kept", "inner.lost"}
    assert split.state_dict().keys() == {"inner.weight", "inner.kept"}
    assert torch.equal(split(torch.ones(2)), torch.ones(2))


def test_a_dotted_name_and_the_same_name_with_underscores_do_not_collide():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleDict({"b": nn.Linear(2, 2)})
            self.a_b = nn.Linear(2, 2)

        def forward(self, x):
            return self.a_b(self.a["b"](x))

    gm = fx.symbolic_trace(Both())
    x = torch.randn(3, 2)
    names: dict[str, str] = {}
    split = split_module(gm, None, lambda node: 0, names)
    assert torch.equal(split(x), gm(x))
    assert names == {"submod_0.a_b": "a.b", "submod_0.a_b_1": "a_b"}


def test_an_attribute_named_like_a_child_does_not_collide():
    root = nn.Module()
    root.submod_0 = nn.Linear(2, 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.mul, (x, graph.get_attr("submod_0.weight")))
    graph.output(graph.call_module("submod_0", (y,)))
    gm = fx.GraphModule(root, graph)
    names: dict[str, str] = {}
    split = split_module(gm, None, lambda node: 0, names)
    a = torch.randn(2, 2)
    assert torch.equal(split(a), gm(a))
    assert names == {"submod_0.submod_0": "submod_0", "submod_0_weight": "submod_0.weight"}
    again = split_module(split, None, lambda node: 0)
    assert torch.equal(again(a), gm(a))


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_mode_are_preserved(training):
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train(training))
    gm.train(training)
    split = split_module(gm, None, in_runs(1))
    assert split.training is training
    assert [child.training for child in children(split).values()] == [training, training]
    x = torch.randn(3, 2)
    torch.manual_seed(3)
    expected = gm(x)
    torch.manual_seed(3)
    assert torch.equal(split(x), expected)


def test_calls_and_getitems_carry_the_metadata_of_their_nodes():
    gm = make_fx(lambda x, y: ((x + y).relu(), (x * y).cos()), tracing_mode="fake")(*tensors(2))
    split = split_module(gm, None, lambda node: int(node.target in (aten.relu.default, aten.cos.default)))
    first, second = (n for n in split.graph.nodes if n.op == "call_module")
    assert [tuple(v.shape) for v in first.meta["val"]] == [(4, 2), (4, 2)]
    assert len(second.meta["val"]) == 2
    parts = [n for n in split.graph.nodes if n.target is operator.getitem]
    assert parts
    assert all(n.meta["val"] is n.args[0].meta["val"][n.args[1]] for n in parts)
    alone = split_module(gm, None, lambda node: int(node.target is not aten.add.Tensor))
    call = next(n for n in alone.graph.nodes if n.op == "call_module")
    assert tuple(call.meta["val"].shape) == (4, 2)


def test_a_partition_that_only_has_effects_survives_dead_code_elimination():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.add_.Tensor, (x, 1.0))
    y = graph.call_function(aten.mul.Tensor, (x, 2.0))
    graph.call_function(torch._assert, (True, "never"))
    graph.output(y)
    split = split_module(fx.GraphModule({}, graph), None, in_runs(1))
    split.graph.eliminate_dead_code()
    assert call_order(split) == ["submod_0", "submod_1", "submod_2"]
    split.recompile()
    assert torch.equal(split(torch.zeros(2)), torch.full((2,), 2.0))


def test_a_partition_that_calls_a_module_with_effects_survives_too():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.add_.Tensor, (x, 1.0))
    graph.output(graph.call_function(aten.mul.Tensor, (x, 2.0)))
    once = split_module(fx.GraphModule({}, graph), None, in_runs(1))
    twice = split_module(once, None, in_runs(1))
    twice.graph.eliminate_dead_code()
    assert call_order(twice) == ["submod_0", "submod_1"]
    assert torch.equal(fx.Interpreter(twice).run(torch.zeros(2)), torch.full((2,), 2.0))


def test_attributes_of_an_unowned_graph_are_looked_up_in_the_given_module():
    gm = fx.symbolic_trace(Branches())
    gm.graph.owning_module = None
    x, y = tensors(2)
    assert torch.equal(split_module(gm, None, in_runs(2))(x, y), gm(x, y))


def test_numpy_integers_are_accepted():
    numpy = pytest.importorskip("numpy")
    gm = fx.symbolic_trace(Branches())
    assert children(split_module(gm, None, lambda node: numpy.int64(4))).keys() == {"submod_4"}


def test_a_split_module_can_be_copied_pickled_printed_and_split_again():
    gm = fx.symbolic_trace(Branches())
    split = split_module(gm, None, in_runs(2))
    x, y = tensors(2)
    expected = gm(x, y)
    assert torch.equal(copy.deepcopy(split)(x, y), expected)
    assert torch.equal(copy.copy(split)(x, y), expected)
    assert torch.equal(pickle.loads(pickle.dumps(split))(x, y), expected)
    assert "submod_1" in split.code
    assert "add" in split.submod_0.print_readable(print_output=False)
    assert torch.equal(split_module(split, None, in_runs(2))(x, y), expected)
    assert torch.equal(split(x, y), expected)


def test_children_that_are_edited_run_as_edited():
    gm = fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    split = split_module(gm, None, in_runs(1))
    x = torch.tensor([-1.0, 1.0])
    assert torch.equal(split(x), torch.tensor([1.0, 2.0]))
    next(n for n in split.submod_0.graph.nodes if n.op == "call_function").target = torch.neg
    split.submod_0.recompile()
    assert torch.equal(split(x), torch.tensor([2.0, 0.0]))
    assert isinstance(split.submod_1, fx.GraphModule)
    assert type(split.submod_0) is not type(split.submod_1)


def test_hooks_of_a_child_run_for_that_child_only():
    split = split_module(fx.symbolic_trace(lambda x: torch.relu(x) + 1), None, in_runs(1))
    seen = []
    split.submod_0.register_forward_hook(lambda module, args, result: seen.append(module))
    split(torch.ones(2))
    assert seen == [split.submod_0]


def test_partition_has_torchs_fields():
    partition = Partition("pp_3")
    assert (partition.name, partition.submod_name) == ("pp_3", "submod_pp_3")
    assert (partition.node_names, partition.inputs, partition.outputs) == ([], {}, {})
    assert (partition.dependencies, partition.dependents) == ({}, {})
    assert "partitions depended on: {}" in repr(partition)


def test_replaced_inputs_come_in_the_order_of_torch():
    gm = fx.symbolic_trace(lambda a, b, c: torch.cat([a, b, c]) + torch.cat([c, a]))
    a, _, c = (n for n in gm.graph.nodes if n.op == "placeholder")
    cat = next(n for n in gm.graph.nodes if n.target is torch.cat)
    cat.replace_input_with(a, c)
    gm.recompile()
    callback = in_runs(1)
    assert_like_torchs(split_module(gm, None, callback), torchs(gm, callback))
