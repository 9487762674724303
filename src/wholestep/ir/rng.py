"""Functions of a graph that read and set the random generators, so that a replay draws what eager would draw.

    state = get_rng_state('cpu')         before the forward of a checkpointed block
    ...
    set_rng_state(state, 'cpu')          before its recomputation in the backward

They always mean the default generator of a device. A state is the uint8 CPU tensor that torch itself uses.
Dead-code elimination must keep all three: what a later draw returns depends on where they stand.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.node import has_side_effect


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
