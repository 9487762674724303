"""The arguments of a call node by name, whether they were passed by position or by keyword.

    all_reduce(x, 'sum', '0')                       group_name is '0'
    call_on_copies(mylib.update_, (0,), p, g)       arguments of `mylib.update_`: p, g
    relu6(x, True)                                  a Python function: inplace is True

An operator has a schema, a Python function a signature; functions built into torch have neither, and the few whose
arguments matter are listed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from wholestep.ir.graph_functions import call_on_copies
from wholestep.torch_private.operators import OpOverload, argument_names, bound_argument, named_arguments, schema_of

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
"""Functions of torch without a Python signature."""


def operator_of(node: fx.Node) -> OpOverload | None:
    """The operator that a node calls, also through `call_on_copies`."""
    target = node.args[0] if node.target is call_on_copies else node.target
    return target if isinstance(target, OpOverload) else None


def find_argument(node: fx.Node, name: str) -> int | str | None:
    """Where a node that calls an operator has an argument: its index in `args`, or its name if it is in `kwargs`."""
    op = operator_of(node)
    position = argument_position(op, name) if op is not None else None
    if position is None:
        return None
    index = position + (0 if op is node.target else 2)
    if index < len(node.args):
        return index
    return name if name in node.kwargs else None


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument of that name; the callee's own default where it is not passed, `default` where it has none."""
    op = operator_of(node)
    if op is None:
        return _python_argument(node, name, default)
    where = find_argument(node, name)
    if where is None:
        return _schema_defaults(op).get(name, default)
    return node.args[where] if isinstance(where, int) else node.kwargs[where]


def argument_at(node: fx.Node, position: int) -> Any:
    """The argument at a position of the schema of the operator that is the node's target."""
    assert isinstance(node.target, OpOverload)
    return bound_argument(node.target, position, node.args, node.kwargs)


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """All arguments that are passed to the operator that a node calls."""
    op = operator_of(node)
    assert op is not None
    args = node.args if op is node.target else node.args[2:]
    return named_arguments(op, args, node.kwargs)


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in an argument: itself, or those in lists and tuples, in order and with repetitions."""
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, list | tuple):
        return [node for item in value for node in nodes_in(item)]
    return []


@lru_cache(maxsize=4096)
def argument_position(op: OpOverload, name: str) -> int | None:
    """The schema position of an argument; None if the operator has no argument of that name."""
    names = argument_names(op)
    return names.index(name) if name in names else None


@lru_cache(maxsize=4096)
def _schema_defaults(op: OpOverload) -> dict[str, Any]:
    return {a.name: a.default_value for a in schema_of(op).arguments if a.has_default_value()}


def _python_argument(node: fx.Node, name: str, default: Any) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    names, defaults = _parameters(node.target) if callable(node.target) else ((), {})
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else defaults.get(name, default)


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
