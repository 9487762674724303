"""The arguments of calls in Python, by name: dynamo and modules of torch pass many of them by position.

relu6(x, True)                       inplace is True
batch_norm(x, m, v, w, b, True)      training is True: m and v are written
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_STATISTICS = ("input", "weight", "bias", "running_mean", "running_var")
_BUILTINS: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: (*_STATISTICS, "training"),
    torch.native_batch_norm: (*_STATISTICS, "training"),
    torch.instance_norm: (*_STATISTICS, "use_input_stats"),
    torch.dropout: ("input", "p", "train"),
    torch.alpha_dropout: ("input", "p", "train"),
    torch.feature_dropout: ("input", "p", "train"),
    torch.feature_alpha_dropout: ("input", "p", "train"),
}
"""Functions without a signature that Python knows."""

_NORMS: frozenset[Any] = frozenset(
    {functional.batch_norm, torch.batch_norm, torch.native_batch_norm, functional.instance_norm, torch.instance_norm}
)
_SWITCHING = ("_enter_", "_exit_", "enter_dual_level", "exit_dual_level", "_saved_tensors_hooks_", "_set_")
_NESTING = ("_increment_nesting", "_decrement_nesting")
_LOOKUPS: frozenset[Any] = frozenset({functional.embedding, functional.embedding_bag})


def argument(node: fx.Node, name: str) -> Any:
    """What a call of a function passes under a name; its default where nothing is passed, None if it has none."""
    if name in node.kwargs:
        return node.kwargs[name]
    names, defaults = _parameters(node.target) if callable(node.target) else ((), {})
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else defaults.get(name)


def written_by_function(node: fx.Node) -> list[fx.Node]:
    """The arguments that a function of torch writes although its name does not say so."""
    names: tuple[str, ...] = ()
    if node.target in _NORMS:
        names = ("running_mean", "running_var") if _uses_batch(node) else ()
    elif node.target in _LOOKUPS:
        # Rows that are looked up are scaled down, in place.
        names = () if argument(node, "max_norm") is None else ("weight",)
    elif node.args[1:] or node.kwargs:
        names = ("input",) if argument(node, "inplace") is True else ()
    found = (argument(node, name) for name in names)
    return [each for each in found if isinstance(each, fx.Node)]


def is_fence(target: Any) -> bool:
    """Whether a function of torch switches something for all that follows, other than grad mode and autocast."""
    name, home = getattr(target, "__name__", ""), str(getattr(target, "__module__", None) or "torch")
    return name.startswith(_SWITCHING) or name.endswith(_NESTING) if home.split(".")[0] == "torch" else False


def is_switched_off(node: fx.Node) -> bool:
    """Whether a call is told that it is not training."""
    return argument(node, "training") is False or argument(node, "train") is False


def _uses_batch(node: fx.Node) -> bool:
    """Whether statistics are those of the batch, or may be."""
    name = "use_input_stats" if node.target in (functional.instance_norm, torch.instance_norm) else "training"
    return argument(node, name) not in (False, None)


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the parameters that may be passed by position, and all defaults."""
    if function in _BUILTINS:
        return _BUILTINS[function], {}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return (), {}
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, each in signature.parameters.items() if each.kind in by_place)
    empty = inspect.Parameter.empty
    return names, {name: each.default for name, each in signature.parameters.items() if each.default is not empty}
