from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from wholestep.ir.call_arguments import (
    argument,
    argument_at,
    argument_position,
    arguments_by_name,
    find_argument,
    nodes_in,
    operator_of,
)
from wholestep.ir.graph_functions import call_on_copies

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


def test_an_operators_argument_is_found_by_position_by_keyword_and_by_default() -> None:
    by_position = call(aten.native_dropout.default, 1, 0.5, True)
    by_name = call(aten.native_dropout.default, 1, p=0.5, train=True)
    assert argument(by_position, "train") is argument(by_name, "train") is True
    assert find_argument(by_position, "train") == 2
    assert find_argument(by_name, "train") == "train"
    assert argument(call(aten.add.Tensor, 1, 2), "alpha") == 1
    assert argument(call(aten.add.Tensor, 1, 2), "beta", 7) == 7
    assert find_argument(call(aten.add.Tensor, 1, 2), "alpha") is None
    assert argument_position(aten.add.Tensor, "other") == 1
    assert argument_position(aten.add.Tensor, "beta") is None


def test_an_operator_that_is_called_on_copies_has_its_own_arguments() -> None:
    node = call(call_on_copies, aten.add_.Tensor, (0,), 5, 6, alpha=2)
    assert operator_of(node) is aten.add_.Tensor
    assert argument(node, "other") == 6
    assert find_argument(node, "other") == 3
    assert arguments_by_name(node) == {"self": 5, "other": 6, "alpha": 2}


def test_arguments_by_schema_position_may_be_keywords() -> None:
    assert argument_at(call(aten.add.Tensor, 1, other=2), 1) == 2
    assert argument_at(call(aten.add.Tensor, 1, 2), 2) is None


def test_python_functions_have_signatures_and_builtins_a_list_of_names() -> None:
    assert argument(call(functional.relu6, 1, True), "inplace") is True
    assert argument(call(functional.dropout, 1), "p") == 0.5
    assert argument(call(torch.dropout, 1, 0.5, False), "train") is False
    assert argument(call(torch.sin, 1), "train") is None
    assert operator_of(call(torch.sin, 1)) is None


def test_nodes_are_found_in_nested_lists_in_order() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert nodes_in([y, (x, 3), None, [y]]) == [y, x, y]
    assert nodes_in(x) == [x]
    assert nodes_in("x") == []
