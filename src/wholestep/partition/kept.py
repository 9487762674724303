"""How far a run of pieces can go before it keeps more bytes than it may.

    a run keeps     what enters at its start
                  + what its nodes make
                  + the parameters, buffers and other inputs of the graph that it uses, each once

Going on only adds to that, so there is a furthest end for each start. The start moves over the line once; every input
stands in a Fenwick tree at its next use. Cost: (pieces + uses) log(pieces).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from wholestep.partition.bottleneck import Ints


class Keeping:
    """What runs of a line keep; `uses` are, for each input, its bytes and the pieces that use it in order."""

    def __init__(self, entering: Sequence[int], made: Sequence[int], uses: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._entering = entering
        self._made = made
        self._first: dict[int, int] = {}
        """Bytes of inputs by their first use."""
        self._next: list[list[tuple[int, int]]] = [[] for _ in made]
        """For each piece, bytes of the inputs that it uses and where they are used next (past the end: never)."""
        for size, pieces in uses:
            for use, following in zip(pieces, [*pieces[1:], len(made)], strict=True):
                self._next[use].append((size, following))
            self._first[pieces[0]] = self._first.get(pieces[0], 0) + size

    def reach(self, limit: int) -> Ints:
        """For each start the furthest end of a run that keeps at most `limit` bytes."""
        size = len(self._made)
        tree = _Tree([made + self._first.get(i, 0) for i, made in enumerate(self._made)])
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
        """What one run keeps."""
        kept = self._entering[start] + sum(self._made[start:end])
        # An input counts at its last use within the run.
        return kept + sum(n for i in range(start, end) for n, following in self._next[i] if following >= end)

    def most(self) -> int:
        """No run keeps more."""
        return self.of(0, len(self._made)) + max(self._entering)


class _Tree:
    """Sums of a prefix, under changes of single entries (Fenwick)."""

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
        """How many entries from the first on have a sum of at most `limit`; entries are not negative."""
        place, step = 0, 1 << self._size.bit_length()
        if limit < 0:
            return 0
        while step:
            if place + step <= self._size and self._sums[place + step] <= limit:
                place += step
                limit -= self._sums[place]
            step >>= 1
        return place
