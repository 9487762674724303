"""What a node of a captured model costs, forward and backward: estimated from its shapes, or measured.

An estimate is the longest of three times: arithmetic at the machine's speed, reading and writing at its memory's, and
the start of an operator. The backward of a product does one product for each operand that needs a gradient; other
operators move about twice as much. Checkpointed nodes run a second time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep._torch_compat import OpOverload, op_name, pytree
from wholestep.ir.effects import shared_inputs
from wholestep.ir.values import hint_of
from wholestep.pipelining.example_values import example_bytes
from wholestep.pipelining.functions import is_mark
from wholestep.pipelining.regions import regions_of
from wholestep.pipelining.staged import NO_STAGE
from wholestep.pipelining.writes import written_nodes


@dataclass(frozen=True)
class Machine:
    """How fast a rank is. The defaults are round numbers of a data-centre GPU; only their ratios decide a cut."""

    flops: float = 1e14
    """Floating point operations in a second."""
    memory: float = 1e12
    """Bytes read or written in a second."""
    link: float = 1e11
    """Bytes sent to the next rank in a second."""
    launch: float = 3e-6
    """Seconds that any operator takes at least."""


DEFAULT_MACHINE = Machine()


@dataclass(frozen=True)
class Cost:
    """Seconds of one node for one microbatch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


FREE = Cost(0.0, 0.0)


def estimate(graph: fx.Graph, differentiable: set[fx.Node], machine: Machine) -> dict[fx.Node, Cost]:
    """The estimated cost of every node."""
    return {node: _estimate(node, differentiable, machine) for node in graph.nodes}


def _estimate(node: fx.Node, differentiable: set[fx.Node], machine: Machine) -> Cost:
    if node.op in NO_STAGE or not isinstance(node.target, OpOverload) or _is_view(node) or is_mark(node):
        return FREE
    moved = sum(example_bytes(each.meta.get("val")) for each in (node, *node.all_input_nodes))
    work = flops(node)
    forward = max(work / machine.flops, moved / machine.memory, machine.launch)
    operands = sum(arg in differentiable for arg in node.all_input_nodes)
    if not operands or not _is_differentiable(node, differentiable):
        return Cost(forward, 0.0)
    products = min(operands, 2) * work
    backward = max(products / machine.flops, 2 * moved / machine.memory, machine.launch)
    again = any(region.kind == "checkpoint" for region in regions_of(node))
    return Cost(forward, backward + (forward if again else 0.0))


def _is_differentiable(node: fx.Node, differentiable: set[fx.Node]) -> bool:
    is_tuple = isinstance(node.meta.get("val"), list | tuple)
    return node in differentiable or (is_tuple and any(user in differentiable for user in node.users))


def _is_view(node: fx.Node) -> bool:
    """Whether a node only names memory that is there."""
    return bool(shared_inputs(node)) and not written_nodes(node)


def flops(node: fx.Node) -> float:
    """Multiplications and additions of products, convolutions, attention and recurrent layers; 0 for all others."""
    name = op_name(node.target).split(".")[0] if isinstance(node.target, OpOverload) else ""
    shapes = [_shape(arg) for arg in node.args]
    out = math.prod(_shape(node))
    if name in ("aten::linear", "aten::mm", "aten::bmm", "aten::matmul"):
        return 2.0 * out * _last(shapes[0])
    if name in ("aten::addmm", "aten::baddbmm"):
        return 2.0 * out * _last(shapes[1])
    if "conv" in name and len(shapes) > 1 and shapes[1]:
        transposed = "transpose" in name or (len(node.args) > 6 and node.args[6] is True)
        positions = math.prod(shapes[0]) if transposed else out
        return 2.0 * positions * math.prod(shapes[1]) / shapes[1][0]
    if name == "aten::scaled_dot_product_attention" and len(shapes[1]) > 1:
        return 4.0 * math.prod(shapes[0]) * shapes[1][-2]
    if name in ("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"):
        weights = [math.prod(_shape(arg)) for arg in node.all_input_nodes if arg.op == "get_attr"]
        return 2.0 * math.prod(shapes[0][:2]) * sum(weights)
    return 0.0


def _shape(value: Any) -> list[int]:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return [int(hint_of(size) or 1) for size in found.shape] if isinstance(found, torch.Tensor) else []


def _last(shape: Sequence[int]) -> int:
    return shape[-1] if shape else 1


def measure(
    graph: fx.Graph,
    inputs: Sequence[torch.Tensor],
    state: Callable[[str], Any],
    differentiable: set[fx.Node],
    repeats: int = 3,
) -> dict[fx.Node, Cost]:
    """Run each node on real tensors, forward and backward, and take the shortest of some times.

    The model's state is not changed: operators that write work on copies.
    """
    env: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Cost] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = state(str(node.target))
        elif node.op == "call_function":
            runs = [_run(node, env, differentiable) for _ in range(repeats)]
            env[node] = runs[-1][1]
            found[node] = min((cost for cost, _ in runs), key=lambda cost: cost.total)
    return {node: found.get(node, FREE) for node in graph.nodes}


def _run(node: fx.Node, env: Mapping[fx.Node, Any], differentiable: set[fx.Node]) -> tuple[Cost, Any]:
    written = set(written_nodes(node))
    leaves: list[torch.Tensor] = []

    def operand(arg: fx.Node) -> Any:
        value = env[arg]
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if arg in differentiable:
            leaves.append(value.requires_grad_(True))
        return value.clone() if arg in written else value

    args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
    with torch.enable_grad():
        begin = _now(leaves)
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        forward = _now(leaves) - begin
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        backward = 0.0
        if outputs and leaves:
            gradients = [torch.ones_like(output) for output in outputs]
            begin = _now(leaves)
            torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
            backward = _now(leaves) - begin
    return Cost(forward, backward), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _now(tensors: Sequence[torch.Tensor]) -> float:
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
    return time.perf_counter()
