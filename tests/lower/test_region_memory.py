"""Compiled calls are measured with example tensors; a permutation stays a permutation."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.lower.lower_step import RegionMemory
from wholestep.remat.measure import OperatorMemory, example_of

pytestmark = pytest.mark.compiles
aten = torch.ops.aten
CPU = torch.device("cpu")


def sorts_and_undoes(x: Tensor) -> Tensor:
    order = (x * 2).argsort()
    moved = x.sin().cumprod(0)  # this one stays outside, so the order goes from one region to another
    nowhere = moved.long() * 0 - 10**6
    places = nowhere.scatter(0, order, torch.arange(len(order)))
    return torch.zeros_like(x).index_put((places,), moved, accumulate=True) * 3


def is_integer(node: fx.node.Argument) -> bool:
    return isinstance(node, fx.Node) and node.meta["val"].dtype is torch.int64


def test_a_region_that_inverts_the_permutation_of_another_is_measured() -> None:
    gm = make_fx(sorts_and_undoes, tracing_mode="fake")(torch.randn(64))
    gm = ws.partial_lower(
        gm,
        node_predicate=lambda node: node.target is not aten.cumprod.default,
        options=ws.lower.LowerOptions(min_aten_ops=1, strict=True),
    )
    calls = list(gm.graph.find_nodes(op="call_module"))
    assert len(calls) > 1
    extra = RegionMemory(OperatorMemory(CPU)).of(gm, CPU)
    assert all(extra(node) is not None for node in calls)
    assert any(source.target is operator.getitem for source in calls[-1].args if is_integer(source))  # type: ignore[union-attr]
    x = torch.randn(64)
    torch.testing.assert_close(gm(x), sorts_and_undoes(x))


@pytest.mark.parametrize("same", [lambda order: order, lambda order: order.view(8, 8), lambda order: order.clone()])
def test_the_example_of_a_sort_result_is_a_permutation(same: fx.node.Target) -> None:
    gm = make_fx(lambda x: same(x.sort()[1]), tracing_mode="fake")(torch.randn(64))  # type: ignore[operator]
    result = gm.graph.output_node().args[0]
    assert torch.equal(example_of(result).flatten().sort()[0], torch.arange(64))
