"""The cheapest choice of what to save and what to recompute, as a minimum cut.

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
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from functools import cached_property

import numpy as np

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
