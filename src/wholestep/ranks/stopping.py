"""All ranks stop before the same call of a step, between two collectives: for what is wrong while communication works.

A rank that stopped at once would leave the others alone in a collective. So each rank holds before its next call as
soon as it hears of the failure, and its watchdog writes how far it has come; the first call that no rank has begun is
the one before which all raise. A rank that holds before an earlier call is let go until then.

    stop/<step>/at/r       the last call that rank r has begun
    stop/<step>/count      how many ranks have written theirs
    stop/<step>/verdict    the call before which all stop
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wholestep.ranks.board import Board
from wholestep.ranks.failure import Failure


class Stopping:
    """The part of one rank, kept by its watchdog."""

    def __init__(self, rank: int, size: int, reached: Callable[[str], int]) -> None:
        """`reached`: the last call of a step that this rank has begun."""
        self._rank = rank
        self._size = size
        self._reached = reached
        self._told: set[str] = set()
        self._verdicts: dict[str, int] = {}

    def poll(self, board: Board, failures: list[Failure]) -> list[Failure]:
        """Say where this rank is, and look for the verdict: the failures, with those decided that are."""
        return [self._decided(board, each) if each.is_undecided else each for each in failures]

    def _decided(self, board: Board, failure: Failure) -> Failure:
        step = failure.step
        if step not in self._told:
            # The failure is known to the other thread by now, which begins no further call.
            self._told.add(step)
            board.write(f"stop/{step}/at/{self._rank}", self._reached(step))
            board.count(f"stop/{step}/count", 1)
        if step not in self._verdicts:
            if board.count(f"stop/{step}/count") < self._size:
                return failure
            begun = board.read_all([f"stop/{step}/at/{rank}" for rank in range(self._size)])
            self._verdicts[step] = int(board.write_first(f"stop/{step}/verdict", max(begun) + 1))
        return replace(failure, stops_at=self._verdicts[step])
