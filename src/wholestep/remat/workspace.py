"""What operators need besides their results: measured, by calling each one once with tensors that mean nothing.

Convolutions and attention lay out their inputs anew, sorts keep places: no metadata tells of that memory. Elementwise
operators need none, but for numbers, which become tensors, and inputs that are not packed, which some of them copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import (
    draws,
    is_communication,
    is_custom_operator,
    is_data_dependent,
    shared_inputs,
    writes,
)
from wholestep.ir.graphs import tensors_in
from wholestep.ir.io.node_values import is_packed, tensor_bytes
from wholestep.remat.costs import is_elementwise
from wholestep.remat.measure import bytes_at_most
from wholestep.remat.stand_in import stand_in
from wholestep.torch_private.autograd import below_autograd
from wholestep.torch_private.operators import OpOverload


class OperatorMemory:
    """The memory of operators on one device, each measured once for the same arguments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, int] = {}

    def workspace(self, node: fx.Node) -> int:
        """Bytes that a node needs at most, besides its results, while it runs."""
        more = self.extra(node)
        made = sum(tensor_bytes(t) for t in tensors_in(node.meta.get("val")) if t.device == self._device)
        return 0 if more is None else max(more - made, 0)

    def extra(self, node: fx.Node) -> int | None:
        """Bytes that a node has at most while it runs, with its results; None where those are all."""
        if not self._is_measured(node):
            return None
        key = (node.target, _looks(node.args), _looks(tuple(node.kwargs.items())))
        if key not in self._known:
            self._known[key] = self._measure(node)
        found = self._known[key]
        return None if found < 0 else found

    def _is_measured(self, node: fx.Node) -> bool:
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload) or is_communication(target):
            return False
        if is_data_dependent(target) or shared_inputs(node) or (is_elementwise(target) and not _is_odd(node)):
            return False
        if writes(node) or draws(node) or is_custom_operator(target):
            return False
        made = [t for t in tensors_in(node.meta.get("val")) if t.device == self._device]
        return bool(made) and any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)

    def _measure(self, node: fx.Node) -> int:
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        try:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), stand_in)
            with below_autograd(), torch.random.fork_rng():
                function(*args, **kwargs)  # loads what it loads
                _, most = bytes_at_most(lambda: function(*args, **kwargs), self._device)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return -1  # zeros are no arguments for it
        return -1 if most is None else most


def _is_odd(node: fx.Node) -> bool:
    """Whether an operator has numbers among its arguments, or tensors that are not packed."""
    if any(isinstance(value, int | float) for value in (*node.args, *node.kwargs.values())):
        return True
    values = (value for source in node.all_input_nodes for value in tensors_in(source.meta.get("val")))
    return any(value.layout is torch.strided and not is_packed(value) for value in values)


def _looks(value: Any) -> Any:
    """What an operator's memory depends on: shapes and numbers."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):
        return (value.dtype, value.device, tuple(map(str, value.shape)), tuple(map(str, value.stride())))
    if isinstance(value, list | tuple):
        return tuple(map(_looks, value))
    return (type(value), str(value))
