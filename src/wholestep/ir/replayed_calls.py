"""Calls of the step's Python that a replay makes again, after the graph: `print`, `logging`, `losses.append`.

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
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wholestep.errors import Location
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
        dict.update(new, zip(template.keys, items, strict=True))
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
