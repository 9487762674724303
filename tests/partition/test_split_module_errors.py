"""Invalid callbacks and malformed graphs raise errors that name the node, and nothing is changed."""

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
def test_a_partition_number_that_is_not_an_int_is_refused(number):
    gm = traced()
    before = snapshot(gm)
    with pytest.raises(SplitError, match="for relu, which is not an int") as caught:
        split_module(gm, None, lambda node: number)
    assert "relu = " in str(caught.value)
    assert snapshot(gm) == before


def test_a_negative_number_is_refused():
    with pytest.raises(SplitError, match="returned -1 for relu"):
        split_module(traced(), None, lambda node: -1)


def test_an_exception_of_the_callback_is_chained_and_the_node_named():
    numbers = {"relu": 0}
    with pytest.raises(SplitError, match=r"KeyError for add: 'add'") as caught:
        split_module(traced(), None, lambda node: numbers[node.name])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_module_that_is_not_a_graph_module_is_refused():
    with pytest.raises(SplitError, match="not an object of type Linear"):
        split_module(nn.Linear(1, 1), None, lambda node: 0)


def test_a_use_before_definition_is_refused():
    gm = traced()
    relu, add = (n for n in gm.graph.nodes if n.op == "call_function")
    add.append(relu)
    with pytest.raises(SplitError, match="add uses relu, which is not defined before it"):
        split_module(gm, None, lambda node: 0)


def test_a_value_of_another_graph_is_refused():
    gm, other = traced(), traced()
    add = next(n for n in gm.graph.nodes if n.name == "add")
    add.args = (next(n for n in other.graph.nodes if n.name == "relu"), 1)
    with pytest.raises(SplitError, match="add uses relu, which is not defined before it in this graph"):
        split_module(gm, None, lambda node: 0)


def test_duplicate_node_names_are_refused():
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
    with pytest.raises(SplitError, match=r"refers to inner.missing, and the module has no such attribute"):
        split_module(gm, None, lambda node: 0)


def test_a_call_of_a_tensor_is_refused():
    graph = fx.Graph()
    graph.output(graph.create_node("call_module", "weight", (graph.placeholder("x"),)))
    gm = fx.GraphModule({"weight": nn.Parameter(torch.ones(1))}, graph)
    with pytest.raises(SplitError, match="calls weight, which is a Parameter"):
        split_module(gm, None, lambda node: 0)


def test_an_unknown_op_is_refused():
    gm = traced()
    next(n for n in gm.graph.nodes if n.name == "add").op = "call_later"
    with pytest.raises(SplitError, match="add has the op 'call_later'"):
        split_module(gm, None, lambda node: 0)


def test_calls_after_the_output_and_second_outputs_are_refused():
    gm = traced()
    x = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(gm.graph.output_node()):
        late = gm.graph.call_function(torch.sin, (x,))
    with pytest.raises(SplitError, match="sin comes after the output"):
        split_module(gm, None, lambda node: 0)
    gm.graph.erase_node(late)
    gm.graph.create_node("output", "output", (x,))
    with pytest.raises(SplitError, match="two outputs"):
        split_module(gm, None, lambda node: 0)
