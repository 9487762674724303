"""Run a graph in float64: the reference to which a pass with `approximates(bound)` is held.

    before, bf16 and f32                       reference
    a = _to_copy(x, dtype=bfloat16)            a = _to_copy(x, dtype=float64)
    y = mm(a, w)                               y = mm(a, w)
    p = native_dropout(y, 0.1, True)           p = the result of native_dropout on the recorded dtype of y, widened

Inputs and constants are widened, dtype arguments become float64, and so does every result. What draws random numbers
runs in the dtype that the graph had, since another dtype draws others; so does an operator that refuses float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import may_draw
from wholestep.passes.engine.pretend_ranks import PretendRanks
from wholestep.torch_private.fx_graphs import pytree

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class InFloat64(PretendRanks):
    """Interprets a graph module with every float in float64."""

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return _map_tensors(widened_tensor, super().run_node(n))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if may_draw(target):
            return self._in_recorded_dtype(target)
        try:
            return super().call_function(target, _widened_dtypes(args), _widened_dtypes(kwargs))
        except (RuntimeError, NotImplementedError):  # the operator has no kernel for float64
            return self._in_recorded_dtype(target)

    def _in_recorded_dtype(self, target: Any) -> Any:
        def value_of(source: fx.Node) -> Any:
            was, now = source.meta.get("val"), self.env[source]
            return now.to(was.dtype) if isinstance(was, Tensor) and was.dtype in _WIDE else now

        args, kwargs = fx.map_arg((self._node.args, self._node.kwargs), value_of)
        return super().call_function(target, args, kwargs | ({"device": "cpu"} if "device" in kwargs else {}))


def widened_tensor(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128 with the same strides; itself if it is not rounded."""
    wide = _WIDE.get(tensor.dtype)
    return tensor if wide is None else tensor.to(wide)


def _widened_dtypes(arguments: Any) -> Any:
    return pytree.tree_map(lambda leaf: _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf, arguments)


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)
