"""Cut a line of pieces into k runs so that the most expensive is as cheap as possible: an exact bottleneck partition.

    work      1 4 2 2 3 1        a run [a, b) costs its work plus the price of the bytes that enter at a
    entering  0 8 2 8 0 8        k = 3:  1 4 | 2 2 | 3 1   costs 5, 4 + 2p, 4

For a limit T the possible ends of a run from `a` form an interval, because work only grows; so the positions that i
runs reach are a union of intervals, found in O(n) for each i. Bisection finds the smallest T for which k runs reach
the end, to the last bit; a second pass over the runs within T minimises the bytes that enter.

`RunMemory` bounds the runs by memory. A run holds the bytes that enter at its start, the outputs of its nodes, and the
parameters, buffers and other inputs of the graph that it uses, each once. A longer run holds more, so each start has a
furthest end, found by one sweep of the start over the line with a Fenwick tree that has every input at its next use, in
(pieces + uses) log(pieces).

Cost: O(n log n) once for each i and O(n k) for each of about 50 limits, in numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NEVER = np.int64(1 << 62)


@dataclass(frozen=True)
class Line:
    """Pieces in a row; position i is right before piece i."""

    work: Floats
    """The cost of all pieces before a position; one more entry than pieces."""
    entering: Ints
    """The bytes that cross each position but the last."""
    price: Floats
    """The cost of those bytes."""
    reach: Ints
    """The furthest end that a run from each position may have, whatever it costs."""

    def costs(self, starts: Ints, end: int) -> Floats:
        """The costs of runs from some positions to one end."""
        found: Floats = (self.work[end] - self.work[starts]) + self.price[starts]
        return found

    def within(self, limit: float) -> Ints:
        """The furthest end of a run from each position that costs at most `limit` (not past the start: there is none).

        The comparison uses the same arithmetic as `costs`; searching for the rearranged formula may be off by rounding.
        """
        work, price = self.work, self.price
        first, last = work[:-1], len(work) - 1
        end = np.searchsorted(work, (limit - price) + first, side="right") - 1
        while True:
            over = (end > 0) & ((work[end] - first) + price > limit)
            if not over.any():
                break
            end[over] = np.searchsorted(work, work[end[over]], side="left") - 1
        while True:
            after = np.minimum(end + 1, last)
            under = (end < last) & ((work[after] - first) + price <= limit)
            if not under.any():
                break
            end[under] = np.searchsorted(work, work[after[under]], side="right") - 1
        return np.minimum(end, self.reach).astype(np.int64)


def best_cuts(line: Line, k: int) -> list[int] | None:
    """The k + 1 positions at which the best runs begin and end; None if no k runs are within `reach`."""
    found = _solve(line, k, np.inf)
    if found is None:
        return None
    # No cut is better than equal shares; minus a margin for rounding.
    lowest = max(float(np.diff(line.work).max()), float(line.work[-1]) / k) * (1 - 1e-9)
    best = _slowest(line, found)
    while True:
        middle = lowest + (best - lowest) / 2
        if not lowest < middle < best:
            break
        found = _solve(line, k, middle)
        if found is None:
            lowest = middle
        else:
            best = _slowest(line, found)
    while (found := _solve(line, k, float(np.nextafter(best, -np.inf)))) is not None:
        best = _slowest(line, found)
    return _fewest_bytes(line, k, line.within(best))


def fits(reach: Ints, k: int) -> bool:
    """True if k runs within `reach` lead from the first position to the last."""
    return _reached(reach, k) is not None


def fewest_runs(reach: Ints) -> int | None:
    """The smallest number of runs within `reach` that lead from the first position to the last; None if none do."""
    runs, edge, furthest = 0, 0, 0
    for start, end in enumerate(reach.tolist()):
        # Every position up to `edge` can be reached by `runs` runs or fewer.
        if start > edge:
            if furthest < start:
                return None
            runs, edge = runs + 1, furthest
        furthest = max(furthest, end)
    if edge >= len(reach):
        return runs
    return runs + 1 if furthest >= len(reach) else None


def _slowest(line: Line, cuts: list[int]) -> float:
    starts = np.array(cuts[:-1])
    return max(float(line.costs(starts[i : i + 1], end)[0]) for i, end in enumerate(cuts[1:]))


def _solve(line: Line, k: int, limit: float) -> list[int] | None:
    """Some k runs that cost at most `limit` each."""
    ends = line.within(limit)
    reached = _reached(ends, k)
    if reached is None:
        return None
    cuts = [len(ends)]
    for starts in reversed(reached):
        fitting = starts[: np.searchsorted(starts, cuts[-1])]
        fitting = fitting[ends[fitting] >= cuts[-1]]
        cuts.append(int(fitting[np.argmin(line.costs(fitting, cuts[-1]))]))
    return cuts[::-1]


def _reached(ends: Ints, k: int) -> list[Ints] | None:
    """For i from 0 to k - 1, the positions that exactly i runs reach; None where k runs do not reach the end."""
    size = len(ends)
    starts = np.zeros(1, dtype=np.int64)
    found: list[Ints] = []
    for _ in range(k):
        starts = starts[(starts < size)]
        starts = starts[ends[starts] > starts]
        if not len(starts):
            return None
        found.append(starts)
        low, high = int(starts[0]) + 1, int(ends[starts].max())
        change = np.zeros(high - low + 2, dtype=np.int64)
        change[starts + 1 - low] += 1
        change -= np.bincount(ends[starts] + 1 - low, minlength=len(change))
        starts = np.flatnonzero(np.cumsum(change)[:-1]) + low
    return found if len(starts) and starts[-1] == size else None


def _fewest_bytes(line: Line, k: int, ends: Ints) -> list[int]:
    """Of all k runs within `ends`, those that the fewest bytes enter."""
    size = len(ends)
    reached = _reached(ends, k)
    assert reached is not None
    total = np.full(size + 1, _NEVER)
    total[0] = 0
    totals: list[Ints] = []
    for starts in reached:
        values = total[starts] + line.entering[starts]
        totals.append(values)
        total = _lowest_over(starts + 1, ends[starts], values, size + 1)
    cuts, goal, even = [size], total[size], line.work[-1] / k
    for starts, values in zip(reversed(reached), reversed(totals), strict=True):
        equal = (starts < cuts[-1]) & (ends[starts] >= cuts[-1]) & (values == goal)
        fitting = starts[equal]
        cuts.append(int(fitting[np.argmin(np.abs(line.costs(fitting, cuts[-1]) - even))]))
        goal = goal - line.entering[cuts[-1]]
    return cuts[::-1]


def _lowest_over(low: Ints, high: Ints, values: Ints, size: int) -> Ints:
    """For each position, the lowest value of the intervals [low, high] around it.

    An interval is two blocks whose length is a power of two; blocks are halved from the longest to single positions.
    """
    power = np.frexp((high - low + 1).astype(np.float64))[1] - 1
    best = np.full(size, _NEVER)
    for exponent in range(int(power.max()), -1, -1):
        length = 1 << exponent
        chosen = power == exponent
        np.minimum.at(best, low[chosen], values[chosen])
        np.minimum.at(best, high[chosen] - length + 1, values[chosen])
        if exponent:
            half, whole = length >> 1, best.copy()
            best[half:] = np.minimum(best[half:], whole[:-half])
    return best


class RunMemory:
    """The bytes that runs of a line hold; `uses`: for each input, its bytes and the pieces that use it, in order."""

    def __init__(self, entering: Sequence[int], made: Sequence[int], uses: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._entering = entering
        self._made = made
        self._first: dict[int, int] = {}
        """Bytes of inputs, by the piece of their first use."""
        self._next: list[list[tuple[int, int]]] = [[] for _ in made]
        """For each piece, the bytes of the inputs that it uses and the piece of their next use (past the end: none)."""
        for size, pieces in uses:
            for use, following in zip(pieces, [*pieces[1:], len(made)], strict=True):
                self._next[use].append((size, following))
            self._first[pieces[0]] = self._first.get(pieces[0], 0) + size

    def reach(self, limit: int) -> Ints:
        """For each start, the furthest end of a run that holds at most `limit` bytes."""
        size = len(self._made)
        tree = _FenwickTree([made + self._first.get(i, 0) for i, made in enumerate(self._made)])
        ends = np.zeros(size, dtype=np.int64)
        before = 0
        for start in range(size):
            ends[start] = tree.furthest(limit - self._entering[start] + before)
            before += self._made[start]
            for amount, following in self._next[start]:
                tree.add(start, -amount)
                if following < size:
                    tree.add(following, amount)
        return ends

    def of(self, start: int, end: int) -> int:
        """The bytes that one run holds."""
        values = self._entering[start] + sum(self._made[start:end])
        # An input counts at its last use within the run.
        return values + sum(n for i in range(start, end) for n, following in self._next[i] if following >= end)

    def most(self) -> int:
        """An upper bound for all runs."""
        return self.of(0, len(self._made)) + max(self._entering)


class _FenwickTree:
    """Prefix sums under changes of single entries."""

    def __init__(self, values: list[int]) -> None:
        self._size = len(values)
        self._sums = [0, *values]
        for i in range(1, self._size + 1):
            if (up := i + (i & -i)) <= self._size:
                self._sums[up] += self._sums[i]

    def add(self, place: int, amount: int) -> None:
        place += 1
        while place <= self._size:
            self._sums[place] += amount
            place += place & -place

    def furthest(self, limit: int) -> int:
        """The length of the longest prefix whose sum is at most `limit`; entries are non-negative."""
        place, step = 0, 1 << self._size.bit_length()
        if limit < 0:
            return 0
        while step:
            if place + step <= self._size and self._sums[place + step] <= limit:
                place += step
                limit -= self._sums[place]
            step >>= 1
        return place
