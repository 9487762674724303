"""Functions of a graph that read and set the random generators, so that a replay draws what eager would draw.

    state = get_rng_state('cpu')         before the forward of a checkpointed block
    ...
    set_rng_state(state, 'cpu')          before its recomputation in the backward

They always mean the default generator of a device. A state is the uint8 CPU tensor that torch itself uses.
Dead-code elimination must keep all three: what a later draw returns depends on where they stand.

Branches on random numbers that always go the same way: `torch.rand([]) < 0.0` is False whatever is drawn.

Models with layer drop ask so before each layer, also where the probability is 0:

    if torch.rand([]) < self.layerdrop:      layerdrop == 0.0: never; the trace goes on
        continue                             layerdrop == 0.1: depends on the draw; tracing fails as before

The draw itself stays in the graph, so that the generator moves as in eager.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary


@has_side_effect
def get_rng_state(device: str) -> Tensor:
    """A copy of the state of the default generator of `device` ("cpu", "cuda:0")."""
    where = torch.device(device)
    if where.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(where).get_rng_state(where)
    return state


@has_side_effect
def set_rng_state(state: Tensor, device: str) -> None:
    """Put the default generator of `device` into `state`."""
    where = torch.device(device)
    if where.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(where).set_rng_state(state, where)


@has_side_effect
def manual_seed(seed: int) -> None:
    """Seed the generators of all devices, as `torch.manual_seed` does."""
    torch.manual_seed(seed)


SIDE_EFFECTS = frozenset({get_rng_state, set_rng_state, manual_seed})
"""The functions here, none of which may run when a graph is only looked at."""


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
    """While it is on, a question about a draw whose answer is known is answered without the value of the draw."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
        self._answers: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS and args[0] in self._answers:
            return self._answers[args[0]]
        result = func(*args, **kwargs)
        if func in _DRAWS and isinstance(result, torch.Tensor):
            self._draws[result] = None
        elif func in _COMPARISONS and len(args) == 2 and not kwargs and args[0] in self._draws:
            answer = compared(_COMPARISONS[func], args[1])
            if answer is not None and result.numel() == 1:
                self._answers[result] = answer
        return result


def compared(sign: str, number: Any) -> bool | None:
    """What every number from 0 on and below 1 gives in a comparison; None where some give True and some False."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    less = sign in ("<", "<=")
    if number >= 1:
        return less
    if number <= (0 if sign in ("<", ">=") else _BELOW):
        return not less
    return None
