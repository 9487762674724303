"""Rules that replace one operator at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.errors import OptionError, PassError
from wholestep.ir.meta import NodeMeta, node_meta, set_node_meta
from wholestep.ir.rewrite_rules import apply_rules, calls, rewrite_rule

aten = torch.ops.aten


@rewrite_rule(aten.t.default)
def transposed_twice(node: fx.Node, self: fx.Node) -> Any:
    return self.args[0] if calls(self, aten.t.default) else None


@rewrite_rule(aten.mul.Tensor)
def product_as_sum(node: fx.Node, self: fx.Node, other: Any) -> Any:
    return node.graph.call_function(aten.add.Tensor, (self, self)) if other == 2 else None


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_a_match_is_replaced_and_what_only_it_read_is_erased() -> None:
    x = torch.randn(2, 3)
    gm = traced(lambda x: x.t().t().sum(), x)
    assert apply_rules(gm.graph, [transposed_twice]) == 1
    gm.recompile()
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [aten.sum.default]
    assert gm(x) == x.sum()


def test_a_rule_sees_inputs_that_were_replaced_before() -> None:
    gm = traced(lambda x: x.t().t().t().t(), torch.randn(2, 3))
    assert apply_rules(gm.graph, [transposed_twice]) == 2
    assert not gm.graph.find_nodes(op="call_function", target=aten.t.default)


def test_arguments_come_by_name_with_the_defaults_of_the_schema() -> None:
    seen: list[tuple[Any, ...]] = []

    @rewrite_rule(aten.add.Tensor)
    def note(node: fx.Node, alpha: Any, other: Any) -> None:
        seen.append((alpha, str(other)))

    gm = traced(lambda x, y: torch.add(x, y, alpha=3) + y, torch.randn(2), torch.randn(2))
    assert apply_rules(gm.graph, [note]) == 0
    assert seen == [(3, "y_1"), (1, "y_1")]


def test_a_replacement_keeps_name_and_metadata_and_unused_nodes_of_a_rule_go() -> None:
    gm = traced(lambda x: (x * 2, x * 3), torch.randn(2))
    first, second = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    set_node_meta(first, NodeMeta(module_path="layers.0"))

    @rewrite_rule(aten.mul.Tensor)
    def hesitant(node: fx.Node, self: fx.Node, other: Any) -> Any:
        made = node.graph.call_function(aten.add.Tensor, (self, self))
        return made if other == 2 else None

    assert apply_rules(gm.graph, [hesitant]) == 1
    [made] = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert (made.name, node_meta(made).module_path) == ("mul", "layers.0")
    assert "val" not in made.meta
    assert second in gm.graph.nodes


def test_a_node_with_several_results_is_replaced_by_a_sequence() -> None:
    @rewrite_rule(aten.split.Tensor)
    def halves(node: fx.Node, self: fx.Node, split_size: int) -> list[fx.Node]:
        made = node.graph.call_function(aten.slice.Tensor, (self, 0, 0, split_size))
        return [made, node.graph.call_function(aten.slice.Tensor, (self, 0, split_size, 2 * split_size))]

    x = torch.arange(4.0)
    gm = traced(lambda x: torch.sub(*x.split(2)), x)
    assert apply_rules(gm.graph, [halves]) == 1
    gm.recompile()
    assert torch.equal(gm(x), torch.tensor([-2.0, -2.0]))


def test_the_first_rule_that_matches_wins() -> None:
    @rewrite_rule(aten.mul.Tensor)
    def never_reached(node: fx.Node) -> Any:
        raise AssertionError

    gm = traced(lambda x: x * 2, torch.randn(2))
    assert apply_rules(gm.graph, [product_as_sum, never_reached]) == 1


def test_a_rule_with_an_unknown_argument_is_refused_where_it_is_declared() -> None:
    with pytest.raises(OptionError, match=r"takes 'othr', which is not an argument of aten.mul.Tensor"):
        rewrite_rule(aten.mul.Tensor)(lambda node, self, othr: None)
    with pytest.raises(OptionError, match="takes operators"):
        rewrite_rule(torch.mul)  # type: ignore[arg-type]


def captured() -> tuple[ws.StepGraph, Callable[[Tensor], Any], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: Tensor) -> Tensor:
        loss = model(x).mul(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(3, 4)
    return ws.capture(train_step, x), train_step, x


def test_rules_in_a_pass_of_a_step_are_verified() -> None:
    @ws.passes.graph_optimization_pass(numerics="exact")
    def simplify(gm: fx.GraphModule) -> None:
        assert ws.passes.apply_rules(gm.graph, [transposed_twice, product_as_sum]) > 2

    graph, _, x = captured()
    ws.passes.run_passes(graph, [simplify], level=3)
    ours = ws.build(graph, lower="eager")(x)
    _, train_step, _ = captured()
    assert torch.equal(ours, train_step(x))


def test_a_wrong_rule_is_refused_with_the_node() -> None:
    @rewrite_rule(aten.t.default)
    def not_transposed(node: fx.Node, self: fx.Node) -> fx.Node:
        return self

    @ws.passes.graph_optimization_pass(numerics="exact")
    def wrong(gm: fx.GraphModule) -> None:
        ws.passes.apply_rules(gm.graph, [not_transposed])

    graph, _, _ = captured()
    with pytest.raises(PassError, match="wrong left a graph that breaks a rule"):
        ws.passes.run_passes(graph, [wrong])
