"""A budget that torch's own cut nearly meets: the step as it is compiled without a budget, with a little less kept.

Level 0 is what runs without a budget, the fastest there is. The last level keeps all that can be made again less
(`shed.py`), those between a part of it. The first level that fits wins, counted from the one that would fit if every
byte counted at the peak: so a larger budget never gets a lower peak, nor more to make again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from wholestep.ir.memory_report import SavedTensor
from wholestep.lower.compiled import CompiledRegion
from wholestep.lower.remat import Cut, ForwardBackward

_LEVELS = 16


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

    @property
    def tried(self) -> int:
        """How many were built."""
        return len(self._known)

    @property
    def least_built(self) -> float:
        """The lowest peak of all that were built."""
        return min((level.peak for level in self._known.values()), default=math.inf)

    @property
    def can_shed(self) -> bool:
        """Whether there was a cut."""
        return any(level.cuts for level in self._known.values())

    def within(self, most: int, least: int = 0) -> Level | None:
        """The first level whose peak fits; None if none does, or if it needs less than `least`."""
        first = self._level(0)
        if not first.cuts:
            return None
        found = first if first.peak <= most else self._first_that_fits(most, first.peak, _steps(first.cuts))
        return found if found is not None and found.peak >= least else None

    def _first_that_fits(self, most: int, peak: int, steps: list[tuple[int, int]]) -> Level | None:
        number = _first(steps, peak - most, 0)
        level = None
        while number is not None:
            is_second = level is not None
            level = self._level(steps[number][0])
            if level.peak <= most:
                return level
            if not is_second and self._level(steps[-1][0]).peak > most:
                return None
            number = _first(steps, steps[number][1] + level.peak - most, number + 1)
        return None

    def _level(self, shed: int) -> Level:
        if shed not in self._known:
            self._known[shed] = Level(shed, *self._build(shed))
        return self._known[shed]


def _steps(cuts: tuple[Cut, ...]) -> list[tuple[int, int]]:
    """(bytes to ask of each cut, bytes that all of them shed then), ascending."""
    found: list[tuple[int, int]] = []
    largest = max(sum(cut.sheddable) for cut in cuts)
    for number in range(1, _LEVELS + 1):
        asked = -(-largest * number // _LEVELS)
        shed = sum(_shed_of(cut.sheddable, asked) for cut in cuts)
        if shed > (found[-1][1] if found else 0):
            found.append((asked, shed))
    return found


def _shed_of(sizes: tuple[int, ...], asked: int) -> int:
    """Values are shed one after the other until it is enough."""
    total = 0
    for size in sizes:
        if total >= asked:
            break
        total += size
    return total


def _first(steps: list[tuple[int, int]], needed: int, start: int) -> int | None:
    """The first step from `start` on that sheds so many bytes."""
    return next((i for i in range(start, len(steps)) if steps[i][1] >= needed), None)


def cuts_in(gm: fx.GraphModule) -> tuple[Cut, ...]:
    """Of the compiled regions of a graph."""
    modules = [module.compiled for module in gm.children() if isinstance(module, CompiledRegion)]
    return tuple(compiled.cut for compiled in modules if isinstance(compiled, ForwardBackward))
