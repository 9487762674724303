"""`stages=n`: the cuts that minimise the time of the slowest stage.

The cost of a stage is the forward and backward time of its operators, plus the time of the bytes that enter it; its
memory can be bounded (`partition.balanced_cut`, exact). Times are estimated from shapes, or measured on the example.

An estimate is the longest of three times: arithmetic at the machine's speed, reads and writes at its memory bandwidth,
and the launch of an operator. The backward of a matmul runs one matmul for each operand that needs a gradient; other
operators move about twice as many bytes. Checkpointed nodes run a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.ir.effects import shared_inputs, written_inputs
from wholestep.partition import balanced_cut
from wholestep.pipelining.build.context_regions import is_function_mark, regions_of
from wholestep.pipelining.build.split_points import is_split
from wholestep.pipelining.build.staged_graph import NO_STAGE, example_bytes, find_differentiable, is_number
from wholestep.simulate.cost_model import timed, work_of
from wholestep.simulate.machine import DEFAULT_MACHINE, Machine
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.operators import OpOverload


@dataclass(frozen=True)
class NodeCost:
    """Seconds of one node for one microbatch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


FREE = NodeCost(0.0, 0.0)


def estimate(graph: fx.Graph, differentiable: set[fx.Node], machine: Machine) -> dict[fx.Node, NodeCost]:
    """The estimated cost of every node."""
    return {node: _estimate(node, differentiable, machine) for node in graph.nodes}


def _estimate(node: fx.Node, differentiable: set[fx.Node], machine: Machine) -> NodeCost:
    if node.op in NO_STAGE or not isinstance(node.target, OpOverload) or _is_view(node) or is_function_mark(node):
        return FREE
    work = work_of(node)
    forward = max(machine.seconds(work), machine.launch)
    operands = sum(arg in differentiable for arg in node.all_input_nodes)
    if not operands or not _is_differentiable(node, differentiable):
        return NodeCost(forward, 0.0)
    work_back = replace(work, flops=min(operands, 2) * work.flops, moved=2 * work.moved)
    backward = max(machine.seconds(work_back), machine.launch)
    again = any(region.kind == "checkpoint" for region in regions_of(node))
    return NodeCost(forward, backward + (forward if again else 0.0))


def _is_differentiable(node: fx.Node, differentiable: set[fx.Node]) -> bool:
    is_tuple = isinstance(node.meta.get("val"), list | tuple)
    return node in differentiable or (is_tuple and any(user in differentiable for user in node.users))


def _is_view(node: fx.Node) -> bool:
    """True if a node returns a view."""
    return bool(shared_inputs(node)) and not written_inputs(node)


def measure(
    graph: fx.Graph,
    inputs: Sequence[torch.Tensor],
    state: Callable[[str], Any],
    differentiable: set[fx.Node],
    repeats: int = 3,
) -> dict[fx.Node, NodeCost]:
    """Run each node on real tensors, forward and backward, and take the fastest of `repeats` runs.

    The model's state is not changed: operators that write run on copies.
    """
    env: dict[fx.Node, Any] = {}
    found: dict[fx.Node, NodeCost] = {}
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


def _run(node: fx.Node, env: Mapping[fx.Node, Any], differentiable: set[fx.Node]) -> tuple[NodeCost, Any]:
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
    return NodeCost(forward, backward), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


_TOO_MANY = 1 << 49
"""The size assumed for a value that should not cross a cut."""


@dataclass(frozen=True)
class Balance:
    """Options of automatic cuts: `pipeline(..., stages=Balance(4, costs="measured"))`; `stages=4` has the defaults."""

    stages: int
    costs: Literal["estimated", "measured"] | Callable[[fx.Node], float] | Mapping[str, float] = "estimated"
    """The source of times; or seconds for each node of the flat graph, as a function or a mapping by name."""
    max_bytes: int | None = None
    """The bytes that a stage may hold for one microbatch: its state, inputs and intermediate values."""
    machine: Machine = DEFAULT_MACHINE


def choose_stages(
    graph: fx.Graph,
    of_one_mode: Set[fx.Node],
    balance: Balance,
    inputs: Sequence[torch.Tensor],
    state: Callable[[str], Any],
    submodules: Mapping[str, Any],
) -> dict[fx.Node, int]:
    """The stage of each operator. Values of only one mode of the model cross a cut only if there is no other way."""

    def value_bytes(node: fx.Node) -> int:
        avoid = node in of_one_mode and not is_number(node) and balance.max_bytes is None
        return _TOO_MANY if avoid else example_bytes(node.meta.get("val"))

    for node in list(graph.nodes):
        if is_split(node):
            graph.erase_node(node)
    cost = _costs(graph, balance, inputs, state, submodules)
    price = _seconds_per_byte(balance)
    cut = balanced_cut(graph, balance.stages, cost, balance.max_bytes, seconds_per_byte=price, value_bytes=value_bytes)
    return _around_functions({node: cut(node) for node in graph.nodes if node.op == "call_function"})


def _around_functions(stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Move cuts inside a `torch.autograd.Function` to its begin or end."""
    nodes = list(stage_of)
    spans: dict[int, tuple[int, int]] = {}
    for i, node in enumerate(nodes):
        for region in [region for region in regions_of(node) if region.kind == "function"][:1]:
            spans[region.number] = (spans.get(region.number, (i, i))[0], i + 1)
    cuts = [i for i in range(1, len(nodes)) if stage_of[nodes[i]] != stage_of[nodes[i - 1]]]
    for place, cut in enumerate(cuts):
        inside = next((span for span in spans.values() if span[0] < cut < span[1]), None)
        if inside is not None:
            ends = sorted(inside, key=lambda end: abs(end - cut))
            free = [end for end in ends if 0 < end < len(nodes) and end not in cuts]
            if not free:
                raise PipelineError(
                    f"the model cannot be cut into {len(cuts) + 1} stages: a torch.autograd.Function is never cut.",
                    fix="ask for fewer stages",
                )
            cuts[place] = free[0]
    return {node: sum(cut <= i for cut in cuts) for i, node in enumerate(nodes)}


def _seconds_per_byte(balance: Balance) -> float:
    """A value is sent in the forward and its gradient in the backward, overlapping computation: the link is rarely the
    bottleneck, but its load is a cost."""
    return 2.0 / balance.machine.link


def _costs(
    graph: fx.Graph,
    balance: Balance,
    inputs: Sequence[torch.Tensor],
    state: Callable[[str], Any],
    submodules: Mapping[str, Any],
) -> Callable[[fx.Node], float] | Mapping[str, float]:
    if not isinstance(balance.costs, str):
        return balance.costs
    found = node_costs(graph, balance, inputs, state, submodules)
    return lambda node: found[node].total


def node_costs(
    graph: fx.Graph,
    balance: Balance,
    inputs: Sequence[torch.Tensor],
    state: Callable[[str], Any],
    submodules: Mapping[str, Any],
) -> dict[fx.Node, NodeCost]:
    """The cost of every node, estimated or measured."""
    needs_grad = dict(zip([n for n in graph.nodes if n.op == "placeholder"], inputs, strict=True))

    def requires_grad(node: fx.Node) -> bool:
        value = needs_grad[node] if node in needs_grad else state(str(node.target))
        return isinstance(value, torch.Tensor) and value.requires_grad

    differentiable = find_differentiable(graph, requires_grad, submodules)
    if balance.costs == "measured":
        return measure(graph, inputs, state, differentiable)
    return estimate(graph, differentiable, balance.machine)
