"""Arguments of operators: what the fake operator takes, and what stands for it in the graph."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, fx

from wholestep.capture.graph.tensor_values import Values
from wholestep.capture.scalars.scalars import scalar_of
from wholestep.torch_private.fake_tensors import FakeTensor

_VALUES = frozenset({int, float, bool, str, torch.dtype, torch.device})


class OperandHost(Protocol):
    """What arguments ask of the capture."""

    def lift(self, tensor: Tensor) -> Tensor: ...

    def generator(self, generator: torch.Generator) -> fx.Node: ...

    def shape_arg(self, value: Any) -> Any: ...


class Operands:
    """Turns arguments into fakes and nodes."""

    def __init__(self, values: Values, host: OperandHost) -> None:
        self._values = values
        self._host = host
        self.has_scalars = False
        """Set where a number of the graph was among the arguments; whoever looks at it resets it."""

    def convert_all(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """Positional arguments as fakes and as nodes."""
        fakes, nodes = [], []
        for arg in args:
            fake, node = self._convert(arg)
            fakes.append(fake)
            nodes.append(node)
        return fakes, nodes

    def convert_kwargs(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments by name as fakes and as nodes."""
        if not kwargs:
            return {}, {}
        pairs = {name: self._convert(arg) for name, arg in kwargs.items()}
        return {n: p[0] for n, p in pairs.items()}, {n: p[1] for n, p in pairs.items()}

    def _convert(self, arg: Any) -> tuple[Any, Any]:
        if isinstance(arg, FakeTensor):
            return arg, self._values.node_of(arg)
        if arg is None or type(arg) in _VALUES:  # by type: a number of the graph says that it is an int
            return arg, arg
        if isinstance(arg, list | tuple):
            fakes, nodes = self.convert_all(tuple(arg))
            return fakes, nodes
        if isinstance(arg, Tensor):
            lifted = self._host.lift(arg)
            return lifted, self._values.node_of(lifted)
        if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
            scalar = scalar_of(arg)
            if scalar is None:
                return arg, self._host.shape_arg(arg)
            self.has_scalars = True
            return (1.0 if scalar.kind is float else 1) if scalar.hint is None else scalar.hint, scalar.fx_arg()
        if isinstance(arg, torch.Generator):
            return None, self._host.generator(arg)
        return arg, arg
