"""TorchScript takes functions and modules, leaves the graph as it was, and says so where it cannot take one."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from compilers.networks import SMALL, assert_trains_as_in_eager
from wholestep.errors import LowerError


@pytest.mark.parametrize("network", SMALL)
def test_nnc_jit_takes_modules(network: str) -> None:
    model, inputs = SMALL[network]()
    assert isinstance(ws.compilers.nnc_jit(model), nn.Module)
    assert_trains_as_in_eager(model, ws.compilers.nnc_jit, inputs)


def test_nnc_jit_takes_functions() -> None:
    x = torch.randn(3, requires_grad=True)
    ws.compilers.nnc_jit(lambda x: (x.sin() * 2).sum())(x).backward()
    assert torch.equal(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize("compiler", [ws.compilers.ts_compile, ws.compilers.simple_ts_compile])
def test_the_given_graph_is_not_changed(compiler: ws.compilers.boxed) -> None:
    gm = make_fx(lambda x: (x.to(torch.float64) + 1, torch.ones(2, device="cpu")), tracing_mode="fake")(torch.ones(2))
    before = gm.code
    [a, b] = compiler(gm, [torch.ones(2)])(torch.ones(2))
    assert gm.code == before
    assert a.dtype is torch.float64
    assert torch.equal(b, torch.ones(2))


def test_scalar_inputs_are_scalars_in_torchscript() -> None:
    def function(x: Tensor, n: int, scale: float) -> Tensor:
        return x.view(n, -1) * scale

    gm = fx.symbolic_trace(function)
    node = next(node for node in gm.graph.nodes if node.op == "call_method")
    with gm.graph.inserting_before(node):
        viewed = gm.graph.call_function(torch.ops.aten.view.default, (node.args[0], list(node.args[1:])))
    node.replace_all_uses_with(viewed)
    gm.graph.erase_node(node)
    gm.recompile()
    x = torch.randn(6)
    assert torch.equal(ws.compilers.simple_ts_compile(gm, [x, 2, 0.5])(x, 2, 0.5), x.view(2, 3) * 0.5)


def test_a_graph_that_torchscript_rejects_is_refused_with_a_fix() -> None:
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output((graph.call_function(os.getcwd),))
    with pytest.raises(LowerError, match=r"(?s)TorchScript does not take.*memory_efficient_fusion"):
        ws.compilers.ts_compile(fx.GraphModule({}, graph), [torch.ones(2)])
