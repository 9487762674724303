"""One line on the terminal that says how far a search is; nothing where nobody looks."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

_EVERY = 0.1
_WIDTH = 24


class Progress:
    """A bar that fills as the graph becomes smaller. The line is gone at the end."""

    def __init__(self, wanted: bool | None, nodes: int) -> None:
        self._shown = sys.stderr.isatty() if wanted is None else wanted
        self._all = max(nodes, 1)
        self._last = 0.0
        self._started = time.monotonic()

    def show(self, stage: str, nodes: int, trials: int) -> None:
        """Say where the search is, at most ten times a second."""
        now = time.monotonic()
        if not self._shown or now - self._last < _EVERY:
            return
        self._last = now
        full = round(_WIDTH * (1 - nodes / self._all))
        bar = "━" * full + "─" * (_WIDTH - full)
        text = f"\r{bar} {nodes} of {self._all} nodes, {trials} trials, {now - self._started:.0f} s, {stage}"
        sys.stderr.write(f"{text:<100}")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * 100 + "\r")
            sys.stderr.flush()
