"""Bad callbacks and bad graphs are errors that name the node, and nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from partition.splitting import snapshot
from wholestep.errors import SplitError
from wholestep.partition import split_module


def traced() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: torch.relu(x) + 1)


@pytest.mark.parametrize("number", ["0", None, 1.0, True, False, (0,), torch.tensor(1)], ids=repr)
def test_what_is_no_int_is_refused(number):
    gm = traced()
    before = snapshot(gm)
    with pytest.raises(SplitError, match="for relu, which is no int") as caught:
        split_module(gm, None, lambda node: number)
    assert "relu = " in str(caught.value)
    assert snapshot(gm) == before


def test_a_negative_number_is_refused():
    with pytest.raises(SplitError, match="returned -1 for relu"):
        split_module(traced(), None, lambda node: -1)


def test_a_callback_that_raises_is_the_cause_and_the_node_is_named():
    numbers = {"relu": 0}
    with pytest.raises(SplitError, match=r"KeyError for add: 'add'") as caught:
        split_module(traced(), None, lambda node: numbers[node.name])
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_is_no_graph_module_is_refused():
    with pytest.raises(SplitError, match="not a Linear"):
        split_module(nn.Linear(1, 1), None, lambda node: 0)


def test_a_value_used_before_it_is_made_is_refused():
    gm = traced()
    relu, add = (n for n in gm.graph.nodes if n.op == "call_function")
    add.append(relu)
    with pytest.raises(SplitError, match="add uses relu, which is not made before it"):
        split_module(gm, None, lambda node: 0)


def test_a_value_of_another_graph_is_refused():
    gm, other = traced(), traced()
    add = next(n for n in gm.graph.nodes if n.name == "add")
    add.args = (next(n for n in other.graph.nodes if n.name == "relu"), 1)
    with pytest.raises(SplitError, match="add uses relu, which is not made before it in this graph"):
        split_module(gm, None, lambda node: 0)


def test_two_nodes_of_one_name_are_refused():
    gm = traced()
    relu, add = (n for n in gm.graph.nodes if n.op == "call_function")
    add.name = relu.name
    with pytest.raises(SplitError, match="two nodes are called relu"):
        split_module(gm, None, lambda node: 0)


@pytest.mark.parametrize("op", ["get_attr", "call_module"])
def test_an_attribute_that_does_not_exist_is_refused(op):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.create_node(op, "inner.missing", (x,) if op == "call_module" else ()))
    gm = fx.GraphModule({"inner.missing": nn.Identity()}, graph)
    del gm.inner.missing
    with pytest.raises(SplitError, match=r"names inner.missing, and the module has no such attribute"):
        split_module(gm, None, lambda node: 0)


def test_a_call_of_a_tensor_is_refused():
    graph = fx.Graph()
    graph.output(graph.create_node("call_module", "weight", (graph.placeholder("x"),)))
    gm = fx.GraphModule({"weight": nn.Parameter(torch.ones(1))}, graph)
    with pytest.raises(SplitError, match="calls weight, which is a Parameter"):
        split_module(gm, None, lambda node: 0)


def test_an_unknown_kind_of_node_is_refused():
    gm = traced()
    next(n for n in gm.graph.nodes if n.name == "add").op = "call_later"
    with pytest.raises(SplitError, match="add is of the kind 'call_later'"):
        split_module(gm, None, lambda node: 0)


def test_calls_behind_the_output_and_second_outputs_are_refused():
    gm = traced()
    x = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(gm.graph.output_node()):
        late = gm.graph.call_function(torch.sin, (x,))
    with pytest.raises(SplitError, match="sin stands behind the output"):
        split_module(gm, None, lambda node: 0)
    gm.graph.erase_node(late)
    gm.graph.create_node("output", "output", (x,))
    with pytest.raises(SplitError, match="two outputs"):
        split_module(gm, None, lambda node: 0)
