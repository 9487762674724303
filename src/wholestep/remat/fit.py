"""Find a cheap plan whose peak is within a budget, by building candidates and looking at what they really need.

Estimates order the plans on a ladder from the smallest peak to the one with nothing computed again; what a built one
needs is known exactly. A search by halves climbs as far as the budget reaches. Where building takes long, the two ends
of the ladder are built only if they are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from wholestep.errors import MemoryBudgetError
from wholestep.ir.memory_report import shown
from wholestep.remat.budget import Budget
from wholestep.remat.plans import Candidate, Plans


@dataclass(frozen=True)
class Fitted:
    """A plan that was built."""

    candidate: Candidate
    peak: int


@dataclass(frozen=True)
class Effort:
    """How much is tried."""

    levels: int
    """The search by halves takes so many plans: the ladder has two to the power of it steps."""
    smallest: int = 1
    """So many of the lowest rungs are built to find the smallest peak."""
    near: float = 0.95
    """A peak this near to the budget, or within an eighth of the ladder, is not improved on."""
    is_slow: bool = False
    """Building takes long: for a budget in bytes the smallest peak is not looked for before it is needed."""


class Fitting:
    """One search. `build` makes an executable of a candidate and tells its peak in bytes.

    `least_later`: the least, with the plans built so far, that the next calls need where they need more than this one.
    `advice`: more to say where no plan fits.
    """

    def __init__(
        self,
        plans: Plans,
        build: Callable[[Candidate], int],
        effort: Effort,
        least_later: Callable[[], int] = lambda: 0,
        advice: str = "",
    ) -> None:
        self._plans = plans
        self._build = build
        self._effort = effort
        self._least_later = least_later
        self._advice = advice
        self._steps = 2**effort.levels
        self._tried: dict[Candidate, Fitted] = {}

    @property
    def tried(self) -> int:
        """How many plans were built."""
        return len(self._tried)

    def smallest(self) -> Fitted:
        """The lowest peak that was found, after building the lowest rungs."""
        for rung in range(self._effort.smallest):
            self._try(self._plans.rung(rung / self._steps))
        if self._effort.smallest > 1:
            self._try(self._plans.front[0])  # the first rung has the same estimate and computes less again
        return min(self._tried.values(), key=lambda each: (each.peak, each.candidate.cost))

    def without(self) -> Fitted:
        """The plan that computes nothing again."""
        return self._try(self._plans.front[-1])

    @property
    def least_built(self) -> int:
        """The lowest peak of all plans that were built."""
        return min((each.peak for each in self._tried.values()), default=0)

    def has_room_for_all(self, most: int) -> bool:
        """Whether the plan that computes nothing again was built, and fits."""
        found = self._tried.get(self._plans.front[-1])
        return found is not None and found.peak <= most

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

    def limit(self, budget: Budget) -> int:
        """The budget in bytes."""
        if budget.most is not None:
            return budget.most
        assert budget.fraction is not None
        without, smallest = self.without(), self.smallest()
        return round(smallest.peak + budget.fraction * max(without.peak - smallest.peak, 0))

    def fit(self, budget: Budget, least_cut: float | None = None) -> tuple[Fitted, int]:
        """A plan whose peak fits, with little to compute again, and the budget in bytes.

        `least_cut`: the lowest peak of something better than plans that was built, and did not fit. Then the plan that
        computes nothing again will not fit either, and is not built for that.
        """
        most = self.limit(budget)
        if budget.fraction == 0.0:
            return self.smallest(), most
        is_lazy = self._effort.is_slow and budget.fraction is None
        top = None if is_lazy and least_cut is not None else self.without()
        if top is not None and top.peak <= most:
            return top, most
        bottom = None if is_lazy else self.smallest()
        found = self._on_the_ladder(most, bottom, top) or self.smallest()
        if found.peak > most:
            self.refuse(most, found.peak if least_cut is None else int(min(found.peak, least_cut)))
        return found, most

    def _on_the_ladder(self, most: int, below: Fitted | None, above: Fitted | None) -> Fitted | None:
        """The last plan that fits on a binary search over rungs; None if none does.

        Why a larger budget never gets a lower peak, nor more to compute again, whatever the plans really need: `below`
        fits, `above` does not, and a plan counts only if peak and cost are between theirs. Two searches take the same
        way up to a plan that fits into the larger budget only. All that the one finds after it is on its one side, and
        all that the other finds on its other.
        """
        low, high = 0, self._steps
        while high - low > 1 and not (below is not None and self._is_near(below.peak, most)):
            middle = (low + high) // 2
            found = self._try(self._plans.rung(middle / self._steps))
            if below is not None and found.peak < below.peak:
                low = middle
            elif not _is_between(below, found, above):
                high = middle
            elif found.peak > most:
                above, high = found, middle
            else:
                below, low = found, middle
        return below

    def _is_near(self, peak: int, most: int) -> bool:
        ladder = self._plans.front[-1].peak - self._plans.front[0].peak
        return most - peak <= min((1 - self._effort.near) * most, ladder / 8)

    def refuse(self, most: int, least: int) -> None:
        """No plan is within the budget: neither of this call, nor of those that follow it."""
        least = max(least, self._least_later())
        raise MemoryBudgetError(
            f"this step does not fit into {shown(most)} ({most} bytes): the smallest peak is {shown(least)} "
            f"({least} bytes).",
            fix=f"use memory_budget={least} or more, a smaller batch, or shards (ws.FullyShard).{self._advice}",
        )

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

    def _try(self, candidate: Candidate) -> Fitted:
        found = self._tried.get(candidate)
        if found is None:
            found = self._tried[candidate] = Fitted(candidate, self._build(candidate))
        return found


def _is_between(below: Fitted | None, found: Fitted, above: Fitted | None) -> bool:
    """Whether a plan needs no less than the one below, and no more than the one above; and costs the other way."""
    rising = [each for each in (below, found, above) if each is not None]
    return all(a.peak <= b.peak and a.candidate.cost >= b.candidate.cost for a, b in itertools.pairwise(rising))


def _around(points: list[tuple[int, int]], peak: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two points between which an estimate is, or the nearest two."""
    for low, high in itertools.pairwise(points):
        if peak <= high[0]:
            return low, high
    return points[-2], points[-1]
