"""Values that are known before a graph runs: scalars computed from single-element state, comparisons of random numbers.

`state["step"].item()` in an optimizer, `if self.n_averaged == 0` in an EMA: the graph computes them, and a branch
on them becomes a guard. The graph itself is the recipe: the few nodes behind the value are run on the real state,
when the step is captured and again when the guard is checked.

Some branches on random numbers always go the same way: `torch.rand([]) < 0.0` is False for every number. Models with
layer drop evaluate it before each layer, also where the probability is 0:

    if torch.rand([]) < self.layerdrop:      layerdrop == 0.0: never taken; the trace continues
        continue                             layerdrop == 0.1: depends on the number; tracing fails as before

The random operator stays in the graph, so that the generator advances as in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from wholestep.ir.effects import is_collective, is_custom_operator, may_draw
from wholestep.ir.graph_walks import ancestors
from wholestep.ir.signature import InputKind
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

    def of_constant(self, node: fx.Node) -> Any | None:
        """The value of a node that is computed from no input and draws nothing; None for any other."""
        if node in self._memo:
            return self._memo[node]
        sources, seen = [node], {node}
        for each in sources:
            if each.op not in ("call_function", "get_attr"):
                return None
            sources += [source for source in each.all_input_nodes if source not in seen]
            seen.update(each.all_input_nodes)
        for each in sorted(sources):  # in the order of the graph: no deep recursion
            if self.of(each) is None:
                return None
        return self._memo[node]

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

    def steps(self) -> list[tuple[fx.Node, str, Any, Any, Any]]:
        """The nodes in order: node, op, target (of a constant its value), arguments."""
        return list(self._order)

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


_DRAWS = frozenset({torch.rand, torch.rand_like})
_QUESTIONS = frozenset({torch.Tensor.__bool__, torch.Tensor.item, torch.is_nonzero})
_COMPARISONS: dict[Any, str] = {
    **dict.fromkeys((torch.Tensor.__lt__, torch.Tensor.lt, torch.lt, torch.Tensor.less, torch.less), "<"),
    **dict.fromkeys((torch.Tensor.__gt__, torch.Tensor.gt, torch.gt, torch.Tensor.greater, torch.greater), ">"),
    **dict.fromkeys((torch.Tensor.__le__, torch.Tensor.le, torch.le), "<="),
    **dict.fromkeys((torch.Tensor.__ge__, torch.Tensor.ge, torch.ge), ">="),
}
_BELOW = -1e-3
"""Below 0 in every dtype that a number is rounded to."""


class KnownDraws(TorchFunctionMode):
    """While it is on, comparisons of a random number whose result is known are answered without its value."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        self._answers: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS and args[0] in self._answers:
            return self._answers[args[0]]
        result = func(*args, **kwargs)
        if func in _DRAWS and isinstance(result, Tensor):
            self._draws[result] = None
        elif func in _COMPARISONS and len(args) == 2 and not kwargs and args[0] in self._draws:
            answer = compared(_COMPARISONS[func], args[1])
            if answer is not None and result.numel() == 1:
                self._answers[result] = answer
        return result


def compared(sign: str, number: Any) -> bool | None:
    """The result of a comparison for every number from 0 on and below 1; None if it differs between them."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    less = sign in ("<", "<=")
    if number >= 1:
        return less
    if number <= (0 if sign in ("<", ">=") else _BELOW):
        return not less
    return None
