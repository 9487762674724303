"""The Python scalars of one trace: which of them are symbolic, and what user code may do with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from numpy import float64
from torch import fx
from torch.optim import Optimizer

from wholestep.capture.effects.deferred_text import NeedsFormatText, formats_with_own_text
from wholestep.capture.patching.conversions import NeedsConversion
from wholestep.capture.scalars.scalar_policy import ScalarPolicy
from wholestep.capture.scalars.symbolic_scalars import ScalarGuard, ScalarNode, computed_with, scalar_of
from wholestep.errors import ItemError, Location
from wholestep.ir.captured_step import HostCall
from wholestep.ir.deferred import HostLeaf, ItemLeaf, Number, SizeLeaf
from wholestep.ir.meta import location_of, user_frame, user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import item_slot, stored_items
from wholestep.ir.user_objects.slots import ComputedSlot, MappingSlot, SequenceSlot, Slot, StoredItemSlot

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture


class TracedScalars:
    """Makes the symbolic scalars of one capture and is their host: creates their nodes and collects their guards."""

    def __init__(self, capture: Capture, policy: ScalarPolicy, seen: set[str]) -> None:
        """`seen`: receives the paths of the numbers that user code got as symbolic scalars."""
        self._capture = capture
        self._policy = policy
        self._seen = seen
        self.lifted: list[tuple[Slot, type]] = []
        """Numbers that are inputs because they changed between two calls, and their types."""
        self.guards: dict[str, ScalarGuard] = {}
        self.given: list[weakref.ref[Any]] = []
        """Scalars that user code got and whose values are not known yet."""
        self._items: list[tuple[Slot, Number, Any]] = []
        """Numbers in lists and dicts that are inputs: the place, the number, the scalar."""
        self._scalars: list[ScalarNode] = []
        self._has_deferred = False
        self.is_size = False
        """Whether a size is a scalar without a value: a trace with plain scalars would have another shape."""

    def release(self) -> None:
        """Drop the capture."""
        for scalar in self._scalars:
            scalar.release()
        self._scalars = []

    def make(self, slot: Slot, value: Number) -> Any:
        """Make a number in a slot symbolic, unless the policy pins it."""
        if self._policy.plain:
            return value
        self._seen.add(slot.path)
        kind = float if isinstance(value, float) else int
        hint: Number = value if type(value) is float64 else kind(value)
        scalar = ScalarNode(self, kind, hint, slot.path, leaf=slot)
        if slot.path in self._policy.pinned:
            self.add_guard(ScalarGuard(scalar, hint))
            return value
        return scalar.as_python()

    def is_pinned(self, path: str) -> bool:
        """Whether user code needs a number, which it now gets, as a plain one."""
        self._seen.add(path)
        return path in self._policy.pinned

    def note_seen(self, path: str) -> None:
        """User code may tell apart what was made of a changed place."""
        self._seen.add(path)

    def lift(self, slot: Slot, value: Number) -> Any:
        """Make a number that changed between two calls symbolic."""
        self.lifted.append((slot, type(value)))
        return self.make(slot, value)

    def lift_items(self, container: Any, path: str) -> None:
        """Make the numbers in a list or dict symbolic that changed between two calls. Those of one that the step writes
        are made when they are read; those in the attributes of an object with the other attributes."""
        capture = self._capture
        if not self._policy.lifts_in(path) or isinstance(container, set):
            return
        if capture.recorded.will_hold(container) or id(container) in capture.dicts_of_attributes():
            return
        items = stored_items(container) if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if type(value) in (int, float) and self._policy.lifts(where := f"{path}[{key!r}]"):
                slot = item_slot(container, key, InputKind.HYPER_PARAMETER, where)
                if slot is not None:
                    scalar = self.lift(slot, value)
                    slot.set(scalar)
                    self._items.append((slot, value, scalar))

    @staticmethod
    def is_item(container: Any, key: Any, value: Any) -> bool:
        """Whether a value in a container is the scalar of the number that lay there."""
        scalar = scalar_of(value)
        slot = None if scalar is None else scalar.leaf
        if isinstance(slot, MappingSlot | StoredItemSlot):
            return slot.mapping is container and bool(slot.key == key)
        return isinstance(slot, SequenceSlot) and slot.sequence is container and slot.index == key

    def restore_items(self) -> None:
        """Put the numbers back."""
        for slot, value, scalar in self._items:
            if slot.get() is scalar:
                slot.set(value)

    def late(self, call: HostCall, path: str, read: Callable[[], Any], slot: Slot | None = None) -> Any:
        """A symbolic scalar for what a call that follows the graph leaves in Python."""
        value = read()
        scalar = scalar_of(value)
        plain: Number = scalar.trial if scalar is not None else value if type(value) in (int, float) else 0.0
        if self._policy.plain:
            return plain
        leaf = HostLeaf(path, read, plain, slot)
        call.leaves.append(leaf)
        return ScalarNode(self, type(plain), None, path, leaf=leaf).as_python()

    def note_deferred(self) -> None:
        """User code gets a scalar that is known only after the graph ran."""
        if self._capture.phase != "optimizer" or not is_of_torch(self._capture.running_step):
            self._has_deferred = True

    def text(self, node: ScalarNode, function: Callable[..., str], *args: Any) -> str:
        """The text of a number that is not known yet."""
        return self._capture.texts.mark(function, node, *args)

    def note_given(self, value: Any) -> None:
        self.given.append(weakref.ref(value))

    def may_tell_apart(self) -> bool:
        """Whether code outside of torch got symbolic scalars and may test their type."""
        if self._policy.plain or self.is_size:
            return False
        if self._has_deferred:
            return True
        own_optimizer = not all(map(is_of_torch, self._capture.world.optimizers))
        return bool(self._seen) and (bool(self.lifted) or own_optimizer)

    def before_conversion(self, name: str, node: ScalarNode | None = None) -> None:
        """A function needs the plain number for a scalar that is not known yet, or changed between two calls: the next
        trace may replace the name by which it converts."""
        frame = user_frame(2)
        if node is not None and node.hint is not None:
            changed = any(isinstance(leaf, Slot) and self._is_lifted(leaf) for leaf in node.leaves())
            if changed and frame is not None and name in frame.f_code.co_names and name not in frame.f_globals:
                raise NeedsConversion(frame.f_globals, name)
            return
        codes = [] if frame is None else formats_with_own_text(frame)
        if codes and not self._capture.knows_formats(codes):
            raise NeedsFormatText(
                codes,
                ItemError(
                    "% takes the value of a tensor out of the graph.",
                    fix='write f"{value:.3f}", or pass the value to print or logging, which format it after the run.',
                    location=location_of(frame, with_text=True),
                ),
            )
        if frame is None or name not in frame.f_code.co_names or name in frame.f_globals:
            return
        refusal = ItemError(
            f"{name}() takes the value of a tensor out of the graph.",
            fix="return the tensor from the step and read its value outside; or take it with .item(), if it is only "
            "returned, stored or printed.",
            location=location_of(frame, with_text=True),
        )
        raise NeedsConversion(frame.f_globals, name, refusal)

    def _is_lifted(self, leaf: Slot) -> bool:
        return isinstance(leaf, ComputedSlot) or self._policy.lifts(leaf.path)

    def before_index(self, node: ScalarNode) -> None:
        """Code takes the value of an index: what it reads of a table with it may be an input of its own."""
        self._capture.tables.ask(node)

    def note_scalar(self, node: ScalarNode) -> None:
        self._scalars.append(node)

    def emit_scalar(self, target: Callable[..., Any], args: tuple[Any, ...], value: Number) -> fx.Node:
        return self._capture.recorder.emit_function(target, args, value)

    def leaf_scalar(self, leaf: Any, value: Number) -> fx.Node:
        if isinstance(leaf, ItemLeaf):
            return self._capture.items.emit(leaf, value)
        if isinstance(leaf, HostLeaf):
            raise computed_with(leaf, user_location())
        return leaf.node if isinstance(leaf, SizeLeaf) else self._capture.inputs.number(leaf, value)

    def shape_scalar(self, symbol: Any) -> tuple[fx.Node, Number]:
        wrap: Any = torch.SymInt
        return self._capture.shape_arg(wrap(symbol)), symbol.hint

    def decide(self, scalar: ScalarNode) -> Number | None:
        return self._capture.items.decide(scalar)

    def add_guard(self, guard: ScalarGuard) -> None:
        self.guards.setdefault(guard.key, guard)

    def location_here(self) -> Location | None:
        return user_location()


def is_of_torch(optimizer: Optimizer | None) -> bool:
    """Whether the `step` of an optimizer is torch's own code."""
    return type(optimizer).__module__.startswith("torch.optim.")
