"""Keep less for the backward than torch's cut does: values that are pointwise in others that are kept anyway.

    forward   a = mm(x, w)      kept: a, g         backward  .. mm(.., g), gelu_backward(.., a)
              g = gelu(a)
    forward   the same          kept: a            backward  g = gelu(a); .. mm(.., g), gelu_backward(.., a)

torch's cut keeps both, for writing `g` once more takes time. So this is the next cheaper thing after that cut: a read
of the sources and a write of the value, and no matrix product. Values come in one order, cheapest for its bytes first;
who wants to shed more gets a longer piece of the same list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
class Recipe:
    """How the backward makes a value that is not kept."""

    value: fx.Node
    steps: tuple[fx.Node, ...]
    """Nodes of the forward, in order, the value last."""
    sources: tuple[fx.Node, ...]
    """Inputs and kept values."""

    @property
    def price(self) -> float:
        """Bytes that are moved for each byte that is not kept."""
        read = sum(_bytes(source) for source in self.sources)
        return (read + _bytes(self.value)) / max(_bytes(self.value), 1)


def shed(forward: fx.GraphModule, backward: fx.GraphModule, start: int, wanted: int) -> int:
    """Let a backward make values that its forward kept (its results from `start` on), until `wanted` bytes are saved
    or nothing is left; returns the bytes."""
    recipes = plan(forward, start, wanted)
    for recipe in recipes:
        _make_in(backward, recipe)
    gone = {recipe.value for recipe in recipes}
    output = forward.graph.output_node()
    results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    output.args = (tuple(v for i, v in enumerate(results) if i < start or v not in gone),)
    forward.recompile()
    backward.recompile()
    return sum(_bytes(recipe.value) for recipe in recipes)


def sheddable(forward: fx.GraphModule, start: int) -> tuple[int, ...]:
    """Bytes of all values that `shed` can save, in the order in which it takes them."""
    return tuple(_bytes(recipe.value) for recipe in plan(forward, start))


def plan(forward: fx.GraphModule, start: int, wanted: float = math.inf) -> list[Recipe]:
    """Which values to make again, and how, to save so many bytes or all that can be."""
    results: Sequence[Any] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    kept = {v for v in results[start:] if isinstance(v, fx.Node)}
    own = [v for v, is_own in zip(results[start:], owning(results, start), strict=True) if is_own]
    found = [recipe for recipe in (_recipe(value, kept) for value in own) if recipe is not None]
    place = {node: i for i, node in enumerate(forward.graph.nodes)}
    found.sort(key=lambda recipe: (recipe.price, -_bytes(recipe.value), place[recipe.value]))
    chosen: list[Recipe] = []
    needed: set[fx.Node] = set()
    total = 0
    for recipe in found:
        if total >= wanted:
            break
        if recipe.value in needed or not _bytes(recipe.value):
            continue
        # What was a source may be gone by now: then its own steps come before.
        again = _recipe(recipe.value, kept)
        if again is None:
            continue
        chosen.append(again)
        kept.discard(recipe.value)
        needed.update(again.sources)
        total += _bytes(recipe.value)
    return chosen


def _recipe(value: fx.Node, kept: set[fx.Node]) -> Recipe | None:
    """The steps to a value from what is kept besides, if all of them are pointwise."""
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
        if node is not value and (node in kept or node.op == "placeholder"):
            if not isinstance(node.meta.get("val"), Tensor):
                return None
            sources[node] = None
            continue
        if not _is_pointwise(node) or len(steps) + len(stack) > _MOST_STEPS:
            return None
        stack.append((node, True))
        stack += [(source, False) for source in node.all_input_nodes]
    return Recipe(value, tuple(steps), tuple(sources))


def _is_pointwise(node: fx.Node) -> bool:
    op = node.target
    if node.op != "call_function" or not isinstance(op, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    if may_write(op) or draws(node):
        return False
    return torch.Tag.pointwise in op.tags or op in _CASTS or op.is_view


def _make_in(backward: fx.GraphModule, recipe: Recipe) -> None:
    """Replace an input of the backward by the steps that make it, right before its first use."""
    graph = backward.graph
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    old = inputs[recipe.value.name]
    made: dict[fx.Node, fx.Node] = {}
    for source in recipe.sources:
        if source.name not in inputs:
            with graph.inserting_after(list(inputs.values())[-1]):
                inputs[source.name] = graph.placeholder(source.name)
            inputs[source.name].meta = dict(source.meta)
        made[source] = inputs[source.name]
    place = {node: i for i, node in enumerate(graph.nodes)}
    first = min(old.users, key=place.__getitem__)
    with graph.inserting_before(first):
        for step in recipe.steps:
            made[step] = graph.node_copy(step, made.__getitem__)
    old.replace_all_uses_with(made[recipe.value])
    graph.erase_node(old)


def owning(results: Sequence[Any], start: int) -> list[bool]:
    """Of each result from `start` on: whether its memory is nobody else's."""
    roots = [_root(value) if isinstance(value, fx.Node) else None for value in results]
    return [root is not None and root.op == "call_function" and roots.count(root) == 1 for root in roots[start:]]


def _root(node: fx.Node) -> fx.Node | None:
    """The node whose memory a value shares; None if it may be that of several."""
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
