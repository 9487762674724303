"""What an iteration left for the next one, and the tensors that it belongs to.

igm(p, x)           leaves the update of p
igm(p, x)           does it: p is the same tensor
igm(q, x)           q is another one: what was left is done to p first, and the iteration is a first one
igm(p, bad)         raises in the middle: what was done by then is not done again
p.copy_(saved)      between two iterations: WS-PENDING, instead of adding an old update to it
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from wholestep.errors import PendingError
from wholestep.torch_private.dtensor import local_of
from wholestep.torch_private.fake_tensors import storage_of, version_of

log = logging.getLogger("wholestep.iter_graph")


@dataclass(frozen=True, eq=False)
class Flush:
    """The pending part of one move as a module: takes state, then some of what was carried."""

    gm: fx.GraphModule
    state: tuple[str, ...]
    """Names of inputs of the step."""
    given: tuple[int, ...]
    """Places among the carried values."""


class Ran:
    """A target of nodes that say which move is done."""

    __name__ = "ran"

    def __init__(self, done: list[int]) -> None:
        self._done = done

    def __call__(self, move: int) -> None:
        self._done.append(move)


class LeftOver:
    """What is pending. It knows nothing of the module that made it, so that it can outlive that."""

    def __init__(self) -> None:
        self.flushes: list[Flush] = []
        """One per move."""
        self.done: list[int] = []
        """Moves that the running iteration has completed."""
        self._carried: tuple[Any, ...] = ()
        self._state: dict[str, Any] = {}
        self._left: list[int] = []
        self._versions: list[tuple[Any, ...]] = []

    @property
    def exists(self) -> bool:
        """Whether something is pending."""
        return bool(self._left)

    @property
    def carried(self) -> tuple[Any, ...]:
        """What the last iteration gives to the next."""
        return self._carried

    def left(self, carried: Iterable[Any], inputs: Mapping[str, Any]) -> None:
        """An iteration with these inputs left something for each move."""
        self._carried = tuple(carried)
        self._state = {name: inputs[name] for flush in self.flushes for name in flush.state}
        self._left = list(range(len(self.flushes)))
        self._versions = self._seen()

    def goes_on(self, inputs: Mapping[str, Any]) -> bool:
        """Whether an iteration with these inputs can do it all: it has the same tensors."""
        if len(self._left) != len(self.flushes):
            return False
        return all(_is_same(inputs[name], value) for name, value in self._state.items())

    def check_unchanged(self) -> None:
        """Raise PendingError, once, if someone wrote to a tensor whose update is pending."""
        before, self._versions = self._versions, self._seen()
        for name, then, now in zip(self._state, before, self._versions, strict=True):
            if then != now:
                raise PendingError(
                    f"{name} was written while its update by the last iteration was pending: the write saw the value "
                    "before that update, which would now be added to it.",
                    fix="call flush() before you change state between iterations.",
                )

    def keep_all_but(self, moves: Iterable[int]) -> None:
        """Some moves are done; the others are still pending."""
        gone = set(moves)
        self._left = [number for number in self._left if number not in gone]
        self._versions = self._seen()
        if not self._left:
            self._carried, self._state, self._versions = (), {}, []

    def flush(self) -> None:
        """Do what is pending; what fails stays pending."""
        if not self._left:
            return
        self.check_unchanged()
        done: list[int] = []
        try:
            for number in self._left:
                flush = self.flushes[number]
                flush.gm(*(self._state[name] for name in flush.state), *(self._carried[i] for i in flush.given))
                done.append(number)
        finally:
            self.keep_all_but(done)

    def _seen(self) -> list[tuple[Any, ...]]:
        return [_identity(value) for value in self._state.values()]


def flush_at_last(left: LeftOver) -> None:
    """The module is gone, its parameters may live on."""
    try:
        left.flush()
    except Exception:
        log.exception("what an IterGraphModule had left pending could not be completed")


def _identity(value: Any) -> tuple[Any, ...]:
    """Changes with every write that torch counts, and with every other memory (`p.data = ...`, a cast)."""
    if not isinstance(value, Tensor):
        return (id(value),)
    local: Tensor = local_of(value)
    return version_of(value), storage_of(local), value.dtype


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are one tensor, perhaps under two names (`p` and `p.detach()`)."""
    if one is other:
        return True
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or type(one) is not type(other):
        return False
    form = (one.dtype, one.shape, one.stride(), one.storage_offset())
    if form != (other.dtype, other.shape, other.stride(), other.storage_offset()):
        return False
    return storage_of(local_of(one)) == storage_of(local_of(other))
