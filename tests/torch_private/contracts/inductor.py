"""What wholestep relies on in `torch_private/inductor.py`. Graphs of one matrix product: no C++ is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torch_private.contract_table import contracts_of
from wholestep.torch_private import inductor
from wholestep.torch_private.fake_tensors import new_fake, new_fake_mode

of = contracts_of("inductor")
aten = torch.ops.aten


def product() -> fx.GraphModule:
    mode, graph = new_fake_mode(None), fx.Graph()

    def valued(node: fx.Node, *size: int) -> fx.Node:
        node.meta["val"] = new_fake(mode, torch.zeros(size))
        return node

    x, w = valued(graph.placeholder("x"), 2, 3), valued(graph.placeholder("w"), 3, 4)
    graph.output((valued(graph.call_function(aten.mm.default, (x, w)), 2, 4),))
    return fx.GraphModule({}, graph)


@of("decomposed", "unknown_inductor_settings", "inductor_settings", "keeps_roundings", "keeps_order_of_random_ops")
def a_trace_has_inductors_decompositions_and_settings() -> None:
    mode = new_fake_mode(None)
    x = new_fake(mode, torch.zeros(2, 3))

    def run(x: Tensor) -> list[Tensor]:
        y = torch.nn.functional.silu(x)
        y.add_(1)
        return [y.t()]

    traced = inductor.decomposed(run, [x], mode, settings={"emulate_precision_casts": True}, functionalize=True)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert aten.silu.default not in targets
    assert aten.add_.Tensor not in targets
    assert aten.add.Tensor in targets
    written = inductor.decomposed(run, [x], mode, settings={}, functionalize=False)
    assert aten.add_.Tensor in [node.target for node in written.graph.nodes]
    assert inductor.unknown_inductor_settings([]) == []
    names = ["max_autotune", "triton.cudagraphs", "fallback_random", "no_such_setting"]
    assert inductor.unknown_inductor_settings(names) == ["no_such_setting"]
    assert set(names[:3]) <= inductor.inductor_settings()
    assert inductor.keeps_roundings() == inductor.keeps_order_of_random_ops()


@of("compile_inductor", "saved_kernels", "load_kernels")
def a_compiled_graph_takes_one_list_and_keeps_the_strides_of_the_trace() -> None:
    gm = product()
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    compiled = inductor.compile_inductor(gm, inputs, {}, "backward", given_away=[0])
    x, w = torch.rand(2, 3), torch.rand(3, 4)
    given = [x, w]
    (result,) = compiled(given)
    assert torch.allclose(result, x @ w)
    assert result.stride() == (4, 1)
    assert given == []
    assert [node.target for node in gm.graph.find_nodes(op="placeholder")] == ["ws_given_0", "ws_1"]
    raw = inductor.saved_kernels()
    assert raw
    inductor.load_kernels(raw)


def joint_graph() -> fx.GraphModule:
    """Forward and backward of `(x.sin() * randn_like(x), )` as one graph with names of AOTAutograd."""
    mode = new_fake_mode(None)
    like = new_fake(mode, torch.zeros(2, 3))
    graph = fx.Graph()

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta["val"] = new_fake(mode, torch.zeros(2, 3))
        return made

    x, grad = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    x.meta["val"] = grad.meta["val"] = like
    noise = call(aten.randn_like.default, x)
    again = call(aten.randn_like.default, x)
    result = call(aten.mul.Tensor, call(aten.mul.Tensor, call(aten.sin.default, x), noise), again)
    back = call(aten.mul.Tensor, call(aten.mul.Tensor, grad, call(aten.cos.default, x)), noise)
    graph.output((result, back))
    return fx.GraphModule({}, graph)


@of("min_cut", "improve_joint")
def a_joint_graph_is_improved_and_cut_and_draws_what_it_drew() -> None:
    joint = joint_graph()
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    improved = inductor.improve_joint(joint, inputs, {"fallback_random": True})
    forward, backward = inductor.min_cut(improved, forward_outputs=1, inputs=1)
    drawn = [sum(node.target is aten.randn_like.default for node in gm.graph.nodes) for gm in (forward, backward)]
    assert drawn == [2, 0]
    names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert names[-1] == "tangents_1"
    x, grad = torch.rand(2, 3), torch.rand(2, 3)
    torch.manual_seed(0)
    outputs = forward(x)
    torch.manual_seed(0)
    noise, again = torch.randn_like(x), torch.randn_like(x)
    assert torch.equal(outputs[0], x.sin() * noise * again)
    (found,) = backward(*outputs[1:], grad)
    assert torch.allclose(found, grad * x.cos() * noise)
