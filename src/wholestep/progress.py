"""Progress of a capture and compilation on stderr: after one second, the current stage and how far it is.

    wholestep: compiling train_step, call 2: region 1 of 1, 1,241 operators, 12 s  [#####---------------]

On a terminal that line is written over itself four times a second, with a bar. Elsewhere (a file, a pipe, a notebook)
there is one line when the first second is over and one at the end. What takes less says nothing. On several ranks
rank 0 speaks; another one does only if rank 0 does not compile, and waits for it.

A thread writes, because the thread that compiles is busy; it ends with the compilation. The stages say where they are
by `stage` and `region`, which cost an assignment. How long a region takes is estimated from its number of operators,
by the regions that were compiled before.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

FIRST = 1.0
"""Seconds after which something is said."""
_EVERY = 0.25
_BAR = 20
_CLEAR = "\r\x1b[K"
_SHARES = {"capture": (0.0, 0.15), "passes": (0.15, 0.05), "compilation": (0.2, 0.8)}
"""Where each stage begins on the bar, and how much of it is its own."""
_CAPTURE_SECONDS = 3.0


def _nothing() -> str:
    return ""


class Progress:
    """The reports of one compiled step. `speaks`: whether this process is the one that reports."""

    def __init__(
        self,
        name: str = "",
        wanted: bool = True,
        speaks: Callable[[], bool] = lambda: True,
        *,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
        ticks: bool = True,
    ) -> None:
        self.name = name
        self.wanted = wanted
        self._speaks = speaks
        self._clock = clock
        self._given = stream
        self._ticks = ticks
        self._stream: TextIO | None = None
        self._begun: float | None = None
        self._call = 0
        self._stage = "capture"
        self._prefix = ""
        self._detail: Callable[[], str] = _nothing
        self._done: Callable[[], float] = lambda: 0.0
        self._said = False
        self._lock = threading.Lock()
        self._seconds_per_operator = 0.03
        """Of the regions that were compiled, as a moving average."""

    @contextmanager
    def compiling(self, call: int = 0) -> Iterator[None]:
        """The context of one capture or compilation. A second one inside of it is a part of it."""
        if not self.wanted or self._begun is not None:
            yield
            return
        self._begin(call)
        over = threading.Event()
        ticker = threading.Thread(target=self._tick_until, args=(over,), name="wholestep progress", daemon=True)
        if self._ticks:
            ticker.start()
        ended = False
        try:
            yield
            ended = True
        finally:
            over.set()
            if self._ticks:
                ticker.join()
            self._end(ended)

    def stage(
        self,
        stage: str,
        detail: Callable[[], str] = _nothing,
        done: Callable[[], float] | None = None,
        *,
        prefix: str = "",
    ) -> None:
        """A stage begins: `capture`, `passes` or `compilation`. `detail` is asked when something is said; `done` is
        the part of the stage that is over, from 0 to 1. `prefix`: what is said before the regions of a compilation."""
        self._stage, self._detail, self._prefix = stage, detail, prefix
        began = self._clock()
        self._done = done or (lambda: _approach(self._clock() - began, _CAPTURE_SECONDS))

    @contextmanager
    def region(self, number: int, count: int, operators: int, before: int, total: int) -> Iterator[None]:
        """A region is compiled: the `number`-th of `count`. `before`: operators of the regions that are done, of
        `total`."""
        if self._begun is None:
            yield
            return
        began = self._clock()

        def done() -> float:
            expected = operators * self._seconds_per_operator
            return (before + operators * _approach(self._clock() - began, expected)) / max(total, 1)

        prefix = f"{self._prefix}, " if self._prefix else ""
        text = f"{prefix}region {number} of {count}, {operators:,} operators"
        self.stage("compilation", lambda: text, done, prefix=self._prefix)
        yield
        seconds = self._clock() - began
        if seconds > FIRST / 4:  # not from a cache
            known = self._seconds_per_operator
            self._seconds_per_operator = known + 0.5 * (seconds / max(operators, 1) - known)

    def tick(self) -> None:
        """Say where the compilation is, if it is time to."""
        with self._lock:
            seconds = self._seconds()
            if seconds < FIRST or self._stream is None or (self._said and not self._is_terminal()):
                return
            if not self._speaks():
                return
            self._said = True
            line = f"wholestep: compiling {self._subject()}: {self._detail() or self._stage}"
            end = f", {seconds:,.0f} s"
            self._write(_CLEAR + self._with_bar(line, end) if self._is_terminal() else f"{line}{end}\n")

    def _begin(self, call: int) -> None:
        self._stream = self._given or sys.stderr
        self._call, self._begun, self._said = call, self._clock(), False
        self.stage("capture")

    def _end(self, ended: bool) -> None:
        with self._lock:
            if self._said:
                word = "compiled" if ended else "did not compile"
                line = f"wholestep: {word} {self._subject()}, {self._seconds():,.0f} s\n"
                self._write((_CLEAR if self._is_terminal() else "") + line)
            self._begun, self._stream, self._detail = None, None, _nothing

    def _seconds(self) -> float:
        return 0.0 if self._begun is None else self._clock() - self._begun

    def _subject(self) -> str:
        return f"{self.name}, call {self._call}" if self._call else self.name

    def _tick_until(self, over: threading.Event) -> None:
        pause = FIRST
        while not over.wait(pause):
            pause = _EVERY
            self.tick()
            if self._said and not self._is_terminal():
                return

    def _is_terminal(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False  # it was closed

    def _with_bar(self, line: str, end: str) -> str:
        """The line in the width of the terminal: `end` and the bar are whole."""
        assert self._stream is not None
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            width = 80
        start, share = _SHARES.get(self._stage, (0.0, 1.0))
        bar = _BAR if width >= 100 else _BAR // 2
        full = round(bar * (start + share * min(max(self._done(), 0.0), 1.0)))
        end += f"  [{'#' * full}{'-' * (bar - full)}]"
        room = max(width - 1 - len(end), 0)
        return ((line if len(line) <= room else f"{line[: max(room - 2, 0)]}..") + end)[: width - 1]

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self.wanted = False  # no reader: the terminal was closed


def _approach(seconds: float, expected: float) -> float:
    """From 0 to 1: about two thirds when the expected time is over, and never quite 1."""
    return 1.0 - math.exp(-seconds / max(expected, 1e-3))


SILENT = Progress(wanted=False)
"""Says nothing."""
