"""What the forward of an AOT graph keeps for its backward so that both stay within a memory budget.

The peak is that of the two graphs with their inputs, estimated by playing them; what Inductor fuses does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from wholestep.ir.graphs import tensors_in
from wholestep.remat.budget import Budget
from wholestep.remat.fit import Effort, Fitting
from wholestep.remat.outline import Outline
from wholestep.remat.plans import Plans
from wholestep.remat.policy import policy_of
from wholestep.remat.policy_check import check_policy
from wholestep.torch_private.allocator import extract_forward_backward

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def partition_within(memory_budget: Any, policy: Any = None) -> Partition:
    """A `partition_fn` of `aot_function`. `memory_budget` and `policy` are those of `ws.compile`."""
    budget, chosen = Budget.of(memory_budget), policy_of(policy)
    assert budget is not None

    def partition(
        joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        late = _backward_of(joint.graph)
        outline = Outline.of(
            joint.graph,
            policy=chosen,
            fuses=True,
            is_forward=lambda node: node not in late,
            is_backward=late.__contains__,
        )
        check_policy(outline)
        found, _ = Fitting(Plans(outline), lambda candidate: candidate.peak, Effort(levels=6, near=0.99)).fit(budget)
        saved = [outline.nodes[i] for i in outline.saved(found.candidate.plan) if not outline.is_list(i)]
        inputs_read = [node for node in joint.graph.find_nodes(op="placeholder") if _is_read_late(node, late, outline)]
        return extract_forward_backward(joint, [*inputs_read, *saved], num_fwd_outputs, settings)

    return partition


def _backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Everything from the first node on that reads a gradient: a joint graph has its forward first."""
    nodes = list(graph.nodes)
    given = {node for node in nodes if node.op == "placeholder" and "tangents" in str(node.target)}
    first = next((i for i, node in enumerate(nodes) if not given.isdisjoint(node.all_input_nodes)), len(nodes))
    return given.union(node for node in nodes[first:] if node.op == "call_function")


def _is_read_late(node: fx.Node, late: set[fx.Node], outline: Outline) -> bool:
    """Whether the backward may need an input of the forward: tensors that it, or what it computes again, reads."""
    if node in late or not any(True for _ in tensors_in(node.meta.get("val"))):
        return False
    needed = {outline.nodes[i] for i, is_needed in enumerate(outline.needed) if is_needed}
    return any(user in late or user in needed for user in node.users)
