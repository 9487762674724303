"""What a step has not computed yet, where the user will look: a tensor that completes the step when somebody does.

zero_grad(); loss.backward(); optimizer.step()     the update waits for the next iteration, and with it the gradient
p.grad.norm()                                      flushes the step, then reads the reduced gradient
scaler.get_scale()                                 the same for what a GradScaler, which has no hooks, holds
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholestep.torch_private.fake_tensors import no_torch_function, wrapper_tensor
from wholestep.torch_private.pytrees import pytree


class LateTensor(torch.Tensor):
    """Shape and dtype of a tensor; every operator on it asks for the tensor itself."""

    _ask: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Any, ask: Callable[[], Tensor]) -> LateTensor:
        made: LateTensor = wrapper_tensor(cls, like)
        return made

    def __init__(self, like: Any, ask: Callable[[], Tensor]) -> None:
        self._ask = ask

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._ask())

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(LateTensor, lambda late: late._ask(), (args, kwargs or {}))
        return func(*args, **kwargs)
