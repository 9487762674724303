"""Save fewer bytes for the backward than torch's min cut does: recompute values that are pointwise in saved ones.

    forward   a = mm(x, w)      saves a, g         backward  .. mm(.., g), gelu_backward(.., a)
              g = gelu(a)
    forward   the same          saves a            backward  g = gelu(a); .. mm(.., g), gelu_backward(.., a)

torch's cut saves both, because writing `g` once more takes time. This is the next cheaper choice after that cut: a read
of the sources and a write of the value, and no matrix product. Values are taken in one order, the cheapest for its
bytes first: a larger amount to shed takes a longer prefix of the same list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import draws, may_write, shared_inputs
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.torch_private.operators import OpOverload

prims = torch.ops.prims

_MOST_STEPS = 40
_CASTS = (prims.convert_element_type.default,)


@dataclass(frozen=True)
class Recomputation:
    """How the backward recomputes a value that is not saved."""

    value: fx.Node
    steps: tuple[fx.Node, ...]
    """Nodes of the forward, in order, the value last."""
    sources: tuple[fx.Node, ...]
    """Inputs and saved values."""

    @property
    def price(self) -> float:
        """Bytes that are moved for each byte that is not saved."""
        read = sum(_bytes(source) for source in self.sources)
        return (read + _bytes(self.value)) / max(_bytes(self.value), 1)


@dataclass(frozen=True)
class RegionCut:
    """What goes from the forward of a compiled region to its backward."""

    saved: Mapping[str, int]
    """Names of the saved values, with their bytes."""
    recomputed: tuple[str, ...]
    """Names of the nodes that the backward recomputes."""
    sheddable: tuple[int, ...]
    """Bytes of the values of torch's cut that pointwise operators could recompute, in the order they are taken."""


def shed(forward: fx.GraphModule, backward: fx.GraphModule, start: int, wanted: int) -> int:
    """Let a backward recompute values that its forward saved (its results from `start` on), until `wanted` bytes are no
    longer saved or no such value is left; returns the bytes."""
    chosen = plan_recomputations(forward, start, wanted)
    for each in chosen:
        _recompute_in(backward, each)
    gone = {each.value for each in chosen}
    output = forward.graph.output_node()
    results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    output.args = (tuple(v for i, v in enumerate(results) if i < start or v not in gone),)
    forward.recompile()
    backward.recompile()
    return sum(_bytes(each.value) for each in chosen)


def sheddable(forward: fx.GraphModule, start: int) -> tuple[int, ...]:
    """Bytes of all values that `shed` can recompute, in the order in which it takes them."""
    return tuple(_bytes(each.value) for each in plan_recomputations(forward, start))


def plan_recomputations(forward: fx.GraphModule, start: int, wanted: float = math.inf) -> list[Recomputation]:
    """Which values to recompute, and how, to shed `wanted` bytes, or all that can be shed."""
    results: Sequence[Any] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    saved = {v for v in results[start:] if isinstance(v, fx.Node)}
    own = [v for v, is_own in zip(results[start:], owning(results, start), strict=True) if is_own]
    found = [each for each in (_recomputation(value, saved) for value in own) if each is not None]
    position = {node: i for i, node in enumerate(forward.graph.nodes)}
    found.sort(key=lambda each: (each.price, -_bytes(each.value), position[each.value]))
    chosen: list[Recomputation] = []
    needed: set[fx.Node] = set()
    total = 0
    for each in found:
        if total >= wanted:
            break
        if each.value in needed or not _bytes(each.value):
            continue
        # A source may not be saved any more by now: then its own steps come before.
        again = _recomputation(each.value, saved)
        if again is None:
            continue
        chosen.append(again)
        saved.discard(each.value)
        needed.update(again.sources)
        total += _bytes(each.value)
    return chosen


def _recomputation(value: fx.Node, saved: set[fx.Node]) -> Recomputation | None:
    """The steps to a value from the other saved values, if all of them are pointwise."""
    steps: dict[fx.Node, None] = {}
    sources: dict[fx.Node, None] = {}
    stack = [(value, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            steps[node] = None
            continue
        if node in steps or node in sources:
            continue
        if node is not value and (node in saved or node.op == "placeholder"):
            if not isinstance(node.meta.get("val"), Tensor):
                return None
            sources[node] = None
            continue
        if not _is_pointwise(node) or len(steps) + len(stack) > _MOST_STEPS:
            return None
        stack.append((node, True))
        stack += [(source, False) for source in node.all_input_nodes]
    return Recomputation(value, tuple(steps), tuple(sources))


def _is_pointwise(node: fx.Node) -> bool:
    op = node.target
    if node.op != "call_function" or not isinstance(op, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    if may_write(op) or draws(node):
        return False
    return torch.Tag.pointwise in op.tags or op in _CASTS or op.is_view


def _recompute_in(backward: fx.GraphModule, recomputation: Recomputation) -> None:
    """Replace an input of the backward by the steps that compute it, right before its first use."""
    graph = backward.graph
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    old = inputs[recomputation.value.name]
    made: dict[fx.Node, fx.Node] = {}
    for source in recomputation.sources:
        if source.name not in inputs:
            with graph.inserting_after(list(inputs.values())[-1]):
                inputs[source.name] = graph.placeholder(source.name)
            inputs[source.name].meta = dict(source.meta)
        made[source] = inputs[source.name]
    position = {node: i for i, node in enumerate(graph.nodes)}
    first = min(old.users, key=position.__getitem__)
    with graph.inserting_before(first):
        for step in recomputation.steps:
            made[step] = graph.node_copy(step, made.__getitem__)
    old.replace_all_uses_with(made[recomputation.value])
    graph.erase_node(old)


def owning(results: Sequence[Any], start: int) -> list[bool]:
    """For each result from `start` on: True if no other result shares its memory."""
    roots = [_root(value) if isinstance(value, fx.Node) else None for value in results]
    return [root is not None and root.op == "call_function" and roots.count(root) == 1 for root in roots[start:]]


def _root(node: fx.Node) -> fx.Node | None:
    """The node whose memory a value shares; None if there may be several."""
    while True:
        shared = shared_inputs(node)
        if not shared:
            return node
        if len(shared) > 1:
            return None
        node = shared[0]


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or any(type(size) is not int for size in val.shape):
        return 0
    return tensor_bytes(val)
