"""Values that are known when a step is called: those computed only from single-element state, such as a step count.

`state["step"].item()` in an optimizer, `if self.n_averaged == 0` in an EMA: the graph computes them, and a branch on them
becomes a guard. The graph itself is the recipe: the few nodes behind the value are run on the real state, when the
step is captured and again when the guard is checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep._torch_compat import OpOverload, without_modes
from wholestep.ir.signature import InputKind

KNOWN_KINDS = frozenset(
    {
        InputKind.OPTIMIZER_STATE,
        InputKind.BUFFER,
        InputKind.SCALER_STATE,
        InputKind.HYPER_PARAMETER,
        InputKind.CAPTURED,
    }
)


@dataclass(frozen=True, eq=False)
class ItemLeaf:
    """The number inside of a single-element tensor that a node computes."""

    node: fx.Node
    recipe: Callable[[Callable[[fx.Node], Any]], Any] | None
    """Computes the tensor from the current value of placeholders; None if it is not known before the step runs."""


class KnownValues:
    """Computes the tensors behind nodes, each once."""

    def __init__(self, placeholder_value: Callable[[fx.Node], Any | None]) -> None:
        self._placeholder_value = placeholder_value
        self._memo: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any | None:
        """The real value of a node, or None where it depends on more than single-element state."""
        if node in self._memo:
            return self._memo[node]
        value = self._compute(node)
        self._memo[node] = value
        return value

    def _compute(self, node: fx.Node) -> Any | None:
        if node.op == "placeholder":
            value = self._placeholder_value(node)
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    return None
                with without_modes():
                    return value.detach().clone()
            return value
        if node.op == "get_attr":
            return _constant(node)
        if node.op != "call_function" or not _is_small(node):
            return None
        unknown = False

        def argument(n: fx.Node) -> Any:
            nonlocal unknown
            value = self.of(n)
            unknown = unknown or value is None
            return value

        args = fx.map_arg(node.args, argument)
        kwargs = fx.map_arg(node.kwargs, argument)
        if unknown:
            return None
        with without_modes(), torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]


def recipe_of(node: fx.Node) -> Callable[[Callable[[fx.Node], Any]], Any]:
    """A function that recomputes a known node from new placeholder values, independent of later graph rewrites."""
    order: list[tuple[fx.Node, str, Any, Any, Any]] = []
    seen: set[fx.Node] = set()

    def visit(n: fx.Node) -> None:
        if n in seen:
            return
        seen.add(n)
        for source in n.all_input_nodes:
            visit(source)
        order.append((n, n.op, n.target if n.op != "get_attr" else _constant(n), n.args, n.kwargs))

    visit(node)

    def run(placeholder_value: Callable[[fx.Node], Any]) -> Any:
        env: dict[fx.Node, Any] = {}
        for n, op, target, args, kwargs in order:
            if op == "placeholder":
                env[n] = placeholder_value(n)
            elif op == "get_attr":
                env[n] = target
            else:
                with torch.no_grad():
                    env[n] = target(*fx.map_arg(args, env.__getitem__), **fx.map_arg(kwargs, env.__getitem__))
        return env[node]

    return run


def _constant(node: fx.Node) -> Any:
    return node.meta["constant"]


def _is_small(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
    elif node.target is not operator.getitem and getattr(node.target, "__module__", "") not in {
        "_operator",
        "math",
        "builtins",
    }:
        return False
    val = node.meta.get("val")
    items = val if isinstance(val, list | tuple) else [val]
    return all(not isinstance(v, Tensor) or v.numel() == 1 for v in items)
