"""What a node of a captured model costs, forward and backward: estimated from its shapes, or measured.

An estimate is the longest of three times: arithmetic at the machine's speed, reading and writing at its memory's, and
the start of an operator. The backward of a product does one product for each operand that needs a gradient; other
operators move about twice as much. Checkpointed nodes run a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.ir.effects import shared_inputs, written_inputs
from wholestep.pipelining.build.functions import is_mark
from wholestep.pipelining.build.regions import regions_of
from wholestep.pipelining.build.staged import NO_STAGE
from wholestep.simulate.cost_model import Machine, timed, work_of
from wholestep.torch_private.operators import OpOverload
from wholestep.torch_private.pytrees import pytree


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
    work = work_of(node)
    forward = max(machine.seconds(work), machine.launch)
    operands = sum(arg in differentiable for arg in node.all_input_nodes)
    if not operands or not _is_differentiable(node, differentiable):
        return Cost(forward, 0.0)
    work_back = replace(work, flops=min(operands, 2) * work.flops, moved=2 * work.moved)
    backward = max(machine.seconds(work_back), machine.launch)
    again = any(region.kind == "checkpoint" for region in regions_of(node))
    return Cost(forward, backward + (forward if again else 0.0))


def _is_differentiable(node: fx.Node, differentiable: set[fx.Node]) -> bool:
    is_tuple = isinstance(node.meta.get("val"), list | tuple)
    return node in differentiable or (is_tuple and any(user in differentiable for user in node.users))


def _is_view(node: fx.Node) -> bool:
    """Whether a node only names memory that is there."""
    return bool(shared_inputs(node)) and not written_inputs(node)


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
    written = set(written_inputs(node))
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
    device = leaves[0].device if leaves else None
    with torch.enable_grad():
        forward, result = timed(lambda: node.target(*args, **kwargs), device)  # type: ignore[operator]
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        backward = 0.0
        if outputs and leaves:
            gradients = [torch.ones_like(output) for output in outputs]
            run = partial(torch.autograd.grad, outputs, leaves, gradients, allow_unused=True)
            backward, _ = timed(run, device)
    return Cost(forward, backward), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
