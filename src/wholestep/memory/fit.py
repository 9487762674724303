"""Find the cheapest plan whose peak is within a budget, by building candidates and looking at what they really need.

Estimates order the plans; what a built one needs is known exactly. The difference corrects the next estimate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from wholestep.errors import MemoryBudgetError
from wholestep.ir.memory_report import shown
from wholestep.memory.budget import Budget
from wholestep.memory.plans import Candidate, Plans

T = TypeVar("T")
_NEAR = 0.95
"""A peak this near to the budget is not improved on."""


@dataclass(frozen=True)
class Fitted(Generic[T]):
    """A plan that was built."""

    candidate: Candidate
    built: T
    peak: int


class Fitting(Generic[T]):
    """One search. `build` makes an executable of a candidate and tells its peak."""

    def __init__(self, plans: Plans, build: Callable[[Candidate], tuple[T, int]], most_builds: int) -> None:
        self._plans = plans
        self._build = build
        self._most_builds = most_builds
        self._tried: dict[Candidate, Fitted[T]] = {}

    @property
    def tried(self) -> int:
        """How many plans were built."""
        return len(self._tried)

    def smallest(self) -> Fitted[T]:
        """The lowest peak that was found, after building the plan with the lowest estimate."""
        self._try(self._plans.front[0])
        return min(self._tried.values(), key=lambda each: (each.peak, each.candidate.cost))

    def without(self) -> Fitted[T]:
        """The plan that computes nothing again."""
        return self._try(self._plans.front[-1])

    def peak_without(self) -> int:
        """Of the plan that computes nothing again; corrected by what was built where that one was not."""
        last = self._plans.front[-1]
        found = self._tried.get(last)
        return found.peak if found is not None else round(self._estimate(last.peak))

    def peak_smallest(self) -> int:
        """The lowest peak known."""
        first = self._plans.front[0]
        estimate = [] if first in self._tried else [round(self._estimate(first.peak))]
        return min([each.peak for each in self._tried.values()] + estimate)

    def fit(self, budget: Budget) -> tuple[Fitted[T], int]:
        """The cheapest plan found whose peak fits, and the budget in bytes."""
        most = self._bytes(budget)
        if budget.fraction == 0.0:
            return self.smallest(), most
        for _ in range(self._most_builds):
            candidate = self._plans.best(lambda peak: self._estimate(peak) <= most)
            if candidate is None or candidate in self._tried:
                break
            found = self._try(candidate)
            if _NEAR * most <= found.peak <= most or (candidate is self._plans.front[-1] and found.peak <= most):
                break
        fitting = [each for each in self._tried.values() if each.peak <= most]
        if not fitting and self.smallest().peak <= most:
            fitting = [self.smallest()]
        if not fitting:
            self._refuse(most)
        return min(fitting, key=lambda each: (each.candidate.cost, each.peak)), most

    def _refuse(self, most: int) -> None:
        least = self.smallest().peak
        raise MemoryBudgetError(
            f"this step does not fit into {shown(most)} ({most} bytes): the smallest peak is {shown(least)} "
            f"({least} bytes).",
            fix=f"use memory_budget={least} or more, a smaller batch, or shards (ws.FullyShard).",
        )

    def _bytes(self, budget: Budget) -> int:
        if budget.most is not None:
            return budget.most
        assert budget.fraction is not None
        low, high = self.smallest().peak, self.without().peak
        return round(low + budget.fraction * max(high - low, 0))

    def _estimate(self, peak: float) -> float:
        """What a plan needs, by its estimate: along the line through the plans that were built."""
        points = sorted({(each.candidate.peak, each.peak) for each in self._tried.values()})
        if not points:
            return peak
        if len(points) == 1:
            return peak * points[0][1] / max(points[0][0], 1)
        low, high = _around(points, peak)
        slope = (high[1] - low[1]) / max(high[0] - low[0], 1)
        return low[1] + max(slope, 0.0) * (peak - low[0])

    def _try(self, candidate: Candidate) -> Fitted[T]:
        found = self._tried.get(candidate)
        if found is None:
            built, peak = self._build(candidate)
            found = self._tried[candidate] = Fitted(candidate, built, peak)
        return found


def _around(points: list[tuple[int, int]], peak: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two points between which an estimate is, or the nearest two."""
    for low, high in itertools.pairwise(points):
        if peak <= high[0]:
            return low, high
    return points[-2], points[-1]
