"""What one compiled step says to the other ranks: around a capture, before a first run, and around each run.

Without other ranks (a world of one, a fake process group) every method does nothing.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

from wholestep.runtime.agreement import Agreement
from wholestep.runtime.channel import Channel
from wholestep.runtime.digest import GraphDigest, LinesDigest, digest_of, local_shapes
from wholestep.runtime.executor import Entry

_steps: dict[str, itertools.count[int]] = {}
_nothing = nullcontext()
_PATIENCE = 20
"""Deadlines that a rank may be late for a call whose graphs are all known: it may load data, evaluate, save."""


class Ranks:
    """The side of one compiled step that talks to other ranks."""

    def __init__(self, name: str, deadline: float) -> None:
        number = next(_steps.setdefault(name, itertools.count()))
        self._step = f"{name}#{number}" if number else name
        """The same on all ranks, which make their steps in the same order."""
        self._deadline = deadline
        self._last: Entry | None = None
        self._digests: WeakKeyDictionary[Entry, GraphDigest] = WeakKeyDictionary()

    def compiling(self, call: int) -> AbstractContextManager[None]:
        """While the body captures, this rank counts as alive."""
        channel = Channel.current()
        return _nothing if channel is None else channel.compiling(self._step, call)

    def agree_on_models(self, call: int, lines: list[str]) -> None:
        """Before parameters are sent around: all ranks place the same models by the same plan."""
        channel = Channel.current()
        if channel is not None and lines:
            channel.deadline = self._deadline
            place = f"{self._step}, placing its models"
            Agreement(channel, place, self._deadline).agree(call, LinesDigest(lines))

    def agree(self, call: int, entry: Entry) -> None:
        """Before a graph runs for the first time: all ranks must have the same, or one that communicates the same."""
        channel = Channel.current()
        if channel is None:
            return
        graph = entry.step_graph
        digest = digest_of(graph.gm, graph.signature, local_shapes(graph.signature))
        self._digests[entry] = digest
        channel.deadline = self._deadline
        Agreement(channel, self._step, self._deadline).agree(call, digest)

    def agree_on_choice(self, call: int, entry: Entry) -> None:
        """Before another graph runs than in the last call: the others must have chosen one that fits.

        A rank that goes on with the same graph asks nobody; its watchdog answers for it.
        """
        channel = Channel.current()
        digest = self._digests.get(entry)
        if entry is self._last or channel is None or digest is None:
            return
        Agreement(channel, self._step, _PATIENCE * self._deadline).agree(call, digest)

    def running(self, call: int, entry: Entry) -> AbstractContextManager[None]:
        """While the body runs a graph, failures of other ranks end its waits."""
        self._last = entry
        channel = Channel.current()
        return _nothing if channel is None else channel.running(self._step, call, self._digests.get(entry))

    def completing(self, call: int) -> AbstractContextManager[None]:
        """While the body completes what a call left: it waits for what is under way, and sends nothing."""
        channel = Channel.current()
        return _nothing if channel is None else channel.completing(self._step, call)
