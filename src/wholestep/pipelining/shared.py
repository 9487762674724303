"""Parameters that several stages use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MultiUseParameterConfig(Enum):
    """What happens to a parameter that several stages use."""

    TRANSMIT = 1
    """It lives in the first of them; its value is sent on and its gradient comes back."""
    REPLICATE = 2
    """Each of them has a copy; the gradients are summed before the optimizer steps."""


@dataclass(frozen=True)
class SharedParameter:
    """One parameter that several stages hold or use."""

    names: tuple[str, ...]
    """Its names in the model; more than one if it is tied."""
    stages: tuple[int, ...]
    mode: MultiUseParameterConfig
