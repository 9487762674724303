"""Fewer saved bytes than torch's cut: which values are recomputed, and that they are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.remat.pointwise_recompute import plan_recomputations, shed, sheddable

aten = torch.ops.aten


def forward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The result, then what is saved: a product, two pointwise values of it, noise, a view."""
    product = x @ w
    gelu = torch.nn.functional.gelu(product)
    half = gelu.to(torch.float64) * 2
    noisy = product + torch.rand_like(product)
    return product.sum(), product, gelu, half, noisy, half.t()


def traced(function: Any, *inputs: Tensor) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def halves() -> tuple[fx.GraphModule, fx.GraphModule]:
    """A forward, and a backward that takes what it saves under the same names."""
    first = traced(forward, torch.randn(8, 8), torch.randn(8, 8))
    saved = first.graph.output_node().args[0][1:]
    graph = fx.Graph()
    inputs = []
    for value in dict.fromkeys(saved):
        node = graph.placeholder(value.name)
        node.meta = dict(value.meta)
        inputs.append(node)
    sums = [graph.call_function(aten.sum.default, (node,)) for node in inputs]
    graph.output(tuple(sums))
    return first, fx.GraphModule({}, graph)


def test_only_values_that_are_pointwise_in_saved_ones_are_recomputed():
    first, _ = halves()
    chosen = plan_recomputations(first, 1)
    # The product is the source, the noise is random, and `half` shares its memory with its view.
    assert [str(each.value.target) for each in chosen] == ["aten.gelu.default"]
    assert sheddable(first, 1) == (8 * 8 * 4,)


def test_the_backward_recomputes_the_same_values_from_fewer_inputs():
    first, second = halves()
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    names = [node.name for node in second.graph.find_nodes(op="placeholder")]
    values = dict(zip([v.name for v in first.graph.output_node().args[0]], first(x, w), strict=True))
    expected = second(*(values[name] for name in names))
    assert shed(first, second, 1, 1) == 8 * 8 * 4
    second.graph.lint()
    left = [node.name for node in second.graph.find_nodes(op="placeholder")]
    assert len(left) == len(names) - 1
    saved = [value.name for value in first.graph.output_node().args[0]]
    assert set(left) <= set(saved)
    for want, have in zip(expected, second(*(values[name] for name in left)), strict=True):
        assert torch.equal(want, have)


def test_a_longer_list_of_recomputations_begins_with_the_shorter_one():
    def many(x: Tensor) -> tuple[Tensor, ...]:
        rows = [x * i + 1 for i in range(1, 5)]
        chained = torch.relu(rows[0])
        return x.sum(), *rows, chained

    gm = traced(many, torch.randn(16, 16))
    wanted = [16 * 16 * 4 * i for i in range(1, 6)]
    lists = [[found.value for found in plan_recomputations(gm, 1, each)] for each in wanted]
    assert [len(each) for each in lists] == [1, 2, 3, 4, 5]
    assert all(lists[i] == lists[4][: i + 1] for i in range(5))
    for found in plan_recomputations(gm, 1):  # all are computed from the input in the end
        assert all(source.op == "placeholder" for source in found.sources)
