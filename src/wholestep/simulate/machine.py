"""How fast a machine is, and how long it takes for the work of an operator.

    arithmetic = flops / speed        traffic = bytes read and written / bandwidth

`seconds` lets the two run beside each other, as a kernel that is well written does; `seconds_in_turn` adds them, which
tells operators apart of which one reads more. Both leave the start of an operator (`launch`) to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What one call of an operator does."""

    flops: float
    moved: int
    """Bytes read and written."""
    half: bool = False
    """Whether the arithmetic is on numbers of 16 bits."""


@dataclass(frozen=True)
class Machine:
    """How fast a rank is. The defaults are round numbers of a data-centre GPU; only their ratios decide."""

    flops: float = 1e14
    """Floating point operations in a second."""
    memory: float = 1e12
    """Bytes read or written in a second."""
    link: float = 1e11
    """Bytes sent to the next rank in a second."""
    launch: float = 3e-6
    """Seconds that any operator takes at least."""
    half_flops: float | None = None
    """Operations in a second on numbers of 16 bits; None: as many as on others."""

    def seconds(self, work: Work) -> float:
        """The longer of arithmetic and traffic."""
        return max(self._arithmetic(work), work.moved / self.memory)

    def seconds_in_turn(self, work: Work) -> float:
        """Arithmetic, and then traffic."""
        return self._arithmetic(work) + work.moved / self.memory

    def _arithmetic(self, work: Work) -> float:
        speed = self.half_flops if work.half and self.half_flops is not None else self.flops
        return work.flops / speed


DEFAULT_MACHINE = Machine()
CPU = Machine(flops=5e10, memory=1e10, launch=1e-7)
GPU = Machine(flops=5e13, half_flops=5e14, memory=3e12, launch=1e-7)


def machine_of(device: torch.device) -> Machine:
    """Round numbers for the machine that a device is a part of."""
    return CPU if device.type == "cpu" else GPU


def timed(run: Callable[[], T], device: torch.device | None) -> tuple[float, T]:
    """The seconds that something takes on a device, and what it returns."""
    _finish(device)
    begin = perf_counter()
    result = run()
    _finish(device)
    return perf_counter() - begin, result


def _finish(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
