"""A step of a pipeline under the eyes of the failure channel: a rank that raises or dies is named by the others.

The channel (runtime/channel.py) knows steps and calls. A step begins when the schedule clears its stages and ends when
it has reduced their gradients, which is all that torch's schedules tell a stage. An error inside a stage is posted at
once. An error in a wait of the schedule itself is only seen by `ws.pipelining.schedule`, which says which rank it was.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from wholestep.runtime.channel import Channel


class StepWatch:
    """The steps of one pipeline on one rank, as the channel sees them."""

    def __init__(self, name: str) -> None:
        self._name = name
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
            phase = channel.running(self._name, self._call)
            phase.__enter__()
            self._phase = phase

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
