"""What follows a run of the graph: values that exist only then, and calls of the step's Python that each run repeats.

Values (`DeferredNumber`):

    return {"loss": loss.item()}              an expression over output 0: read after the run
    self.total += loss.item()                 the same, with self.total as it was before the run
    lr = scheduler.get_last_lr()[0]           read after the run repeated `scheduler.step()`

While a step is traced such a number is an expression (`capture.scalars`). It is evaluated after each run, in Python, in
the order in which the step computed it; the graph only returns the tensors that it is computed from.

Calls (`ReplayedCall`): `print`, `logging`, `losses.append`.

    print(f"loss {loss.item():.3f}")     print(DeferredText)              the text is made after each run
    self.losses.append(loss)             list.append(losses, output 2)    a tensor of the run
    logs["loss"] = {"train": value}      a new dict at each run, as in eager

The arguments of such a call are a template: what the step made is filled in after each run, containers that the step
made are built anew, and objects of the user's are passed as they are. Calls are made in the order of the step. Lists
and dicts that outlive the call are written by such calls only; one that the step also reads is under a guard.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from wholestep.errors import Location
from wholestep.ir.user_objects.plain_contents import set_items
from wholestep.ir.user_objects.slots import Slot, value_in
from wholestep.torch_private.autograd import identity_named


@dataclass(frozen=True, eq=False)
class FilledLeaf:
    """A value of the run: `kind` and `value` as in `CapturedStep.result_leaves`, or a tensor that is only shown."""

    kind: str
    value: Any
    trial: Any = None
    """What stands for it where two traces of a call are compared."""


@dataclass(frozen=True, eq=False)
class FreshContainer:
    """A container that the step made: each run makes another one."""

    empty: Any
    """An empty one of the same type; a tuple of any contents for a tuple."""
    keys: Sequence[Any] | None
    items: Sequence[Any]
    """Templates."""


Template = Any
"""`FilledLeaf`, `FreshContainer`, or an object that is passed as it is."""


@dataclass(frozen=True, eq=False)
class ReplayedCall:
    """One call that is made after each run."""

    text: str
    """What a person would call it: `print`, `self.losses.append`."""
    function: Callable[..., Any]
    args: Sequence[Template]
    kwargs: Mapping[str, Template]
    location: Location | None = None
    once: bool = False
    """Its arguments show a clock that capture read: only the first run makes it."""

    def make(self, leaf: Callable[[FilledLeaf], Any], made: dict[int, Any]) -> None:
        """Call it with the values of a run. `made`: the containers that this run has made."""
        args = [fill(template, leaf, made) for template in self.args]
        self.function(*args, **{name: fill(template, leaf, made) for name, template in self.kwargs.items()})


def fill(template: Template, leaf: Callable[[FilledLeaf], Any], made: dict[int, Any]) -> Any:
    """What a template stands for in one run. One container of the step stays one."""
    if isinstance(template, FilledLeaf):
        if id(template) not in made:
            made[id(template)] = leaf(template)
        return made[id(template)]
    if not isinstance(template, FreshContainer):
        return template
    if id(template) in made:
        return made[id(template)]
    if isinstance(template.empty, tuple):
        items = [fill(item, leaf, made) for item in template.items]
        kind: Any = type(template.empty)
        made[id(template)] = kind(*items) if hasattr(kind, "_fields") else kind(items)
        return made[id(template)]
    new = made[id(template)] = copy.copy(template.empty)
    items = [fill(item, leaf, made) for item in template.items]
    if isinstance(new, dict):
        assert template.keys is not None
        set_items(new, zip(template.keys, items, strict=True))
    elif isinstance(new, list | deque):
        new.extend(items)
    else:
        new.update(items)
    return new


@dataclass(frozen=True, eq=False)
class ShownTensor:
    """A tensor as it is printed: with the name of its autograd function, which a replay does not record."""

    output: Any
    """The node; in a bound leaf the number of the output."""
    grad_fn: str = ""
    requires_grad: bool = False
    is_parameter: bool = False

    def of(self, value: Tensor) -> Tensor:
        """A tensor with these values that prints as in eager."""
        value = value.detach()
        if self.grad_fn:
            shown: Tensor = identity_named(self.grad_fn)(value.requires_grad_())
            return shown
        if self.is_parameter:
            return nn.Parameter(value, requires_grad=self.requires_grad)
        return value.requires_grad_() if self.requires_grad else value


@dataclass(frozen=True, eq=False)
class ShownLeaf:
    """A tensor in a text."""

    tensor: ShownTensor
    number: int
    """The how many-th of the trace it is."""

    @property
    def node(self) -> Any:
        return self.tensor.output


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
        self._found: dict[Any, Any] = {slot: value_in(slot, arguments) for slot in sources.before}
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
