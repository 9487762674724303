"""Values that exist only after a graph ran, and the calls of the step's Python that take them.

    return {"loss": loss.item()}              DeferredNumber over output 0: read after the run
    self.total += loss.item()                 the same, with self.total as it was before the run
    lr = scheduler.get_last_lr()[0]           read after the run repeated `scheduler.step()`

While a step is traced such a number is an expression (`capture.scalars`). It is evaluated after each run, in Python, in
the order in which the step computed it; the graph only returns the tensors that it is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from wholestep.ir.replayed_calls import ShownLeaf
from wholestep.ir.user_objects.slots import BatchSlot, Slot

Number = int | float | bool


@dataclass(frozen=True, eq=False)
class ItemLeaf:
    """The number inside of a tensor that a node computes."""

    node: fx.Node
    known: bool
    """Whether its value can be computed before the step runs."""
    index: int | None = None
    """Which element of the flattened tensor; None for a tensor of one element."""
    trial: Number = 0
    """What stands for it where the traces of a call are compared."""
    number: int = 0
    """The how many-th of the trace it is, among those that are not known."""


@dataclass(frozen=True, eq=False)
class SizeLeaf:
    """A size of a tensor, which a node computes."""

    node: fx.Node


@dataclass(frozen=True, eq=False)
class HostLeaf:
    """A number that a call which follows the graph leaves in a Python object: a learning rate after
    `scheduler.step()`."""

    path: str
    read: Callable[[], Any]
    trial: Number = 0
    slot: Slot | None = None
    """The place in an optimizer's param group that holds it, if that is where it lies."""


@dataclass(frozen=True, eq=False)
class DeferredNumber:
    """An expression of items, of numbers of the call, and of numbers that host calls leave."""

    text: str
    leaves: Sequence[Any]
    """`ItemLeaf`, `SizeLeaf`, `HostLeaf`, the slot of a number, or `ShownLeaf` in a text."""
    evaluate: Callable[[Callable[[Any], Any], dict[int, Any]], Any]
    """Takes what gives the value of a leaf, and a memo that the numbers of one run share."""
    trial: Any = None
    """Its value where the traces of a call are compared."""


@dataclass(frozen=True)
class DeferredSources:
    """Where the leaves of all deferred numbers of a graph are read."""

    outputs: Mapping[Any, int] = field(default_factory=dict)
    """By `ItemLeaf` or `SizeLeaf`, the output of the graph."""
    before: Sequence[Slot] = ()
    """Numbers of the call, read before the graph runs: it, or what follows it, may set them."""


class DeferredValues:
    """The values of the leaves in one run."""

    def __init__(self, sources: DeferredSources, arguments: list[Any]) -> None:
        """Made before the graph runs. `arguments`: the leaves of the arguments of the call."""
        self._sources = sources
        self._found: dict[Any, Any] = {
            slot: arguments[slot.index] if isinstance(slot, BatchSlot) else slot.get() for slot in sources.before
        }
        self._outputs: tuple[Any, ...] = ()
        self._lists: dict[int, list[Any]] = {}
        self._memo: dict[int, Any] = {}

    def ran(self, outputs: tuple[Any, ...]) -> None:
        """The graph ran."""
        self._outputs = outputs

    def read(self, leaves: Sequence[HostLeaf]) -> None:
        """Read what a host call has just left."""
        for leaf in leaves:
            self._found[leaf] = leaf.read()

    def number(self, deferred: DeferredNumber) -> Any:
        """The value of a number."""
        return deferred.evaluate(self._leaf, self._memo)

    def _leaf(self, leaf: Any) -> Any:
        if leaf not in self._found:
            output = self._sources.outputs[leaf]
            value = self._outputs[output]
            if isinstance(leaf, ShownLeaf):
                return leaf.tensor.of(value)
            index = leaf.index if isinstance(leaf, ItemLeaf) else None
            if index is not None:
                if output not in self._lists:
                    self._lists[output] = value.flatten().tolist()
                value = self._lists[output][index]
            self._found[leaf] = value.item() if isinstance(value, Tensor) else value
        return self._found[leaf]
