"""The plans worth having: from nothing computed again to the smallest peak, each cheaper than all with a lower one.

Three sources: cuts at growing prices; cuts at no price with anchors; and mixtures of a plan with its neighbour, or with
none, which follow the one up to some node of the forward and the other from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from wholestep.remat.anchors import Anchors, stretches
from wholestep.remat.minimum_cut import PricedCut
from wholestep.remat.outline import Outline, Plan
from wholestep.remat.play import peak_of

_PRICES = 12
_HALVINGS = 7


@dataclass(frozen=True)
class Candidate:
    """A plan with what it takes."""

    plan: Plan = field(repr=False)
    peak: int
    """Estimated."""
    cost: float
    """Nanoseconds, estimated."""


class Plans:
    """The candidates of one outline."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._known: dict[Plan, Candidate] = {}
        self.front = self._find()
        """From the smallest peak, which costs most, to the plan that computes least again."""

    def best(self, fits: Callable[[int], bool]) -> Candidate | None:
        """The cheapest plan whose estimated peak fits."""
        fitting = [i for i, each in enumerate(self.front) if fits(each.peak)]
        if not fitting:
            return None
        low = self.front[fitting[-1]]
        if fitting[-1] + 1 == len(self.front):
            return low
        # A part of a plan is often as good as all of it: what is computed again late does not lower the peak.
        mixed = (self._between(low, high, fits) for high in (self.front[fitting[-1] + 1], self.front[-1]))
        return min(mixed, key=lambda each: (each.cost, each.peak))

    def rung(self, fraction: float) -> Candidate:
        """The cheapest plan whose estimated peak is at most so far on the way from the smallest to the largest."""
        low, high = self.front[0].peak, self.front[-1].peak
        most = low + fraction * (high - low)
        found = self.best(lambda peak: peak <= most)
        assert found is not None  # the smallest
        return found

    def _between(self, low: Candidate, high: Candidate, fits: Callable[[int], bool]) -> Candidate:
        """A mixture of two plans: what costs more in the beginning of the forward, as little of that as fits."""
        differing = sorted(low.plan ^ high.plan)
        found = low
        start, stop = 0, len(differing)  # all of `low` fits, none of it does not
        for _ in range(_HALVINGS):
            middle = (start + stop) // 2
            if middle in (start, stop):
                break
            border = differing[middle]
            mixed = frozenset([i for i in low.plan if i < border] + [i for i in high.plan if i >= border])
            candidate = self._candidate(mixed)
            if fits(candidate.peak):
                stop = middle
                if candidate.cost < found.cost:
                    found = candidate
            else:
                start = middle
        return found

    def _find(self) -> list[Candidate]:
        outline = self._outline
        cut, anchors = PricedCut(outline), Anchors(outline)
        plans = [frozenset(outline.always)]
        scale = _bytes_per_nanosecond(outline)
        plans += [cut.plan(scale * 4.0 ** (k - _PRICES // 2)) for k in range(_PRICES)]
        plans += [cut.plan(0.0, anchors.of(number)) for number in stretches(outline)]
        found: list[Candidate] = []
        for candidate in sorted(map(self._candidate, plans), key=lambda c: (c.cost, c.peak, len(c.plan))):
            if not found or candidate.peak < found[-1].peak:
                found.append(candidate)
        return found[::-1]

    def _candidate(self, plan: Plan) -> Candidate:
        found = self._known.get(plan)
        if found is None:
            outline = self._outline
            found = self._known[plan] = Candidate(plan, peak_of(outline, plan), outline.cost(plan))
        return found


def _bytes_per_nanosecond(outline: Outline) -> float:
    """What all values of the forward take over what they cost: the price in the middle."""
    kept = sum(outline.keeping(i) for i, needed in enumerate(outline.needed) if needed and not outline.is_view(i))
    return (kept or 1) / (sum(outline.time.values()) or 1.0)
