"""A step of a pipeline under the eyes of the failure channel: a rank that raises or dies is named by the others.

The channel (ranks/channel.py) knows steps and calls. A step begins when the schedule clears its stages and ends when
it has reduced their gradients, which is all that torch's schedules tell a stage. An error inside a stage is posted at
once. An error in a wait of the schedule itself is only seen by `ws.pipelining.schedule`, which says which rank it was.

Before the first step of a schedule of `ws.pipelining.schedule` the ranks compare what they are about to run. A rank
that does not come, or comes with another schedule, is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from wholestep.ranks.agreement import Agreement
from wholestep.ranks.channel import Channel
from wholestep.ranks.digest import LinesDigest


class StepWatch:
    """The steps of one pipeline on one rank, as the channel sees them."""

    def __init__(self, name: str, ranks: Sequence[int] = ()) -> None:
        self._name = name
        self._ranks = tuple(ranks)
        """The ranks of the pipeline, by their numbers in the world."""
        self._call = 0
        self._phase: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        """The next step; raises if another rank has already failed."""
        self._phase = None
        self._call += 1
        channel = Channel.current()
        if channel is not None:
            failed = channel.peer_failure()
            if failed is not None:
                raise failed
            phase = channel.running(self._name, self._call, ranks=self._ranks)
            phase.__enter__()
            self._phase = phase

    @contextmanager
    def meeting(self, lines: Sequence[str], deadline: float) -> Iterator[None]:
        """Before the first step of a schedule: an error of the body ends the other ranks, too; then all compare lines.

        Nothing was sent yet, so that the process groups stay as they are.
        """
        channel = Channel.current()
        if channel is None or len(self._ranks) < 2:
            yield
            return
        place = f"{self._name}, agreeing on its schedule"
        channel.meetings[place] += 1
        number = channel.meetings[place]
        try:
            yield
        except Exception as error:
            channel.fail(error, place, number, running=False)
            raise
        Agreement(channel, place, deadline, self._ranks).agree(number, LinesDigest(list(lines), "schedule"))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Before any later step: the other ranks may already be in it, and are told of an error of the body."""
        try:
            yield
        except Exception as error:
            self.begin()
            self.failed(error)
            raise

    def __enter__(self) -> None:
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self.failed(error)

    def end(self) -> None:
        """The step is over; raises if its communication was cut off without an error of its own."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def failed(self, error: BaseException) -> None:
        """Post an error of this rank, or raise the one that says which rank is the cause. Once per step."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(type(error), error, error.__traceback__)
