"""The calls that one trace recorded instead of making them, and the templates of their arguments.

There are two kinds. Calls that show values (`print`, `logging`, a progress bar) take their contents at that line: the
tensors are recorded there, and containers that the step made are copied. Calls that store values
(`losses.append(loss)`) store the objects, which the step may still write to: they are resolved after the trace.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholestep.capture.effects.deferred_text import has_mark
from wholestep.capture.python_reads.clocks import ClockNumber, refuse_clocks
from wholestep.capture.python_reads.stand_ins import real_of
from wholestep.capture.results.collect import leaf_of
from wholestep.capture.scalars.symbolic_scalars import ScalarNode, scalar_of
from wholestep.errors import Location, SideEffectError, UnsupportedError
from wholestep.ir.deferred import FilledLeaf, FreshContainer, ReplayedCall, ShownTensor, Template
from wholestep.ir.meta import user_location
from wholestep.torch_private.distributed import is_dtensor, local_of
from wholestep.torch_private.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from wholestep.capture.results.bindings import Bindings
    from wholestep.capture.trace import Capture

_FRESH = (list, tuple, dict, set, deque, defaultdict, OrderedDict)
_DEEPEST = 20


@dataclass(eq=False)
class _HeldTensor:
    """A tensor with the contents that it has when a call shows it."""

    shown: ShownTensor


@dataclass(eq=False)
class _Call:
    text: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    location: Location | None
    stores: bool
    made: dict[int, Template] = field(default_factory=dict)


class ReplayedCalls:
    """The calls of one trace, in the order of the step."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._calls: list[_Call] = []
        self._users: set[int] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def show(self, text: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that shows its arguments."""
        copied: dict[int, Any] = {}
        held = tuple(self._held(arg, copied, 0) for arg in args)
        named = {name: self._held(arg, copied, 0) for name, arg in kwargs.items()}
        self._calls.append(_Call(text, function, held, named, user_location(), stores=False))

    def store(self, text: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Record a call that stores its arguments."""
        self._calls.append(_Call(text, function, args, kwargs, user_location(), stores=True))

    def shown(self, tensor: Tensor) -> ShownTensor:
        """What a later print of the tensor needs: a node that holds its contents at this line."""
        fake = self._fake_of(tensor)
        name = "" if fake.grad_fn is None else type(fake.grad_fn).__name__
        if name == "CppFunction":
            name = fake.grad_fn.name().rsplit("::", 1)[-1]  # type: ignore[union-attr]
        node = self._capture.recorder.values.as_it_is(fake)
        return ShownTensor(node, name, fake.requires_grad, isinstance(fake, nn.Parameter))

    def release(self) -> None:
        """Drop the tensors of the trace."""
        self._calls.clear()

    # The values that a call shows, at the time of the call.

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            raise UnsupportedError(
                f"the step shows a sharded tensor of shape {tuple(tensor.shape)}.",
                fix="show what this rank has of it, tensor.to_local(), or return it from the step.",
                location=user_location(),
            )
        fake = local_of(tensor)
        return fake if isinstance(fake, FakeTensor) else self._capture.lift(fake)

    def _held(self, value: Any, copied: dict[int, Any], depth: int) -> Any:
        value = real_of(value)
        if isinstance(value, Tensor):
            return _HeldTensor(self.shown(value))
        if type(value) not in _FRESH or self._is_users(value) or depth > _DEEPEST:
            self._refuse_hidden(value)
            return value
        if id(value) in copied:
            return copied[id(value)]
        if isinstance(value, dict):
            made = copied[id(value)] = _empty_like(value)
            for key, item in value.items():
                made[key] = self._held(item, copied, depth + 1)
            return made
        items = [self._held(item, copied, depth + 1) for item in value]
        made = copied[id(value)] = type(value)(items)
        return made

    def _is_users(self, container: Any) -> bool:
        """Whether a container was there before the step: it is passed as it is."""
        if self._users is None or len(self._users) != len(self._capture.copies):
            self._users = {id(each) for each, _, _ in self._capture.copies}
        return id(container) in self._users or self._capture.recorded.holds(container)

    @staticmethod
    def _refuse_hidden(value: Any, kept_in: str = "") -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, nn.Module | type) or not isinstance(attributes, dict):
            return
        if any(isinstance(each, FakeTensor) or has_mark(each) for each in attributes.values()):
            raise SideEffectError(
                f"the step shows or keeps a {type(value).__name__} with tensors inside"
                f"{f' in {kept_in}' if kept_in else ''}, which a replay cannot rebuild.",
                fix="pass its tensors themselves, or a dict of them.",
                location=user_location(),
            )

    # After the trace.

    def bind(self, bindings: Bindings) -> list[ReplayedCall]:
        """The calls with templates in the place of what the step made."""
        found = []
        stored: dict[int, Template] = {}
        for call in self._calls:
            made = stored if call.stores else {}
            name = call.text if call.stores else ""
            args = tuple(self.template(bindings, arg, made, name) for arg in call.args)
            kwargs = {key: self.template(bindings, arg, made, name) for key, arg in call.kwargs.items()}
            found.append(ReplayedCall(call.text, call.function, args, kwargs, call.location))
        return found

    def template(self, bindings: Bindings, value: Any, made: dict[int, Template], kept_in: str) -> Template:
        """How a replay rebuilds a value. `kept_in`: the container that stores it, if any."""
        value = real_of(value)
        if kept_in:
            refuse_clocks(value, kept_in)
        if isinstance(value, ClockNumber):
            return _plain_clock(value)
        if isinstance(value, _HeldTensor):
            shown = value.shown
            output = bindings.logged(shown.output)
            bound = ShownTensor(output, shown.grad_fn, shown.requires_grad, shown.is_parameter)
            return FilledLeaf("shown", bound, "a tensor")
        if has_mark(value):
            number = bindings.read_after(self._capture.texts.deferred(value))
            return FilledLeaf("deferred", number, number.trial)
        scalar = scalar_of(value)
        if scalar is not None:
            return self._number(bindings, scalar, kept_in)
        if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            if id(value) not in made:
                made[id(value)] = FilledLeaf(*leaf_of(self._capture, bindings, value, kept_in or "an argument"))
            return made[id(value)]
        if type(value) not in _FRESH and not (isinstance(value, tuple) and hasattr(value, "_fields")):
            self._refuse_hidden(value, kept_in)
            return value
        if self._is_users(value):
            return value
        return self._container(bindings, value, made, kept_in)

    def _container(self, bindings: Bindings, value: Any, made: dict[int, Template], kept_in: str) -> Template:
        if id(value) in made:
            return made[id(value)]
        items: list[Template] = []
        keys = list(map(self._key, value)) if isinstance(value, dict) else None
        empty = value if isinstance(value, tuple) else _empty_like(value)
        if isinstance(value, tuple):
            kind: Any = type(value)
            empty = kind(*([None] * len(value))) if hasattr(value, "_fields") else ()
        made[id(value)] = template = FreshContainer(empty, keys, items)
        for item in value.values() if isinstance(value, dict) else value:
            items.append(self.template(bindings, item, made, kept_in))
        return template

    def _key(self, key: Any) -> Any:
        """The key of a dict that the step made: a parameter is the user's own."""
        real = self._capture.table.real_of(real_of(key))
        if isinstance(real, FakeTensor):
            raise SideEffectError(
                f"the step keeps a dict that has a tensor of shape {tuple(real.shape)} of its own as a key.",
                fix="use a name or a number as the key.",
            )
        return real

    @staticmethod
    def _number(bindings: Bindings, scalar: ScalarNode, kept_in: str) -> Template:
        if scalar.is_fixed:
            return scalar.hint
        number = bindings.read_after(scalar.deferred())
        return FilledLeaf("deferred", number, number.trial)


def _empty_like(container: Any) -> Any:
    empty = copy.copy(container)
    empty.clear()
    return empty


def _plain_clock(value: Any) -> Any:
    if isinstance(value, float):
        return float.__pos__(value)
    return int.__pos__(value) if isinstance(value, int) else value
