"""Results that would carry an autograd graph in eager: they say so, and refuse to be differentiated.

A replay records no autograd graph. Returning such a result as a plain tensor would silently cut gradients where it is
used further: `head(step(x)).sum().backward()` would leave the step's parameters without any. So it requires grad, as in
eager, and its backward raises. torch's own C++ node for this costs 19 us a step (a Python one 75), and can only raise
RuntimeError: the text is that of NoGraphError.
"""

from __future__ import annotations

from torch import Tensor

from wholestep.errors import NoGraphError
from wholestep.torch_private.autograd import error_in_backward

_refuse = error_in_backward(
    str(
        NoGraphError(
            "backward() reached a result of a compiled step, and a replay records no autograd graph.",
            fix="call backward() inside of the step; or detach() the result if no gradient should flow into the step.",
        )
    )
)


def attach(value: Tensor) -> Tensor:
    """The same values, as a tensor that requires grad."""
    attached: Tensor = _refuse(value.detach().requires_grad_())
    return attached
