"""Results that would carry an autograd graph in eager: they say so, and refuse to be differentiated.

A replay records no autograd graph. Returning such a result as a plain tensor would silently cut gradients where it is
used further: `head(step(x)).sum().backward()` would leave the step's parameters without any. So it requires grad, as in
eager, and its backward raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wholestep.errors import NoGraphError


class _Replayed(torch.autograd.Function):
    """The identity, with a backward that explains itself."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NoGraphError(
            "backward() reached a result of a compiled step, and a replay records no autograd graph.",
            fix="call backward() inside of the step; or detach() the result if no gradient should flow into the step.",
        )


_ANCHOR = torch.empty(0, requires_grad=True)
"""What a replayed result seems to depend on."""


def attach(value: Tensor) -> Tensor:
    """The same values, as a tensor that requires grad."""
    with torch.enable_grad():
        attached: Tensor = _Replayed.apply(value, _ANCHOR)  # type: ignore[no-untyped-call]
    return attached
