"""Find a candidate whose peak is within a budget and whose recomputation costs little.

A candidate is one way to run a step with less memory. There are two kinds:

    plan    nodes of the forward that the backward recomputes (`ParetoFront` enumerates the plans worth having)
    shed    compiled steps only: the compiler cuts its regions itself, and saves `shed` fewer bytes than its own cut

Estimates order the plans from the smallest peak to the one that recomputes nothing; building and measuring a candidate
tells its exact peak. `PlanSearch` is a binary search over the ordered plans. `CutSearch` tries increasing values of
`shed`; it comes first, because the compiler's own cut is the fastest executable there is.

Each plan is the cheapest choice of what to save and what to recompute at one price, found as a minimum cut:

    source --price x time--> v.in --bytes--> v.out --oo--> w.in      (w reads v, both in the forward)
                                             v.out --oo--> sink      (the backward reads v)

On the sink's side of the cut: recomputed (if `v.in` is), or available (if only `v.out` is: the value is saved).
At price 0 the fewest bytes are saved, with a higher price less is recomputed; plans of growing prices are nested.

Without anchors the fewest saved bytes would mean to recompute the whole forward at once, and to need all its memory.
Anchors are values where the forward is narrow. They are saved, so that the backward recomputes one segment after the
other, and only one segment is live at a time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic

import numpy as np

from wholestep.errors import MemoryBudgetError
from wholestep.ir.step_graph import shown
from wholestep.remat.measure import E, Measured, peak_of
from wholestep.remat.options import Budget
from wholestep.remat.pointwise_recompute import RegionCut
from wholestep.remat.problem import Plan, RematProblem

_INFINITE = 2**31 - 1
_MOST = 2**29  # all finite capacities together: flows stay far from the limit of the solver's integers


class PricedCut:
    """The minimum cuts of one problem at several prices."""

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem

    def plan(self, price: float, anchors: Collection[int] = ()) -> Plan:
        """What to recompute if a nanosecond costs `price` bytes. `anchors` are not recomputed."""
        # scipy takes a quarter of a second to import, and only steps with a budget need it.
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

        problem, positions = self._problem, self._positions
        if not positions:
            return frozenset()
        finite = np.concatenate([self._bytes, price * self._times])
        total = finite[np.isfinite(finite)].sum()
        scale = min(_MOST / total, 1e6) if total else 1.0
        keep = _scaled(self._bytes, scale)
        again = _scaled(price * self._times, scale)
        fixed = problem.never.union(anchors) - problem.always
        for number, i in enumerate(positions):
            if i in fixed:
                again[number] = _INFINITE
        size = 2 * len(positions) + 2
        rows, columns = self._edges
        capacities = np.concatenate([again, keep, np.full(len(rows) - 2 * len(positions), _INFINITE)])
        graph = csr_matrix((capacities.astype(np.int32), (rows, columns)), shape=(size, size))
        flow = maximum_flow(graph, size - 2, size - 1).flow
        rest = graph - flow
        rest.eliminate_zeros()
        reached = np.zeros(size, dtype=bool)
        reached[breadth_first_order(rest, size - 2, return_predecessors=False)] = True
        return frozenset(i for number, i in enumerate(positions) if not reached[2 * number])

    @cached_property
    def _positions(self) -> list[int]:
        return [i for i, needed in enumerate(self._problem.needed) if needed]

    @cached_property
    def _bytes(self) -> np.ndarray:
        problem = self._problem
        found = []
        for i in self._positions:
            value = float(problem.saved_bytes(i))
            # A view is saved by saving its base, a list by saving its elements.
            free = problem.is_view(i) and not problem.is_element(i)
            found.append(np.inf if free or problem.is_list(i) or i in problem.always else value)
        return np.array(found)

    @cached_property
    def _times(self) -> np.ndarray:
        return np.array([self._problem.time[i] for i in self._positions])

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns: all edges from the source, all v.in to v.out, then those of infinite capacity."""
        problem = self._problem
        number = {i: n for n, i in enumerate(self._positions)}
        source, sink = 2 * len(number), 2 * len(number) + 1
        numbers = np.arange(len(number))
        infinite: list[tuple[int, int]] = []
        read: set[int] = set()
        for i in range(len(problem.nodes)):
            if i in number:
                infinite += [(2 * number[s] + 1, 2 * number[i]) for s in problem.inputs[i] if s in number]
            elif problem.backward[i]:
                read.update(number[s] for s in problem.inputs[i] if s in number)
        infinite += [(2 * n + 1, sink) for n in sorted(read)]
        pairs = np.array(infinite, dtype=np.int64).reshape(-1, 2)
        rows = np.concatenate([np.full(len(number), source), 2 * numbers, pairs[:, 0]])
        columns = np.concatenate([2 * numbers, 2 * numbers + 1, pairs[:, 1]])
        return rows, columns


def _scaled(values: np.ndarray, scale: float) -> np.ndarray:
    limited = np.where(np.isfinite(values), np.ceil(values * scale), _INFINITE)
    return np.minimum(limited, _INFINITE).astype(np.int64)


def segment_counts(problem: RematProblem) -> list[int]:
    """Numbers of segments worth trying: from one to one for about every four operators that are not views."""
    work = sum(1 for i, needed in enumerate(problem.needed) if needed and not problem.is_view(i))
    found, number = [1], 2
    while number <= max(work // 4, 1) and number <= 512:
        found.append(number)
        number = number * 3 // 2 if number > 2 else 3
    return found


class Anchors:
    """The narrow points of the forward of one problem."""

    def __init__(self, problem: RematProblem) -> None:
        self._intervals = _intervals(problem)
        count = sum(problem.needed)
        self._crossing, self._grown = [0] * (count + 1), [0] * (count + 1)
        for first, last, size, _ in self._intervals:
            self._grown[first] += size
            self._crossing[first] += size
            self._crossing[last] -= size
        for n in range(1, count):
            self._crossing[n] += self._crossing[n - 1]
            self._grown[n] += self._grown[n - 1]
        self._count = count

    def of(self, number: int) -> set[int]:
        """Nodes whose values cross the borders between `number` segments of about the same memory."""
        found: set[int] = set()
        ends: list[tuple[int, int]] = []
        waiting = iter(self._intervals)
        upcoming = next(waiting, None)
        for border in self._borders(number):
            while upcoming is not None and upcoming[0] <= border:
                heapq.heappush(ends, (upcoming[1], upcoming[3]))
                upcoming = next(waiting, None)
            while ends and ends[0][0] <= border:
                heapq.heappop(ends)
            found.update(node for _, node in ends)
        return found

    def _borders(self, number: int) -> list[int]:
        """The needed forward nodes after which segments end: the narrowest point near each of the even borders."""
        total = self._grown[self._count - 1] if self._count else 0
        found: list[int] = []
        start = 0
        for k in range(1, number):
            low, middle, high = ((k + shift) / number * total for shift in (-0.5, 0.0, 0.5))
            start = bisect_left(self._grown, low, start, self._count)
            stop = bisect_right(self._grown, high, start, self._count)
            if start < stop:
                found.append(self._narrowest(start, stop, middle))
        return found

    def _narrowest(self, start: int, stop: int, middle: float) -> int:
        return min(range(start, stop), key=lambda n: (self._crossing[n], abs(self._grown[n] - middle)))


def _intervals(problem: RematProblem) -> list[tuple[int, int, int, int]]:
    """(first, last, bytes, node) of each piece of memory of the forward, sorted: the needed forward nodes that make it
    and read it last, counted from the first."""
    position: dict[int, int] = {}
    for i, needed in enumerate(problem.needed):
        if needed:
            position[i] = len(position)
    last: dict[int, int] = {}
    for i, n in position.items():
        for source in problem.reads[i]:
            if source in position:
                for piece in problem.seen[source]:
                    last[piece] = n
    found = []
    for piece, maker in enumerate(problem.maker):
        if maker in position and piece not in problem.live_anyway:
            first = position[maker]
            found.append((first, max(last.get(piece, first), first), problem.pieces.size[piece], maker))
    return sorted(found)


_PRICES = 12
_HALVINGS = 7
_LEVELS = 16


@dataclass(frozen=True)
class Candidate:
    """One way to run a step with less memory."""

    plan: Plan = field(default=frozenset(), repr=False)
    """Positions of the nodes to recompute."""
    peak: int = 0
    """Bytes, estimated; for plans only."""
    cost: float = 0.0
    """Nanoseconds of recomputation, estimated; for plans only."""
    shed: int | None = None
    """Bytes to save fewer than the compiler's cut does; None: the plan says what is recomputed."""


@dataclass(frozen=True)
class Trial(Generic[E]):
    """A candidate that was built and measured."""

    candidate: Candidate
    measured: Measured[E]

    @property
    def peak(self) -> int:
        return self.measured.peak


Build = Callable[[Candidate], Measured[E]]


class ParetoFront:
    """The plans worth having: each recomputes less than all plans with a lower peak.

    Three sources: cuts at growing prices, cuts at price zero with anchors, and mixtures of a plan with its neighbour or
    with the last plan. A mixture follows the one plan up to some node of the forward and the other from there on.
    """

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        self._known: dict[Plan, Candidate] = {}
        self.candidates = self._find()
        """From the smallest peak, which costs most, to the plan that recomputes least."""

    def best(self, fits: Callable[[int], bool]) -> Candidate | None:
        """The cheapest plan whose estimated peak fits."""
        fitting = [i for i, each in enumerate(self.candidates) if fits(each.peak)]
        if not fitting:
            return None
        low = self.candidates[fitting[-1]]
        if fitting[-1] + 1 == len(self.candidates):
            return low
        # A part of a plan is often as good as all of it: what is recomputed late does not lower the peak.
        ends = (self.candidates[fitting[-1] + 1], self.candidates[-1])
        return min((self._between(low, high, fits) for high in ends), key=lambda each: (each.cost, each.peak))

    def at(self, fraction: float) -> Candidate:
        """The cheapest plan whose estimated peak is within this fraction of the way from the smallest to the
        largest."""
        low, high = self.candidates[0].peak, self.candidates[-1].peak
        most = low + fraction * (high - low)
        found = self.best(lambda peak: peak <= most)
        assert found is not None  # the smallest
        return found

    def _between(self, low: Candidate, high: Candidate, fits: Callable[[int], bool]) -> Candidate:
        """A mixture of two plans: the expensive one for the beginning of the forward, for as little as fits."""
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
        problem = self._problem
        cut, anchors = PricedCut(problem), Anchors(problem)
        plans = [frozenset(problem.always)]
        scale = _bytes_per_nanosecond(problem)
        plans += [cut.plan(scale * 4.0 ** (k - _PRICES // 2)) for k in range(_PRICES)]
        plans += [cut.plan(0.0, anchors.of(number)) for number in segment_counts(problem)]
        found: list[Candidate] = []
        for candidate in sorted(map(self._candidate, plans), key=lambda c: (c.cost, c.peak, len(c.plan))):
            if not found or candidate.peak < found[-1].peak:
                found.append(candidate)
        return found[::-1]

    def _candidate(self, plan: Plan) -> Candidate:
        found = self._known.get(plan)
        if found is None:
            problem = self._problem
            found = self._known[plan] = Candidate(plan, peak_of(problem, plan), problem.cost(plan))
        return found


def _bytes_per_nanosecond(problem: RematProblem) -> float:
    """Bytes of all values of the forward over the time to compute them: the price in the middle."""
    total = sum(problem.saved_bytes(i) for i, needed in enumerate(problem.needed) if needed and not problem.is_view(i))
    return (total or 1) / (sum(problem.time.values()) or 1.0)


@dataclass(frozen=True)
class Effort:
    """How many plans are built."""

    levels: int
    """Steps of the binary search: the front is divided into two to the power of it."""
    smallest: int = 1
    """How many plans of the low end are built to find the smallest peak."""
    near: float = 0.95
    """A peak this near to the budget, or within an eighth of the front, is not improved on."""
    is_slow: bool = False
    """Building takes long: for a budget in bytes the smallest peak is not searched for before it is needed."""


class PlanSearch(Generic[E]):
    """One search over the plans of a front. `build` makes an executable of a candidate and measures it.

    `least_later`: the lowest peak, of what was built so far, of the next calls where they need more than this one.
    `advice`: what else to say where no plan fits.
    """

    def __init__(
        self,
        front: ParetoFront,
        build: Build[E],
        effort: Effort,
        least_later: Callable[[], int] = lambda: 0,
        advice: str = "",
    ) -> None:
        self._front = front
        self._build = build
        self._effort = effort
        self._least_later = least_later
        self._advice = advice
        self._steps = 2**effort.levels
        self._tried: dict[Candidate, Trial[E]] = {}

    @property
    def tried(self) -> int:
        """How many plans were built."""
        return len(self._tried)

    @property
    def most_left(self) -> int:
        """How many plans may still be built, at most: the plain one, those of the low end, one for each halving."""
        smallest = self._effort.smallest
        return max(1 + smallest + (smallest > 1) + self._effort.levels - len(self._tried), 0)

    def smallest(self) -> Trial[E]:
        """The lowest peak that was found, after building plans of the low end."""
        for step in range(self._effort.smallest):
            self._try(self._front.at(step / self._steps))
        if self._effort.smallest > 1:
            self._try(self._front.candidates[0])  # `at(0)` has the same estimate and recomputes less
        return min(self._tried.values(), key=lambda each: (each.peak, each.candidate.cost))

    def without(self) -> Trial[E]:
        """The plan that recomputes nothing."""
        return self._try(self._front.candidates[-1])

    @property
    def least_built(self) -> int:
        """The lowest peak of all plans that were built."""
        return min((each.peak for each in self._tried.values()), default=0)

    def fits_without(self, most: int) -> bool:
        """True if the plan that recomputes nothing was built, and fits."""
        found = self._tried.get(self._front.candidates[-1])
        return found is not None and found.peak <= most

    def peak_without(self) -> int:
        """Peak of the plan that recomputes nothing; an estimate, corrected by what was built, if it was not built."""
        last = self._front.candidates[-1]
        found = self._tried.get(last)
        return found.peak if found is not None else round(self._estimate(last.peak))

    def peak_smallest(self) -> int:
        """The lowest known peak."""
        first = self._front.candidates[0]
        estimate = [] if first in self._tried else [round(self._estimate(first.peak))]
        return min([each.peak for each in self._tried.values()] + estimate)

    def limit(self, budget: Budget) -> int:
        """The budget in bytes."""
        if budget.most is not None:
            return budget.most
        assert budget.fraction is not None
        without, smallest = self.without(), self.smallest()
        return round(smallest.peak + budget.fraction * max(without.peak - smallest.peak, 0))

    def fit(self, budget: Budget, least_cut: float | None = None) -> tuple[Trial[E], int]:
        """A plan whose peak fits, with little to recompute, and the budget in bytes.

        `least_cut`: the lowest peak of the compiler's own cuts that were built, none of which fit. Then the plan that
        recomputes nothing does not fit either, and is not built for that.
        """
        most = self.limit(budget)
        if budget.fraction == 0.0:
            return self.smallest(), most
        is_lazy = self._effort.is_slow and budget.fraction is None
        top = None if is_lazy and least_cut is not None else self.without()
        if top is not None and top.peak <= most:
            return top, most
        bottom = None if is_lazy else self.smallest()
        found = self._binary_search(most, bottom, top) or self.smallest()
        if found.peak > most:
            self.refuse(most, found.peak if least_cut is None else int(min(found.peak, least_cut)))
        return found, most

    def _binary_search(self, most: int, below: Trial[E] | None, above: Trial[E] | None) -> Trial[E] | None:
        """The last plan that fits in a binary search over the front; None if none does.

        Why a larger budget never gets a lower peak, nor more recomputation, whatever the plans really need: `below`
        fits, `above` does not, and a plan counts only if peak and cost are between theirs. Two searches take the same
        path up to a plan that fits the larger budget only. All that one finds after it is on its one side, and all that
        the other finds on its other.
        """
        low, high = 0, self._steps
        while high - low > 1 and not (below is not None and self._is_near(below.peak, most)):
            middle = (low + high) // 2
            found = self._try(self._front.at(middle / self._steps))
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
        width = self._front.candidates[-1].peak - self._front.candidates[0].peak
        return most - peak <= min((1 - self._effort.near) * most, width / 8)

    def refuse(self, most: int, least: int) -> None:
        """Raise: no candidate is within the budget, neither of this call nor of those that follow it."""
        least = max(least, self._least_later())
        raise MemoryBudgetError(
            f"this step does not fit into {shown(most)} ({most} bytes): the smallest peak is {shown(least)} "
            f"({least} bytes).",
            fix=f"use memory_budget={least} or more, a smaller batch, or shards (ws.FullyShard).{self._advice}",
        )

    def _estimate(self, peak: float) -> float:
        """The peak of a plan by its estimate: interpolated between the plans that were built."""
        points = sorted({(each.candidate.peak, each.peak) for each in self._tried.values()})
        if not points:
            return peak
        if len(points) == 1:
            return peak * points[0][1] / max(points[0][0], 1)
        low, high = _around(points, peak)
        slope = (high[1] - low[1]) / max(high[0] - low[0], 1)
        return low[1] + max(slope, 0.0) * (peak - low[0])

    def _try(self, candidate: Candidate) -> Trial[E]:
        found = self._tried.get(candidate)
        if found is None:
            found = self._tried[candidate] = Trial(candidate, self._build(candidate))
        return found


def _is_between(below: Trial[E] | None, found: Trial[E], above: Trial[E] | None) -> bool:
    """True if a plan needs no less than the one below and no more than the one above, and costs the other way."""
    rising = [each for each in (below, found, above) if each is not None]
    return all(a.peak <= b.peak and a.candidate.cost >= b.candidate.cost for a, b in itertools.pairwise(rising))


def _around(points: list[tuple[int, int]], peak: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two points between which an estimate is, or the nearest two."""
    for low, high in itertools.pairwise(points):
        if peak <= high[0]:
            return low, high
    return points[-2], points[-1]


class CutSearch(Generic[E]):
    """The compiler's own cut of its regions, with as few bytes shed as the budget allows.

    `shed=0` is what runs without a budget. The largest value sheds all values that can be recomputed by pointwise
    operators (`pointwise_recompute.py`), with up to 16 steps in between. The first step that fits wins, counted from
    the one that would fit if every byte counted at the peak: a larger budget never gets a lower peak, nor more
    recomputation. Each step is built once.
    """

    def __init__(self, build: Build[E]) -> None:
        self._build = build
        self._tried: dict[int, Trial[E]] = {}
        self.most_left = 1 + _LEVELS
        """How many candidates may still be built, at most."""

    @property
    def tried(self) -> int:
        """How many candidates were built."""
        return len(self._tried)

    @property
    def least_built(self) -> float:
        """The lowest peak of all that were built."""
        return min((trial.peak for trial in self._tried.values()), default=math.inf)

    @property
    def has_cuts(self) -> bool:
        """True if a region was cut into a forward and a backward."""
        return any(trial.measured.cuts for trial in self._tried.values())

    def within(self, most: int, least: int = 0) -> Trial[E] | None:
        """The first candidate whose peak fits; None if none does, or if its peak is below `least`."""
        first = self._try(0)
        if not first.measured.cuts:
            self.most_left = 0
            return None
        steps = shed_steps(first.measured.cuts)
        found = first if first.peak <= most else self._first_that_fits(most, first.peak, steps)
        self.most_left = 0
        return found if found is not None and found.peak >= least else None

    def _first_that_fits(self, most: int, peak: int, steps: list[tuple[int, int]]) -> Trial[E] | None:
        number = _first(steps, peak - most, 0)
        trial = None
        while number is not None:
            self.most_left = len(steps) - number
            is_second = trial is not None
            trial = self._try(steps[number][0])
            if trial.peak <= most:
                return trial
            if not is_second and self._try(steps[-1][0]).peak > most:
                return None
            number = _first(steps, steps[number][1] + trial.peak - most, number + 1)
        return None

    def _try(self, shed: int) -> Trial[E]:
        if shed not in self._tried:
            candidate = Candidate(shed=shed)
            self._tried[shed] = Trial(candidate, self._build(candidate))
        return self._tried[shed]


def shed_steps(cuts: tuple[RegionCut, ...]) -> list[tuple[int, int]]:
    """(bytes to ask of each cut, bytes that all cuts shed then), ascending."""
    found: list[tuple[int, int]] = []
    largest = max(sum(cut.sheddable) for cut in cuts)
    for number in range(1, _LEVELS + 1):
        asked = -(-largest * number // _LEVELS)
        shed = sum(_shed_of(cut.sheddable, asked) for cut in cuts)
        if shed > (found[-1][1] if found else 0):
            found.append((asked, shed))
    return found


def _shed_of(sizes: tuple[int, ...], asked: int) -> int:
    """Bytes that a cut sheds: its values are shed one after the other until it is enough."""
    total = 0
    for size in sizes:
        if total >= asked:
            break
        total += size
    return total


def _first(steps: list[tuple[int, int]], needed: int, start: int) -> int | None:
    """The first step from `start` on that sheds as many bytes as needed."""
    return next((i for i in range(start, len(steps)) if steps[i][1] >= needed), None)
