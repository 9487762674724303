"""Guard on the modes of the process that decide what eager would do: autocast, grad mode, switches of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from wholestep._torch_compat import SWITCHES
from wholestep.runtime.guards.guard import Call, Guard


def ambient_state() -> tuple[Any, ...]:
    """Modes of the process that decide what eager would do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        *(switch() for switch in SWITCHES),
        torch.get_default_dtype(),
    )


class SameModes(Guard):
    """The process is in the modes of the capture."""

    def __init__(self) -> None:
        self._before = ambient_state()

    def holds(self, call: Call) -> bool:
        return ambient_state() == self._before

    def reasons(self, call: Call) -> Iterator[str]:
        if not self.holds(call):
            yield "autocast, grad mode, inference mode or the default dtype is different"
