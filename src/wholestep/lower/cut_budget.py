"""A budget that torch's own cut nearly meets: the step as it is compiled without a budget, with a little less kept.

Level 0 is what runs without a budget, the fastest there is. Each further level keeps 1/128 of that peak less
(`shed.py`). The first level that fits wins, counted from the one that would fit if every byte counted at the peak: so a
larger budget never gets a lower peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from wholestep.ir.memory_report import SavedTensor
from wholestep.lower.compiled import CompiledRegion
from wholestep.lower.remat import Cut, ForwardBackward

_LEVELS = 128
_TRIES = 3


@dataclass(frozen=True)
class Level:
    """A step that was built with torch's cut."""

    shed: int
    peak: int
    cuts: tuple[Cut, ...]
    """One for each region with a forward and a backward."""

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        """What is kept, largest first."""
        kept = [SavedTensor(name, size, "") for cut in self.cuts for name, size in cut.saved.items() if size]
        return tuple(sorted(kept, key=lambda tensor: -tensor.bytes))

    @property
    def recomputed(self) -> tuple[str, ...]:
        """What is made again."""
        return tuple(name for cut in self.cuts for name in cut.recomputed)


class CutSearch:
    """Levels, each built once. `build(shed)` makes an executable and tells its peak in bytes and its cuts."""

    def __init__(self, build: Callable[[int], tuple[int, tuple[Cut, ...]]]) -> None:
        self._build = build
        self._known: dict[int, Level] = {}
        self._step = 0

    @property
    def tried(self) -> int:
        """How many were built."""
        return len(self._known)

    @property
    def least_built(self) -> float:
        """The lowest peak of all that were built."""
        return min((level.peak for level in self._known.values()), default=math.inf)

    def within(self, most: int, least: int = 0) -> Level | None:
        """The first level whose peak fits; None if none of some does, or if it needs less than `least`."""
        first = self._level(0)
        if not first.cuts:
            return None
        self._step = max(first.peak // _LEVELS, 1)
        start = max(math.ceil((first.peak - most) / self._step), 0)
        if first.peak - most > sum(cut.sheddable for cut in first.cuts):
            return None
        for number in range(start, start + _TRIES):
            level = self._level(number)
            if level.peak <= most:
                return level if level.peak >= least else None
            if number > start and level.peak == self._level(number - 1).peak:
                return None  # nothing more to shed, or the peak is elsewhere
        return None

    def _level(self, number: int) -> Level:
        if number not in self._known:
            self._known[number] = Level(number * self._step, *self._build(number * self._step))
        return self._known[number]


def cuts_in(gm: fx.GraphModule) -> tuple[Cut, ...]:
    """Of the compiled regions of a graph."""
    modules = [module.compiled for module in gm.children() if isinstance(module, CompiledRegion)]
    return tuple(compiled.cut for compiled in modules if isinstance(compiled, ForwardBackward))
