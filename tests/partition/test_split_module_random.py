"""Random graphs and callbacks: torch's children and results where torch is right, the graph's results in any case."""

from __future__ import annotations

import operator

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from partition.random_graphs import Drawn, drawn_graphs
from partition.splitting import TORCHS_OPTIONS, assert_like_torchs, lines, snapshot, torchs
from wholestep.errors import SplitCycleError, SplitOrderError
from wholestep.partition import split_module


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 0.5))
        self.register_buffer("shift", torch.full((2,), 0.25))
        self.inner = nn.ModuleDict({"linear": nn.Linear(2, 2), "act": nn.Tanh()})
        self.inner_act = nn.Sigmoid()


@st.composite
def graphs(draw: st.DrawFn) -> tuple[fx.GraphModule, int]:
    """Functions, methods, modules, attributes, tuples, keyword and nested arguments, dead ends."""
    graph = fx.Graph()
    inputs = draw(st.integers(1, 3))
    values = [graph.placeholder(f"x{i}") for i in range(inputs)]
    for _ in range(draw(st.integers(1, 20))):
        pick = st.sampled_from(values[-8:])
        kind = draw(st.sampled_from("function method module attribute binary nested keyword tuple".split()))
        if kind == "function":
            made = graph.call_function(draw(st.sampled_from([torch.sin, torch.neg, torch.relu])), (draw(pick),))
        elif kind == "method":
            made = graph.call_method(draw(st.sampled_from(["cos", "abs"])), (draw(pick),))
        elif kind == "module":
            made = graph.call_module(draw(st.sampled_from(["inner.linear", "inner.act", "inner_act"])), (draw(pick),))
        elif kind == "attribute":
            made = graph.get_attr(draw(st.sampled_from(["weight", "shift", "inner.linear.bias"])))
            made = graph.call_function(operator.add, (draw(pick), made))
        elif kind == "binary":
            made = graph.call_function(operator.mul, (draw(pick), draw(pick)))
        elif kind == "nested":
            made = graph.call_function(torch.cat, ([draw(pick), draw(pick)],), {"dim": 0})
            made = graph.call_function(operator.getitem, (made, slice(0, 4, None)))
        elif kind == "keyword":
            made = graph.call_function(torch.add, (draw(pick),), {"other": draw(pick), "alpha": 0.5})
        else:
            made = graph.call_function(torch.chunk, (draw(pick), 2))
            made = graph.call_function(torch.cat, ([graph.call_function(operator.getitem, (made, i)) for i in (0, 1)],))
        values.append(made)
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    graph.output(outputs[0] if len(outputs) == 1 else {"all": tuple(outputs)})
    gm = fx.GraphModule(Root(), graph)
    for i, node in enumerate(gm.graph.nodes):
        node.meta = {"mark": i}
    return gm, inputs


def callbacks(draw: st.DrawFn, gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Anything, along the graph, or by depth: the last two have no cycles."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
    kind = draw(st.sampled_from(["any", "along", "depth"]))
    parts = draw(st.integers(1, 5))
    if kind == "any":
        numbers = draw(st.lists(st.integers(0, parts), min_size=len(nodes), max_size=len(nodes)))
        return dict(zip(nodes, numbers, strict=True))
    if kind == "along":
        cuts = sorted(draw(st.lists(st.integers(0, len(nodes)), max_size=parts)))
        names = draw(st.permutations(range(len(cuts) + 1)))
        return {node: names[sum(cut <= i for cut in cuts)] for i, node in enumerate(nodes)}
    depth: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        depth[node] = max((depth[source] + 1 for source in node.all_input_nodes), default=0)
    return {node: depth[node] // parts for node in nodes}


def values(result: object) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(result)
    return leaves


@given(drawn=graphs(), data=st.data())
def test_children_equal_those_of_torch_and_results_those_of_the_graph(drawn, data):
    gm, inputs = drawn
    numbers = callbacks(data.draw, gm)
    options = {
        "keep_original_node_name": data.draw(st.booleans()),
        "keep_original_input_name": data.draw(st.booleans()),
        "partition_affix": data.draw(st.sampled_from([None, "pp"])),
        "tuple_return": data.draw(st.booleans()),
    }
    options = {name: value for name, value in options.items() if name in TORCHS_OPTIONS}
    before = snapshot(gm)
    try:
        theirs = torchs(gm, numbers.__getitem__, **options)
    except RuntimeError:
        theirs = None  # a cycle
    try:
        ours = split_module(gm, None, numbers.__getitem__, **options)
    except SplitCycleError:
        assert theirs is None
        return
    finally:
        assert snapshot(gm) == before
    assert theirs is not None
    arguments = [torch.linspace(-1, 1, 8).view(4, 2) * (i + 1) for i in range(inputs)]
    expected = values(gm(*arguments))
    assert all(map(torch.equal, values(ours(*arguments)), expected))
    collides = any(
        {"inner.act", "inner_act"} <= {n.target for n in numbers if numbers[n] == i} for i in numbers.values()
    )
    if not collides:  # torch gives both one name
        assert_like_torchs(ours, theirs)
        assert all(map(torch.equal, values(theirs(*arguments)), expected))


@given(drawn=graphs(), data=st.data())
def test_with_keep_original_order_the_parent_graph_equals_that_of_torch(drawn, data):
    gm, _ = drawn
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(nodes)), max_size=5)))
    names = data.draw(st.permutations(range(len(cuts) + 1)))
    numbers = {node: names[sum(cut <= i for cut in cuts)] for i, node in enumerate(nodes)}
    ours = split_module(gm, None, numbers.__getitem__, keep_original_order=True)
    theirs = torchs(gm, numbers.__getitem__, keep_original_order=True)
    assert [line[:6] for line in lines(ours.graph)] == [line[:6] for line in lines(theirs.graph)]  # all but metadata


def topological(numbers: dict[fx.Node, int], split: fx.GraphModule) -> bool:
    """Whether the calls are in the order of the first nodes wherever that order is possible."""
    first: dict[int, int] = {}
    for i, node in enumerate(numbers):
        first.setdefault(numbers[node], i)
    calls = [node for node in split.graph.nodes if node.op == "call_module"]
    place = {call: first[int(str(call.target).removeprefix("submod_"))] for call in calls}

    def needed(call: fx.Node) -> set[fx.Node]:
        found, stack = set(), list(call.all_input_nodes)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return found

    for i, call in enumerate(calls):
        for later in calls[i + 1 :]:
            if place[later] < place[call]:
                # The later one starts first in the graph: it must have had to wait for something that is called after
                # `call`, or for `call`, or `call` was needed at once by what it waited for.
                waited = {each for each in needed(later) if each.op == "call_module" and place[each] >= place[later]}
                if not waited:
                    return False
    return True


@given(drawn=graphs(), data=st.data())
def test_a_partition_is_delayed_only_by_what_it_needs(drawn, data):
    gm, _ = drawn
    numbers = callbacks(data.draw, gm)
    try:
        split = split_module(gm, None, numbers.__getitem__)
    except SplitCycleError:
        return
    assert topological(numbers, split)


@given(drawn=drawn_graphs(effects=True, tuples=True), data=st.data())
def test_writes_views_and_random_ops_give_equal_results_or_an_error(drawn: Drawn, data):
    numbers = callbacks(data.draw, drawn.gm)
    try:
        split = split_module(drawn.gm, None, numbers.__getitem__)
    except (SplitCycleError, SplitOrderError):
        return
    again = Drawn(split, drawn.supported, drawn.inputs)
    assert all(map(torch.equal, values(again.run()), values(drawn.run())))


@given(drawn=drawn_graphs(effects=True, tuples=True), data=st.data())
def test_increasing_partition_numbers_are_never_refused(drawn: Drawn, data):
    nodes = [node for node in drawn.gm.graph.nodes if node.op.startswith("call")]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(nodes)), max_size=5)))
    numbers = {node: sum(cut <= i for cut in cuts) for i, node in enumerate(nodes)}
    split = split_module(drawn.gm, None, numbers.__getitem__)
    again = Drawn(split, drawn.supported, drawn.inputs)
    assert all(map(torch.equal, values(again.run()), values(drawn.run())))
