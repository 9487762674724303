"""Children are called in a stable order that preserves writes, random ops and side effects, or an error is raised."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from partition.splitting import by_name, call_order, tensors
from wholestep.errors import SplitCycleError, SplitOrderError
from wholestep.partition import split_module
from wholestep.partition.call_order import find_cycle, stable_order

aten = torch.ops.aten


def module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(nn.Module(), graph)


def test_independent_parts_are_called_in_the_order_of_their_first_nodes():
    gm = fx.symbolic_trace(lambda x: (x.sin(), x.cos(), x.tan()))
    assert call_order(split_module(gm, None, by_name(sin=5, cos=2, tan=9))) == ["submod_5", "submod_2", "submod_9"]


def test_a_partition_follows_what_it_needs_and_nothing_else_moves():
    gm = fx.symbolic_trace(lambda x: (x.sin() + x.cos(), x.tan()))
    split = split_module(gm, None, by_name(sin=0, add=0, cos=1, tan=2))
    assert call_order(split) == ["submod_1", "submod_0", "submod_2"]


def test_a_partition_that_needs_a_later_one_is_called_after_it():
    gm = fx.symbolic_trace(lambda x: x.sin() + x.cos())
    callback = by_name(sin=0, add=0, cos=1)
    split = split_module(gm, None, callback, keep_original_order=True)
    x = torch.randn(3)
    assert torch.equal(split(x), gm(x))


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_an_attribute_that_only_the_output_uses(keep_original_order):
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(2))
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    graph.output((graph.call_function(torch.sin, (x,)), weight))
    split = split_module(fx.GraphModule(root, graph), None, lambda n: 0, keep_original_order=keep_original_order)
    assert split(torch.zeros(2))[1] is root.weight


def test_a_write_and_a_read_keep_their_order():
    graph = fx.Graph()
    x = graph.placeholder("x")
    write = graph.call_function(aten.add_.Tensor, (x, 10.0))
    read = graph.call_function(aten.mul.Tensor, (x, 1.0))
    graph.output(read)
    gm = module(graph)
    number = {write: 0, read: 1}
    split = split_module(gm, None, number.__getitem__)
    assert call_order(split) == ["submod_0", "submod_1"]
    assert torch.equal(split(torch.full((1,), 10.0)), torch.full((1,), 20.0))


@pytest.mark.parametrize("make_view", [lambda x: x.view(-1), lambda x: x[0], lambda x: x.t().t(), lambda x: x.detach()])
@pytest.mark.parametrize("trace", [fx.symbolic_trace, lambda f: make_fx(f)(torch.zeros(2, 2))], ids=["fx", "make_fx"])
def test_a_write_through_a_view_and_a_read_of_the_whole_keep_their_order(make_view, trace):
    def step(x):
        x = x + 0
        view = make_view(x)
        view.add_(1)
        return x * 2

    gm = trace(step)
    numbers = {}
    for node in gm.graph.nodes:
        numbers[node] = 1 if node.target in (aten.mul.Tensor, aten.add.Tensor) or node.name in ("add", "mul") else 0
    with pytest.raises(SplitOrderError):
        split_module(gm, None, numbers.__getitem__)  # the write is in between
    last = {node: int(node is list(gm.graph.nodes)[-2]) for node in gm.graph.nodes}
    for callback in (last.__getitem__, lambda node: 1 - last[node]):
        split = split_module(gm, None, callback)
        assert torch.equal(split(torch.ones(2, 2)), gm(torch.ones(2, 2)))


def test_a_view_made_before_a_write_may_be_in_the_partition_behind_it():
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.view.default, (x, [-1]))
    write = graph.call_function(aten.add_.Tensor, (x, 10.0))
    graph.output(graph.call_function(aten.mul.Tensor, (view, 2.0)))
    split = split_module(module(graph), None, lambda node: 0 if node is write else 1)
    assert call_order(split) == ["submod_0", "submod_1"]
    assert torch.equal(split(torch.zeros(2)), torch.full((2,), 20.0))


def test_two_reads_of_a_buffer_alias():
    root = nn.Module()
    root.register_buffer("count", torch.zeros(1))
    graph = fx.Graph()
    x = graph.placeholder("x")
    write = graph.call_method("add_", (graph.get_attr("count"), 1.0))
    graph.output(graph.call_function(torch.add, (x, graph.get_attr("count"))))
    split = split_module(fx.GraphModule(root, graph), None, lambda node: 5 if node is write else 3)
    assert call_order(split) == ["submod_5", "submod_3"]
    assert torch.equal(split(torch.zeros(1)), torch.ones(1))


def test_the_statistics_of_a_batch_norm_are_updated_in_order():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x, y):
            return self.norm(x), self.norm(y)

    x, y = tensors(2)
    model = Twice()
    expected = Twice()
    expected(x, y)
    split_module(fx.symbolic_trace(model), None, by_name(norm=7, norm_1=1))(x, y)
    assert torch.equal(model.norm.running_mean, expected.norm.running_mean)


RANDOM = {
    "function": lambda x: (torch.rand_like(x), torch.nn.functional.dropout(x, 0.5, True), torch.bernoulli(x.sigmoid())),
    "method": lambda x: (x.clone().normal_(), x.clone().uniform_(), x.sigmoid().bernoulli()),
}


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("trace", [fx.symbolic_trace, lambda f: make_fx(f)(torch.zeros(2, 2))], ids=["fx", "make_fx"])
def test_random_ops_keep_their_order(kind, trace):
    gm = trace(RANDOM[kind])
    # Each result with all that it needs alone in a partition, the last one with the least number.
    number: dict[fx.Node, int] = {}
    for i, result in enumerate(gm.graph.output_node().args[0]):
        stack = [result]
        while stack:
            node = stack.pop()
            if node not in number:
                number[node] = 9 - i
                stack += node.all_input_nodes
    x = torch.full((2, 2), 0.3)
    torch.manual_seed(4)
    expected = gm(x)
    torch.manual_seed(4)
    assert all(map(torch.equal, split_module(gm, None, number.__getitem__)(x), expected))


def test_random_ops_that_would_be_reordered_are_an_error_that_names_both():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.5))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = model[0], model[2]

        def forward(self, x):
            return self.first(x) + self.second(x).sin()

    gm = fx.symbolic_trace(Two())
    callback = by_name(first=1, second=0, sin=0, add=1)
    with pytest.raises(SplitOrderError, match=r"first must run before second") as caught:
        split_module(gm, None, callback)
    assert isinstance(caught.value, RuntimeError)
    assert "%first in submod_1" in str(caught.value)
    gm.eval()
    x = torch.randn(3, 2)
    assert torch.equal(split_module(gm, None, callback)(x), gm(x))  # nothing is drawn


def test_operators_without_randomness_may_be_reordered():
    graph = fx.Graph()
    x = graph.placeholder("x")
    attention = aten.scaled_dot_product_attention.default
    first = graph.call_function(aten.dropout.default, (x, 0.5, False))
    second = graph.call_function(attention, (x, x, x))
    graph.output(graph.call_function(aten.add.Tensor, (first, second)))
    split = split_module(module(graph), None, lambda node: int(node is not second))
    assert call_order(split) == ["submod_0", "submod_1"]
    split = split_module(module(graph), None, lambda node: int(node is second))
    assert call_order(split) == ["submod_1", "submod_0"]


def test_dropout_in_eval_mode_returns_its_argument_and_a_write_to_it_is_a_write():
    graph = fx.Graph()
    x = graph.placeholder("x")
    copy = graph.call_function(aten.clone.default, (x,))
    same = graph.call_function(aten.dropout.default, (copy, 0.5, False))
    write = graph.call_function(aten.add_.Tensor, (same, 1.0))
    graph.output(graph.call_function(aten.mul.Tensor, (copy, 2.0)))
    numbers = {copy: 0, same: 1, write: 1}
    split = split_module(module(graph), None, lambda node: numbers.get(node, 2))
    assert call_order(split) == ["submod_0", "submod_1", "submod_2"]
    with pytest.raises(SplitOrderError):
        split_module(module(graph), None, lambda node: numbers.get(node, 0))


def test_functional_batch_norm_writes_its_statistics():
    def step(x, mean, var):
        return torch.nn.functional.batch_norm(x, mean, var, training=True), mean * 2

    x = torch.randn(4, 2)
    split = split_module(fx.symbolic_trace(step), None, by_name(batch_norm=1, mul=0))
    assert call_order(split) == ["submod_1", "submod_0"]
    gm = fx.symbolic_trace(lambda x, m, v: (m + 1, torch.nn.functional.batch_norm(x, m, v, training=True), m * 2))
    with pytest.raises(SplitOrderError):
        split_module(gm, None, by_name(batch_norm=1))
    mean = torch.zeros(2)
    assert torch.equal(split(x, mean, torch.ones(2))[1], step(x, torch.zeros(2), torch.ones(2))[1])


def test_random_ops_in_branches_of_cond_keep_their_order():
    def step(flag, x):
        draw = torch.cond(flag, lambda x: torch.rand_like(x), lambda x: x.sin(), (x,))
        return draw, torch.rand_like(x)

    args = (torch.tensor(True), torch.zeros(2))
    gm = torch.export.export(Wrapped(step), args).module()
    rand = [node for node in gm.graph.nodes if "rand_like" in str(node.target)][-1]
    split = split_module(gm, None, lambda node: int(node is not rand))
    assert call_order(split)[0] == "submod_1"
    torch.manual_seed(3)
    expected = gm(*args)
    torch.manual_seed(3)
    assert all(map(torch.equal, split(*args), expected))


class Wrapped(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.forward = function


def test_side_effects_keep_their_order(capsys):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(print, ("one",))
    graph.call_function(print, ("two",))
    graph.output(x)
    split = split_module(module(graph), None, by_name(print_1=3, print_2=1))
    split(torch.zeros(1))
    assert capsys.readouterr().out == "one\ntwo\n"


def test_asserts_and_waits_may_be_reordered():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch._assert, (x, "first"))
    later = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch._assert, (later, "second"))
    graph.output(graph.call_function(torch.cos, (later,)))
    number = {first: 1, second: 0, later: 0}
    split = split_module(module(graph), None, lambda node: number.get(node, 1))
    assert call_order(split) == ["submod_0", "submod_1"]


def test_collectives_keep_their_order():
    ops = torch.ops._c10d_functional
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = [graph.call_function(ops.all_reduce.default, (x, "sum", "0")) for _ in range(2)]
    waits = [graph.call_function(ops.wait_tensor.default, (each,)) for each in reversed(sums)]
    graph.output(tuple(waits))
    number = {sums[0]: 8, sums[1]: 4, waits[0]: 4, waits[1]: 8}
    assert call_order(split_module(module(graph), None, number.__getitem__)) == ["submod_8", "submod_4"]


def test_an_impossible_order_names_the_write_and_the_read():
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(aten.mul.Tensor, (x, 2.0))
    write = graph.call_function(aten.add_.Tensor, (x, 1.0))
    graph.output(graph.call_function(aten.sub.Tensor, (x, before)))
    with pytest.raises(SplitOrderError) as caught:
        split_module(module(graph), None, lambda node: int(node is write))
    assert f"{write.name} must run before" in str(caught.value) or f"before {write.name}" in str(caught.value)


def test_a_cycle_is_shown_with_its_partitions_and_nodes():
    gm = fx.symbolic_trace(lambda x: x.sin().cos().tan().neg())
    callback = by_name(sin=0, cos=1, tan=2, neg=0)
    with pytest.raises(RuntimeError, match="cycle exists between partitions!") as caught:
        split_module(gm, None, callback)
    assert isinstance(caught.value, SplitCycleError)
    text = str(caught.value)
    assert "submod_0 -> submod_1 -> submod_2 -> submod_0" in text
    for line in ("sin -> cos in submod_1", "cos -> tan in submod_2", "tan -> neg in submod_0"):
        assert line in text


def test_a_long_cycle_is_shortened():
    gm = fx.symbolic_trace(lambda x: sum_of_many(x))
    count = sum(node.op.startswith("call") for node in gm.graph.nodes)
    numbers = {n: i % (count - 1) for i, n in enumerate(n for n in gm.graph.nodes if n.op.startswith("call"))}
    with pytest.raises(SplitCycleError) as caught:
        split_module(gm, None, numbers.__getitem__)
    assert "more ..." in str(caught.value)
    assert len(str(caught.value).splitlines()) < 16


def sum_of_many(x):
    for _ in range(30):
        x = x.sin()
    return x


def test_the_order_is_by_first_node_of_those_that_are_ready():
    assert stable_order([[], [], []]) == [0, 1, 2]
    assert stable_order([[], [0], []]) == [1, 0, 2]
    assert stable_order([[1], [2], []]) == [0, 1, 2]
    assert stable_order([[1], [0], []]) == [2]


def test_a_cycle_is_found_among_other_partitions():
    after = [[1], [2], [3], [1, 4], [5], []]
    assert find_cycle(after, stable_order(after)) == [1, 2, 3]


POSITIONAL = {
    "batch norm": lambda x, m, v: (m + 1, torch.nn.functional.batch_norm(x, m, v, None, None, True), m * 2),
    "torch.batch_norm": lambda x, m, v: (m + 1, torch.batch_norm(x, v, v, m, v, True, 0.1, 1e-5, False), m * 2),
    "instance norm": lambda x, m, v: (m + 1, torch.nn.functional.instance_norm(x, m, v), m * 2),
    "in place": lambda x, m, v: (m + 1, torch.nn.functional.hardtanh(m, -1.0, 0.0, True), m * 2),
    "embedding": lambda x, m, v: (m + 1, torch.nn.functional.embedding(x, m, None, 1.0), m * 2),
}


@pytest.mark.parametrize("kind", POSITIONAL)
def test_a_positional_inplace_flag_counts_as_a_write(kind):
    gm = fx.symbolic_trace(POSITIONAL[kind])
    written = [node for node in gm.graph.nodes if node.op == "call_function"][1]
    with pytest.raises(SplitOrderError, match=f"{written.name} must run before mul|add must run before {written.name}"):
        split_module(gm, None, lambda node: int(node is written))


def test_a_positional_inplace_flag_of_false_allows_reordering():
    functional = torch.nn.functional
    gm = fx.symbolic_trace(
        lambda x, m, v: (
            functional.dropout(x, 0.5, False),
            functional.batch_norm(x, m, v, None, None, False),
            functional.relu6(m, False),
            functional.dropout(m, 0.5, False),
        )
    )
    split = split_module(gm, None, by_name(batch_norm=1, relu6=1))
    assert call_order(split) == ["submod_0", "submod_1"]


class Holding(nn.Module):
    """A module, and its state under names of its own."""

    def __init__(self, part: nn.Module, name: str) -> None:
        super().__init__()
        self.part, self.name = part, name
        self.tied = getattr(part, name)


STATE = {
    "statistics": (lambda: nn.BatchNorm1d(2), "running_mean", torch.randn(4, 2)),
    "embedding": (lambda: nn.Embedding(4, 2, max_norm=0.1), "weight", torch.arange(4)),
}


@pytest.mark.parametrize("name", ["part.state", "tied"])
@pytest.mark.parametrize("kind", STATE)
def test_state_that_a_module_updates_is_read_in_order(kind, name):
    make, state, x = STATE[kind]

    def graph_module() -> fx.GraphModule:
        torch.manual_seed(0)
        graph = fx.Graph()
        given = graph.placeholder("x")
        called = graph.call_module("part", (given,))
        read = graph.call_function(torch.mul, (graph.get_attr(name.replace("state", state)), 2))
        graph.output((called, read))
        return fx.GraphModule(Holding(make(), state), graph)

    split = split_module(graph_module(), None, by_name(part=1, mul=0))
    assert call_order(split) == ["submod_1", "submod_0"]
    torch.testing.assert_close(split(x), graph_module()(x))


def test_a_tensor_with_two_names_aliases_and_modules_read_parameters():
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_module("part", (x,))
    write = graph.call_method("mul_", (graph.get_attr("tied"), 0.0))
    after = graph.call_module("part", (x,))
    read = graph.call_function(torch.add, (graph.get_attr("part.weight"), 1.0))
    graph.output((before, after, read))
    gm = fx.GraphModule(Holding(nn.Linear(2, 2).requires_grad_(False), "weight"), graph)
    numbers = {before: 3, write: 2, after: 1, read: 0}
    assert call_order(split_module(gm, None, numbers.get)) == ["submod_3", "submod_2", "submod_1", "submod_0"]
    with pytest.raises(SplitOrderError, match=r"part must run before mul_|mul_ must run before part_1"):
        split_module(gm, None, lambda node: int(node is write))


def test_no_node_moves_past_a_switch_that_children_cannot_repeat():
    mode = torch.autograd.grad_mode
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.add, (x, 1.0))
    guard = graph.call_function(mode._enter_inference_mode, (True,))
    inside = graph.call_function(torch.mul, (x, 2.0))
    leave = graph.call_function(mode._exit_inference_mode, (guard,))
    last = graph.call_function(torch.sub, (x, 3.0))
    graph.output((first, inside, last))
    gm = fx.GraphModule(nn.Module(), graph)
    split = split_module(gm, None, {first: 4, guard: 3, inside: 2, leave: 1, last: 0}.get)
    assert [value.is_inference() for value in split(torch.ones(2))] == [False, True, False]
    with pytest.raises(SplitOrderError):
        split_module(gm, None, {first: 0, guard: 1, inside: 0, leave: 1, last: 0}.get)


class Turned(nn.Module):
    def forward(self, x):
        return x.t()


@pytest.mark.parametrize(
    "make_view",
    [
        lambda x: torch.einsum("ij->ji", x),
        lambda x: torch.linalg.diagonal(x),
        lambda x: torch.conj_physical(x),
        lambda x: nn.functional.alpha_dropout(x, 0.5, False),
        lambda x: aten.slice(x, 0, 1, 2),
        lambda x: aten.einsum.default("ij->ji", [x]),
        lambda x: +x,
        nn.Sequential(nn.Flatten(0)),
        nn.Sequential(nn.Sequential(Turned())),
    ],
    ids=["einsum", "diagonal", "conj", "alpha_dropout", "packet", "overload", "plus", "flatten", "own module"],
)
def test_results_that_may_alias_are_read_after_the_write(make_view):
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.make_view = make_view

        def forward(self, x):
            y = x * 2
            view = self.make_view(y)
            y.add_(1)
            return view * 3

    class WholeModules(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return True

    root = Step()
    gm = fx.GraphModule(root, WholeModules().trace(root))
    with pytest.raises(SplitOrderError):
        split_module(gm, None, lambda node: int(node.name == "add_"))
    cut = {node: int(node.name in ("add_", "mul_1")) for node in gm.graph.nodes}
    assert torch.equal(split_module(gm, None, cut.__getitem__)(torch.ones(2, 2)), gm(torch.ones(2, 2)))
