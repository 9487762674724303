"""`stages=n`: the cuts that make the slowest stage as fast as possible.

Times are forward and backward of every operator, estimated from shapes or measured on the example; a stage also takes
the time of the bytes that enter it, and can be held to a number of bytes (`partition.balanced_cut`, exact).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.partition import balanced_cut
from wholestep.pipelining.build.differentiable import find_differentiable
from wholestep.pipelining.build.example_values import example_bytes
from wholestep.pipelining.build.markers import is_split
from wholestep.pipelining.build.regions import regions_of
from wholestep.pipelining.build.staged import is_number
from wholestep.pipelining.planning.node_costs import Cost, estimate, measure
from wholestep.simulate.cost_model import DEFAULT_MACHINE, Machine

_TOO_MANY = 1 << 49
"""Bytes of a value that should not be sent."""


@dataclass(frozen=True)
class Balance:
    """How to cut automatically: `pipeline(..., stages=Balance(4, costs="measured"))`; `stages=4` has the defaults."""

    stages: int
    costs: Literal["estimated", "measured"] | Callable[[fx.Node], float] | Mapping[str, float] = "estimated"
    """Where times come from; or seconds for each node of the flat graph, by a function or by name."""
    max_bytes: int | None = None
    """What a stage may keep for one microbatch: its state, what enters and what it makes."""
    machine: Machine = DEFAULT_MACHINE


def choose_stages(
    graph: fx.Graph,
    of_one_mode: Set[fx.Node],
    balance: Balance,
    inputs: Sequence[torch.Tensor],
    state: Callable[[str], Any],
    submodules: Mapping[str, Any],
) -> dict[fx.Node, int]:
    """The stage of each operator. Values that only one mode of the model has do not cross, if there is another way."""

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
    """Move cuts that are inside of a function with a backward of its own to its beginning or its end."""
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
                    f"the model cannot be cut into {len(cuts) + 1} stages: a torch.autograd.Function stays whole.",
                    fix="ask for fewer stages",
                )
            cuts[place] = free[0]
    return {node: sum(cut <= i for cut in cuts) for i, node in enumerate(nodes)}


def _seconds_per_byte(balance: Balance) -> float:
    """A value goes in with the forward and its gradient comes back, while the rank computes: the link is rarely what
    it waits for, but the more it carries the sooner it is."""
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
) -> dict[fx.Node, Cost]:
    """The cost of every node, estimated or measured."""
    needs_grad = dict(zip([n for n in graph.nodes if n.op == "placeholder"], inputs, strict=True))

    def requires_grad(node: fx.Node) -> bool:
        value = needs_grad[node] if node in needs_grad else state(str(node.target))
        return isinstance(value, torch.Tensor) and value.requires_grad

    differentiable = find_differentiable(graph, requires_grad, submodules)
    if balance.costs == "measured":
        return measure(graph, inputs, state, differentiable)
    return estimate(graph, differentiable, balance.machine)
