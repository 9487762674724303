"""Tensors that look like the values of a graph and mean nothing.

Two exceptions, where the operator itself makes its result, from such tensors:
- What the forward of an LSTM leaves for its backward: nobody knows its size before the operator runs (torch traces it
  as empty), and zeros in its place end the process.
- The order that sorting gives. Whoever undoes it writes each place of an empty tensor once, and reads indices there:
  with zeros for an order, most places would hold anything.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.io.node_values import size_hint
from wholestep.torch_private.autograd import below_autograd
from wholestep.torch_private.operators import OpOverload, op_name, plain_name

_OWN = {"aten::mkldnn_rnn_layer": 3, "aten::_cudnn_rnn": 3}
"""Operators with a result that only their backward can read, and which one it is."""
_SORTS = frozenset({"sort", "argsort", "randperm"})
_SAME_ELEMENTS = frozenset(
    {"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "clone", "_to_copy", "alias", "detach"}
)


def stand_in(value: Any, device: torch.device | None = None) -> Any:
    """A tensor of zeros (which are good as indices too) for a node or a fake tensor, or a list of them."""
    if isinstance(value, fx.Node):
        if device is None and _is_own(value):
            return _made_by_running(value)
        if device is None and _is_order(value):
            return _order(value)
        value = value.meta.get("val")
    if isinstance(value, list | tuple):
        return type(value)(stand_in(item, device) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, Tensor):
        return value
    shape, stride = [size_hint(n) for n in value.shape], [size_hint(n) for n in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=device or value.device)
    return made if made.is_meta else made.zero_()


def tell_unknown_sizes(graph: fx.Graph) -> None:
    """Write the sizes that only operators know into the metadata of a graph."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if not _is_own(node) or not isinstance(value, Tensor) or size_hint(value.numel()):
            continue
        try:
            shape = _made_by_running(node).shape
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # zeros are no arguments for it
        source: Any = node.args[0]
        parts = list(source.meta["val"])
        parts[node.args[1]] = node.meta["val"] = value.new_empty(shape)
        source.meta["val"] = tuple(parts)


def _is_own(node: fx.Node) -> bool:
    """Whether a node takes such a result."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or not isinstance(source.target, OpOverload):
        return False
    return _OWN.get(op_name(source.target)) == node.args[1]


def _is_order(node: fx.Node) -> bool:
    """Whether the elements of a node are the order that sorting gave."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        return False
    source = node
    while source.target is operator.getitem or _named(source, _SAME_ELEMENTS):
        source = source.args[0]  # type: ignore[assignment]
    return _named(source, _SORTS)


def _named(node: fx.Node, names: frozenset[str]) -> bool:
    return isinstance(node.target, OpOverload) and plain_name(node.target) in names


def _order(node: fx.Node) -> Any:
    if node.target is operator.getitem:
        return _order(node.args[0])[node.args[1]]  # type: ignore[arg-type]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), stand_in)
    with below_autograd(), torch.random.fork_rng():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _made_by_running(node: fx.Node) -> Tensor:
    source: Any = node.args[0]
    args, kwargs = fx.map_arg((source.args, dict(source.kwargs)), stand_in)
    with below_autograd(), torch.random.fork_rng():
        found: Tensor = source.target(*args, **kwargs)[node.args[1]]
    return found
