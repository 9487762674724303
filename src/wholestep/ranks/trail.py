"""What a rank has run, as one number that all ranks can compare: graphs are agreed on once, and chosen at every call.

Each call of a graph that communicates goes into a running hash. Ranks show count and hash with their beats; two that
have run the same have the same hash at the same count, however far apart they are.
"""

from __future__ import annotations

from collections import deque

_FACTOR = 1_000_003
_MASK = (1 << 61) - 1
_KEPT = 4096


class Trail:
    """The calls of one rank. Written by the thread that runs steps, read by the watchdog."""

    def __init__(self) -> None:
        self.last: tuple[int, int] = (0, 0)
        """How many calls there were, and the hash of all of them."""
        self._recent: deque[int] = deque(maxlen=_KEPT)

    def add(self, number: int) -> None:
        """One more call; the number stands for what its graph communicates."""
        count, value = self.last
        value = (value * _FACTOR ^ number) & _MASK
        self._recent.append(value)
        self.last = (count + 1, value)

    def at(self, count: int) -> int | None:
        """The hash after that many calls; None if that is to come, or too long ago."""
        now, _ = self.last
        recent = list(self._recent)
        behind = now - count
        return recent[-1 - behind] if 0 <= behind < len(recent) else None
