"""Values that are known when a step is called: those computed only from single-element state, such as a step count.

`state["step"].item()` in an optimizer, `if self.n_averaged == 0` in an EMA: the graph computes them, and a branch
on them becomes a guard. The graph itself is the recipe: the few nodes behind the value are run on the real state,
when the step is captured and again when the guard is checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import is_collective, is_custom_operator, may_draw
from wholestep.ir.signature import InputKind
from wholestep.ir.slices import ancestors
from wholestep.torch_private.fake_tensors import without_modes
from wholestep.torch_private.operators import OpOverload

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
    known: bool
    """Whether its value can be computed before the step runs."""


class KnownValues:
    """Computes the tensors behind nodes, each once."""

    def __init__(self, placeholder_value: Callable[[fx.Node], Any | None], *, single: bool = True) -> None:
        self._placeholder_value = placeholder_value
        self._single = single
        self._memo: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any | None:
        """The real value of a node, or None where it depends on more than single-element state."""
        if node in self._memo:
            return self._memo[node]
        value = self._compute(node)
        self._memo[node] = value
        return value

    def is_constant(self, node: fx.Node) -> bool:
        """Whether a known node depends on no input at all."""
        return all(source.op != "placeholder" for source in ancestors([node]))

    def _compute(self, node: fx.Node) -> Any | None:
        if node.op == "placeholder":
            value = self._placeholder_value(node)
            if isinstance(value, Tensor):
                if self._single and value.numel() != 1:
                    return None
                with without_modes():
                    return value.detach().clone()
            return value
        if node.op == "get_attr":
            return _constant(node)
        if node.op != "call_function" or not _is_pure(node) or (self._single and not _is_small(node)):
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


class Recipe:
    """Recomputes known nodes from new placeholder values, whatever happens to the graph later."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self._order: list[tuple[fx.Node, str, Any, Any, Any]] = []
        self._seen: set[fx.Node] = set()
        for node in nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node in self._seen:
            return
        self._seen.add(node)
        for source in node.all_input_nodes:
            self._visit(source)
        target = _constant(node) if node.op == "get_attr" else node.target
        self._order.append((node, node.op, target, node.args, node.kwargs))

    def run(self, placeholder_value: Callable[[fx.Node], Any]) -> dict[fx.Node, Any]:
        """The value of every node of the recipe."""
        env: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for node, op, target, args, kwargs in self._order:
                if op == "placeholder":
                    env[node] = placeholder_value(node)
                elif op == "get_attr":
                    env[node] = target
                else:
                    env[node] = target(*fx.map_arg(args, env.__getitem__), **fx.map_arg(kwargs, env.__getitem__))
        return env


def _constant(node: fx.Node) -> Any:
    return node.meta["constant"]


def _is_pure(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        if may_draw(node.target):
            return False
        if is_custom_operator(node.target):  # its kernel runs as often as in eager
            return False
        if is_collective(node.target):  # neither capture nor a guard may enter a collective alone
            return False
    elif node.target is not operator.getitem and getattr(node.target, "__module__", "") not in {
        "_operator",
        "math",
        "builtins",
    }:
        return False
    return True


def _is_small(node: fx.Node) -> bool:
    val = node.meta.get("val")
    items = val if isinstance(val, list | tuple) else [val]
    return all(not isinstance(v, Tensor) or v.numel() == 1 for v in items)
