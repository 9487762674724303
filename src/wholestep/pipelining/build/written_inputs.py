"""Which inputs of a stage its graph writes to, directly or through a view."""

from __future__ import annotations

from torch import fx, nn

from wholestep.ir.effects import shared_inputs, writes, written_positions
from wholestep.torch_private.operators import OpOverload


def written_inputs(module: nn.Module) -> frozenset[int]:
    """Places of the inputs that a stage changes. It gets copies of them: what came by message is a leaf of autograd."""
    if not isinstance(module, fx.GraphModule):
        return frozenset()
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    behind: dict[fx.Node, set[fx.Node]] = {node: {node} for node in inputs}
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        shared = shared_inputs(node) if isinstance(node.target, OpOverload) else _first(node)
        behind[node] = set().union(*(behind.get(given, set()) for given in shared))
        if writes(node):
            for given in _written(node):
                found |= behind.get(given, set())
    return frozenset(place for place, node in enumerate(inputs) if node in found)


def _written(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.target, OpOverload):
        return _first(node)
    given = [node.args[place] for place in written_positions(node.target) if place < len(node.args)]
    flat = [item for value in given for item in (value if isinstance(value, list | tuple) else [value])]
    return [item for item in flat if isinstance(item, fx.Node)]


def _first(node: fx.Node) -> list[fx.Node]:
    return [item for item in node.args[:1] if isinstance(item, fx.Node)]
