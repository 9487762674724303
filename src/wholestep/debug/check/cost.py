"""Seconds and peak bytes of a call, eager and compiled, when both are warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.remat.measure import bytes_at_most

_TIMES = 2


@dataclass(frozen=True)
class CallCost:
    """Seconds of the fastest call, and the most bytes of one above what was there before it."""

    seconds: float = 0.0
    peak_bytes: int | None = None


def cost_of(run: Callable[[], Any], device: torch.device) -> CallCost:
    """Run a call a few times. The caller puts the state back."""
    seconds = min(_seconds(run, device) for _ in range(_TIMES))
    _, peak = bytes_at_most(run, device)
    return CallCost(seconds, peak)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
