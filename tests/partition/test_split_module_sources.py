"""Graphs of make_fx, torch.export, AOT, dynamo and a captured step are split, with trees and symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import wholestep as ws
from cases.parts import train_step
from partition.splitting import call_order, children, tensors
from wholestep.partition import split_module

aten = torch.ops.aten


def runs(gm: fx.GraphModule, parts: int):
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
    return {node: i * parts // len(nodes) for i, node in enumerate(nodes)}.__getitem__


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return {"out": x + self.mlp(x), "norm": x.norm()}


@pytest.mark.parametrize("parts", [1, 2, 5, 10**6])
def test_a_make_fx_graph_keeps_its_pytrees(parts):
    def step(batch):
        return {"loss": (batch["x"] * batch["y"]).sum(), "rest": [batch["x"].sin(), batch["y"]]}

    x, y = tensors(2)
    gm = make_fx(step, tracing_mode="fake")({"x": x, "y": y})
    split = split_module(gm, None, runs(gm, min(parts, 3)))
    result = split({"x": x, "y": y})
    expected = step({"x": x, "y": y})
    assert result.keys() == expected.keys()
    assert torch.equal(result["loss"], expected["loss"])
    assert torch.equal(result["rest"][0], expected["rest"][0])
    assert result["rest"][1] is y


@pytest.mark.parametrize("training", [False, True])
def test_an_exported_program_keeps_its_pytrees_and_parameters(training):
    model = Block().train(training)
    x = torch.randn(2, 3, 8)
    gm = torch.export.export(model, (x,)).module()
    split = split_module(gm, None, runs(gm, 4))
    assert len(call_order(split)) == 4
    torch.manual_seed(0)
    expected = gm(x)
    torch.manual_seed(0)
    result = split(x)
    assert result.keys() == {"out", "norm"}
    assert all(torch.equal(result[key], expected[key]) for key in result)
    assert {name for name, _ in split.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_an_exported_program_with_keyword_arguments():
    class Scaled(nn.Module):
        def forward(self, x, *, by):
            return x.sin() * by["value"]

    x, y = tensors(2)
    gm = torch.export.export(Scaled(), (x,), {"by": {"value": y}}).module()
    split = split_module(gm, None, runs(gm, 2))
    assert torch.equal(split(x, by={"value": y}), x.sin() * y)


def test_forward_and_backward_of_aot():
    def split_in(parts):
        def compiler(gm, inputs):
            split = split_module(gm, None, runs(gm, parts), tuple_return=True)
            assert len(children(split)) == parts
            return make_boxed_func(split)

        return compiler

    def loss(x, w):
        return ((x @ w).relu().sin() * 2).sum()

    x, w = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)
    compiled = aot_function(loss, fw_compiler=split_in(3), bw_compiler=split_in(2))
    compiled(x, w).backward()
    grad, w.grad = w.grad, None
    loss(x, w).backward()
    assert torch.equal(grad, w.grad)


def test_a_split_captured_step_gives_equal_results():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    gm = ws.capture(train_step, model, optimizer, torch.randn(3, 4)).gm
    vals = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    generator = torch.Generator().manual_seed(0)

    def inputs():
        return [torch.rand(v.shape, generator=generator) if isinstance(v, torch.Tensor) else 0.5 for v in vals]

    first = inputs()
    second = [value.clone() if isinstance(value, torch.Tensor) else value for value in first]
    expected = gm(*first)
    result = split_module(gm, None, runs(gm, 7))(*second)
    assert all(map(torch.equal, result, expected))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor))


def symbol_placeholders(child: fx.GraphModule) -> list[str]:
    def is_size(node):
        return any(isinstance(node.meta.get(key), torch.SymInt) for key in ("val", "example_value"))

    return [node.name for node in child.graph.nodes if node.op == "placeholder" and is_size(node)]


def symbolic_tensor() -> torch.Tensor:
    """A fake tensor of shape [s0]."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    return mode.from_tensor(torch.randn(5))


def sized_graph(key: str) -> fx.GraphModule:
    """s0 is an input, and the shape of x and of what is computed from it."""
    gm = make_fx(lambda n, x: (x.sin().cos(), n), tracing_mode="symbolic")(5, torch.randn(5))
    x = symbolic_tensor()
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta = {key: x.shape[0] if node.name.startswith("n") else x}
    return gm


@pytest.mark.parametrize("key", ["val", "example_value"])
def test_a_child_takes_the_symbolic_sizes_of_its_inputs(key):
    gm = sized_graph(key)
    split = split_module(gm, None, runs(gm, 2))
    assert [symbol_placeholders(child) for child in children(split).values()] == [["n_1"], ["n_1"]]
    x = torch.randn(5)
    assert torch.equal(split(5, x)[0], x.sin().cos())


def computed_size(late: bool) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """A size is computed from x, and everything has a shape with that size."""
    value = symbolic_tensor()
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.sin.default, (x,)) if late else None
    size = graph.call_function(aten.sym_size.int, (first or x, 0))
    made = graph.call_function(aten.cos.default, (x,))
    used = graph.call_function(aten.tan.default, (made,))
    last = graph.call_function(aten.mul.Tensor, (used, size))
    graph.output(last)
    for node in graph.nodes:
        node.meta["val"] = value.shape[0] if node is size else value
    return fx.GraphModule({}, graph), {"size": size, "made": made, "used": used, "last": last, "first": first}


def test_a_size_computed_by_another_partition_is_passed():
    gm, node = computed_size(late=False)
    number = {node["size"]: 0, node["made"]: 1, node["used"]: 2, node["last"]: 2}
    split = split_module(gm, None, number.__getitem__)
    assert [symbol_placeholders(split.get_submodule(f"submod_{i}")) for i in range(3)] == [
        [],
        ["sym_size_int"],
        ["sym_size_int"],
    ]
    x = torch.randn(5)
    assert torch.equal(split(x), gm(x))


def test_a_size_is_not_passed_if_that_would_create_a_cycle():
    gm, node = computed_size(late=True)
    # tan alone: its input has the size, which is computed in the partition that needs tan.
    number = {node["first"]: 0, node["size"]: 0, node["made"]: 1, node["used"]: 2, node["last"]: 0}
    split = split_module(gm, None, number.__getitem__)
    assert call_order(split) == ["submod_1", "submod_2", "submod_0"]
    x = torch.randn(5)
    assert torch.equal(split(x), gm(x))


def test_a_size_is_not_passed_if_effects_forbid_it():
    gm, node = computed_size(late=False)
    with gm.graph.inserting_before(node["size"]):
        draw = gm.graph.call_function(aten.rand_like.default, (node["made"].args[0],))
    with gm.graph.inserting_after(node["size"]):
        late = gm.graph.call_function(aten.rand_like.default, (node["made"].args[0],))
    gm.graph.output_node().args = ((node["last"], draw, late),)
    draw.meta = late.meta = node["made"].meta
    # With the size passed on, 0 would come before 1; the random ops need the opposite.
    number = {draw: 1, node["made"]: 3, node["used"]: 1, node["size"]: 0, late: 0, node["last"]: 4}
    split = split_module(gm, None, number.__getitem__)
    assert call_order(split) == ["submod_3", "submod_1", "submod_0", "submod_4"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch 2.11 importing itself
def test_dynamo_graphs_with_data_dependent_sizes():
    def grouped(x, groups):
        sizes = groups.tolist()
        return torch.cat([part * i for i, part in enumerate(x.split(sizes, dim=0))])

    splits = []

    def backend(gm, inputs):
        splits.append(split_module(gm, None, runs(gm, 4), keep_original_order=True, keep_original_node_name=True))
        return splits[-1]

    x, groups = torch.randn(6, 2), torch.tensor([1, 2, 3])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert torch.equal(torch.compile(grouped, backend=backend)(x, groups), grouped(x, groups))
    assert splits
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch 2.11 importing itself
def test_a_split_module_can_be_traced_and_compiled():
    gm = fx.symbolic_trace(Block().eval().mlp)
    split = split_module(gm, None, runs(gm, 2))
    x = torch.randn(2, 8)
    assert torch.equal(make_fx(split)(x)(x), gm(x))
    assert torch.equal(fx.symbolic_trace(split_module(gm, None, runs(gm, 2)))(x), gm(x))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(split_module(gm, None, runs(gm, 2)), backend="eager")(x), gm(x))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The TorchScript type system:UserWarning")
def test_a_split_module_can_be_scripted_and_exported():
    gm = fx.symbolic_trace(Block().eval().mlp)
    x = torch.randn(2, 8)
    assert torch.equal(torch.jit.script(split_module(gm, None, runs(gm, 2)))(x), gm(x))
    assert torch.equal(torch.export.export(split_module(gm, None, runs(gm, 2)), (x,)).module()(x), gm(x))
