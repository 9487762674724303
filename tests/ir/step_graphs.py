"""Small StepGraphs made by hand with make_fx, for the tests of `ir/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.errors import Location
from wholestep.ir import (
    ChangeKind,
    GroupSpec,
    InputKind,
    InputSpec,
    NodeMeta,
    OutputKind,
    OutputSpec,
    Signature,
    StateChange,
    StepGraph,
    WriteBack,
    set_node_meta,
    tensor_spec,
)

aten = torch.ops.aten
Input = tuple[str, InputKind, str, Tensor]


def make_step(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Input],
    *,
    writes: dict[str, int] | None = None,
    tracing_mode: str = "fake",
) -> StepGraph:
    """Trace `fn`; result `writes[name]` goes back into input `name`, the other results are returned."""
    gm = make_fx(fn, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*(tensor for *_, tensor in inputs))
    graph = gm.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    specs = []
    for node, (name, kind, path, _) in zip(placeholders, inputs, strict=True):
        rename(node, name)
        specs.append(InputSpec(name, kind, path, tensor_spec(node.meta["val"])))
    output = graph.output_node()
    values = list(output.args[0])
    write_backs, outputs, kept = [], [], []
    with graph.inserting_before(output):
        for name, index in (writes or {}).items():
            target = placeholders[[i[0] for i in inputs].index(name)]
            copy = graph.call_function(aten.copy_.default, (target, values[index]))
            copy.meta["val"] = target.meta["val"]
            write_backs.append(WriteBack(name, values[index].name))
    for index, value in enumerate(values):
        if index not in (writes or {}).values():
            kept.append(value)
            outputs.append(OutputSpec(OutputKind.RESULT, f"result[{len(outputs)}]", tensor_spec(value.meta["val"])))
    output.args = (tuple(kept),)
    for number, node in enumerate(graph.nodes):
        if node.op == "call_function":
            phase = "epilogue" if node.target is aten.copy_.default else "forward"
            where = Location("/home/user/train.py", 10 + number, "train_step", "loss = model(x)")
            set_node_meta(node, NodeMeta("model.fc" if number % 3 else "model.act", where, phase))
    result = {"tuple": [{"output": i} for i in range(len(kept))]}
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.recompile()
    return StepGraph(gm, Signature(tuple(specs), tuple(outputs), tuple(write_backs), result=result))


def rename(node: fx.Node, name: str) -> None:
    """Give a placeholder the name that the signature uses."""
    node.target = name
    node._rename(name)


def sgd_step(rows: int = 2) -> StepGraph:
    """Linear regression with momentum SGD: w, m <- one step on (x, y); returns the loss."""

    def step(w: Tensor, m: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        error = x @ w.t() - y
        loss = error.pow(2).mean()
        grad = (2.0 / error.numel()) * error.t() @ x
        new_m = m * 0.9 + grad
        return loss, w - 0.1 * new_m, new_m

    return make_step(
        step,
        [
            ("w", InputKind.PARAMETER, "model.fc.weight", torch.randn(3, 4)),
            ("m", InputKind.OPTIMIZER_STATE, "optimizer.state[model.fc.weight].momentum_buffer", torch.zeros(3, 4)),
            ("x", InputKind.BATCH, "batch['x']", torch.randn(rows, 4)),
            ("y", InputKind.BATCH, "batch['y']", torch.randn(rows, 3)),
        ],
        writes={"w": 1, "m": 2},
    )


def with_everything() -> StepGraph:
    """A graph with constants, lists, slices, several dtypes and state changes."""
    table = torch.arange(6, dtype=torch.int64).reshape(2, 3).t()
    scale = torch.tensor([1.5, float("inf"), -0.0], dtype=torch.bfloat16)

    def step(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        parts = torch.split(x[:, 1:], 1, dim=1)
        y = torch.cat([parts[1], parts[0]], 1).to(torch.bfloat16).sum() * scale
        z = torch.full((2,), -0.0, dtype=torch.float64, device="cpu") + table[0, 0]
        return y, z, torch.clamp(w, -1.0, float("inf")), torch.randn(2, dtype=torch.complex64) * (1 + 2j)

    step_graph = make_step(
        step,
        [
            ("w", InputKind.PARAMETER, "model.w", torch.randn(3, 4)),
            ("x", InputKind.BATCH, "batch[0]", torch.randn(2, 3)),
        ],
        writes={"w": 2},
    )
    signature = step_graph.signature
    changes = (
        StateChange(ChangeKind.CREATED, InputKind.OPTIMIZER_STATE, "optimizer.state[model.w].step", output=1, unless=0),
        StateChange(ChangeKind.CONSTANT, InputKind.HYPER_PARAMETER, "optimizer.param_groups[0].lr", constant=0.1),
        StateChange(ChangeKind.REMOVED, InputKind.GRADIENT, "model.w.grad", of="model.w"),
    )
    result = {
        "dict": [["loss", {"output": 0}], ["n", {"value": 3}], ["nan", {"value": float("inf")}]],
    }
    return StepGraph(
        step_graph.gm,
        Signature(
            signature.inputs,
            signature.outputs,
            signature.write_backs,
            changes,
            result,
            ("batch[0].shape == (2, 3)",),
            ("scheduler.step()",),
            {"s0": (1, 64), "s1": (2, None)},
            ("cpu",),
            (GroupSpec("1", "dp", 2),),
        ),
    )


def dynamic_step() -> StepGraph:
    """The rows of x and y are symbolic."""

    def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([x, x]) @ w.t()
        return y.reshape(-1)[1:], w + y.sum() / x.shape[0]

    return make_step(
        step,
        [
            ("w", InputKind.PARAMETER, "model.w", torch.randn(3, 4)),
            ("x", InputKind.BATCH, "batch", torch.randn(6, 4)),
        ],
        writes={"w": 1},
        tracing_mode="symbolic",
    )


def chain(length: int) -> StepGraph:
    """A long graph: `length` additions and multiplications."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = value = torch.empty(4, 4, device="meta")
    here = Location("/home/user/train.py", 3, "train_step", "")
    for i in range(length):
        node = graph.call_function([aten.add.Tensor, aten.mul.Tensor][i % 2], (node, 1.0 + i % 7))
        node.meta["val"] = value
        set_node_meta(node, NodeMeta(f"model.layers.{i // 100}", here))
    output = graph.output((node,))
    output.meta.clear()
    gm = fx.GraphModule({}, graph)
    spec = tensor_spec(value)
    return StepGraph(
        gm, Signature((InputSpec("x", InputKind.BATCH, "batch", spec),), (OutputSpec(OutputKind.RESULT, "", spec),))
    )


def find(step_graph: StepGraph, target: Any) -> fx.Node:
    """The first node with this target."""
    return next(node for node in step_graph.gm.graph.nodes if node.target is target)
