"""Where a forward is narrow: values there are kept, so that the backward computes again one stretch after the other.

Without anchors the fewest kept bytes would mean to compute the whole forward again at once, and to need all its memory.
Between two anchors only one stretch is alive at a time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right

from wholestep.remat.outline import Outline


def stretches(outline: Outline) -> list[int]:
    """Numbers of stretches worth trying: from a single one to one for about every four operators that compute."""
    work = sum(1 for i, needed in enumerate(outline.needed) if needed and not outline.is_view(i))
    found, number = [1], 2
    while number <= max(work // 4, 1) and number <= 512:
        found.append(number)
        number = number * 3 // 2 if number > 2 else 3
    return found


class Anchors:
    """The narrow places of one outline."""

    def __init__(self, outline: Outline) -> None:
        self._intervals = _intervals(outline)
        count = sum(outline.needed)
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
        """Nodes whose values cross the borders between `number` stretches of about the same memory."""
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
        """After which needed forward nodes: the narrowest place near each of the even borders."""
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


def _intervals(outline: Outline) -> list[tuple[int, int, int, int]]:
    """(first, last, bytes, node) of what the forward makes: numbers of the needed forward nodes that make and last read
    it, by the first."""
    position: dict[int, int] = {}
    for i, needed in enumerate(outline.needed):
        if needed:
            position[i] = len(position)
    last: dict[int, int] = {}
    for i, n in position.items():
        for source in outline.reads[i]:
            if source in position:
                for piece in outline.seen[source]:
                    last[piece] = n
    found = []
    for piece, maker in enumerate(outline.maker):
        if maker in position and piece not in outline.kept_anyway:
            first = position[maker]
            found.append((first, max(last.get(piece, first), first), outline.pieces.size[piece], maker))
    return sorted(found)
