"""Ctrl-C while a step is traced is delayed until it can be raised: between operators.

Python runs signal handlers between any two bytecodes, also in Python that C++ calls. A KeyboardInterrupt that is raised
in some of those callbacks ends the process (`error_already_set`), and one while the user's objects are restored leaves
fakes in them. So the first SIGINT is recorded and passed to the previous handler at the next safe point: before an
operator is recorded, before a module is called, or after everything is restored. A second one is passed on at once, in
case the step never reaches an operator; but not while objects are replaced or restored.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Handles SIGINT during one trace on the main thread. Other threads get none, and change nothing."""

    def __init__(self) -> None:
        self._before: Any = None
        self._frame: FrameType | None = None
        self._waiting = False
        self._shielded = True

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._arrived)
        return self

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._waiting and not self._shielded:
            self._hand_on(frame)
            return
        self._waiting = True

    def check(self) -> None:
        """A safe point: pass on a SIGINT that arrived."""
        if self._waiting and not self._shielded:
            self._hand_on(None)

    def allow(self) -> None:
        """User code runs from now on."""
        self._shielded = False

    def shield(self) -> None:
        """Objects are restored from now on: nothing is passed on before the end."""
        self._shielded = True

    def _hand_on(self, frame: FrameType | None) -> None:
        self._waiting = False
        self._before(signal.SIGINT, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        if signal.getsignal(signal.SIGINT) == self._arrived:  # unless the step set a handler of its own
            signal.signal(signal.SIGINT, self._before)
        if self._waiting:
            self._hand_on(None)
