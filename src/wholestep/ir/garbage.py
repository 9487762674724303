"""Python's cyclic garbage collector stands still while a graph is walked.

Copying the arguments of 50,000 nodes makes enough tuples to start full collections, each of which looks at every
object of the process: they cost several times what the walk itself does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection inside; where it was off already it stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
