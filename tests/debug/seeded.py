"""Bugs on purpose: passes that do one wrong thing to one node, and say that they are exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

import wholestep as ws
from wholestep.ir.effects import is_wait

aten = torch.ops.aten


class Net(nn.Module):
    """Square matrices, so that swapped operands still fit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)) * 1.5 + 0.25)
        return found


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = ((model(x) - y) / (y.abs() + 2)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def call_of(seed: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return model, optimizer, torch.randn(4, 4), torch.randn(4, 4)


@ws.passes.graph_optimization_pass(numerics="exact", allow_rerun=True)
def looks_around(gm: fx.GraphModule) -> None:
    """A pass that is right."""
    assert gm.graph.nodes


def swaps(gm: fx.GraphModule, name: str) -> None:
    """Exchange the first two operands of a node."""
    node = _node(gm, name)
    first, second, *rest = node.args
    node.args = (second, first, *rest)


def changes_a_constant(gm: fx.GraphModule, name: str) -> None:
    """Add to the last number among the arguments of a node."""
    node = _node(gm, name)
    args = list(node.args)
    place = max(i for i, arg in enumerate(args) if type(arg) in (int, float))
    args[place] = args[place] + 1
    node.args = tuple(args)


def writes_wrong_meta(gm: fx.GraphModule, name: str) -> None:
    """Say that a node gives one more row than it does."""
    node = _node(gm, name)
    val = node.meta["val"]
    with val.fake_mode:
        node.meta["val"] = torch.empty(val.shape[0] + 1, *val.shape[1:], dtype=val.dtype)


def drops_a_wait(gm: fx.GraphModule, name: str) -> None:
    """Read what has not arrived."""
    node = _node(gm, name)
    assert is_wait(node.target)
    node.replace_all_uses_with(node.all_input_nodes[0])
    gm.graph.erase_node(node)


def seeded(bug: Any, name: str) -> Any:
    """A pass with a bug."""

    def wrong_pass(gm: fx.GraphModule) -> None:
        bug(gm, name)

    return ws.passes.graph_optimization_pass(numerics="exact")(wrong_pass)


def _node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def targets(graph: fx.Graph, bug: Any) -> list[str]:
    """Nodes that a bug can be put into so that it changes something."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if bug is swaps:
        ordered = (aten.sub.Tensor, aten.div.Tensor, aten.mm.default, aten.tanh_backward.default)
        return [node.name for node in nodes if node.target in ordered and _two_tensors(node)]
    if bug is changes_a_constant:
        scaled = (aten.mul.Tensor, aten.add.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.pow.Tensor_Scalar)
        return [n.name for n in nodes if n.target in scaled and any(type(a) in (int, float) for a in n.args)]
    if bug is writes_wrong_meta:
        return [node.name for node in nodes if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dim() == 2]
    return [node.name for node in nodes if is_wait(node.target)]


def _two_tensors(node: fx.Node) -> bool:
    first, second = node.args[:2]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return False
    return bool(first.meta["val"].shape == second.meta["val"].shape)
