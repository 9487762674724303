"""Tuples, lists and dicts of tensors that the step replaces by others: the state of a recurrent network.

    hidden = tuple(h.detach() for h in hidden)        self.state = {"h": h, "c": c}

A first trace sees that such a place holds a container which the step made, and ends. In the next one each tensor and
number in it is an input of its own, which a later call reads by its key, whatever container lies there then:

    hidden      NestedSlot(hidden, (0,)), NestedSlot(hidden, (1,)); guard: a tuple of two tensors

A tuple or list of numbers and tensors that the user, or another step, replaces between calls (`weights = (w, 1 - w)`)
is read in the same way.

After each run the place holds a new container. Tensors of the user's own (`self.state = (self.h0, x)`) are refused in
it: eager would keep the very same tensors, a replay copies of them. So are lists and dicts inside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wholestep.capture.effects.deferred_text import has_mark
from wholestep.capture.objects.objects_found_by_calls import EarlierTraces, TraceAgain
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import SideEffectError
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import leaves, map_leaves, nested_slot, own_dict, replaced, structure_of
from wholestep.ir.user_objects.slots import ABSENT, CellSlot, MappingSlot, MemberSlot, Slot
from wholestep.ir.user_objects.wrapper_tensors import is_wrapper
from wholestep.torch_private.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_LEAVES = frozenset({int, float, bool, str, type(None)})


class NeedsItems(TraceAgain):
    """Ends a trace: the step sets places to containers that it made."""

    def __init__(self, slots: list[Slot], refusal: SideEffectError) -> None:
        super().__init__("containers are replaced")
        self.slots = slots
        self.refusal = refusal

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        earlier.rebound += self.slots
        return lambda: None


class ReboundContainers:
    """The places of one trace whose items are inputs."""

    def __init__(self, capture: Capture, slots: list[Slot]) -> None:
        self._capture = capture
        places = ((_place_of(slot), slot) for slot in slots)
        self._slots = {place: slot for place, slot in places if place is not None}
        self._before: dict[Any, Any] = {}
        """By place, what the user has there."""
        self._fakes: dict[Any, Any] = {}
        """By place, what the step finds there."""

    def _add_replaced(self) -> None:
        """Tuples and lists of numbers and tensors that were replaced between two calls: `weights = (w, 1 - w)`."""
        capture, world = self._capture, self._capture.world
        if not capture.numbers.lifted:
            return
        owners = [*world.modules.items(), *((holder, path) for holder, path in world.holders.values())]
        places = [(slot, value) for _, slot, value in world.variables]
        for owner, path in owners:
            for key, value in own_dict(owner).items():
                if isinstance(value, tuple | list):
                    places.append((MappingSlot(InputKind.CAPTURED, f"{path}.{key}", None, own_dict(owner), key), value))
        for slot, value in places:
            place = _place_of(slot)
            is_plain = isinstance(value, tuple | list) and _has_plain_form(value)
            is_plain = is_plain and all(self._can_be_input(leaf) for _, leaf in leaves(value))
            if is_plain and place is not None and capture.numbers.lifts(replaced(slot.path)):
                capture.scalars.note_seen(replaced(slot.path))  # to be pinned where it is needed as it is
                self._slots.setdefault(place, slot)

    def _can_be_input(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or id(leaf) in self._capture.table.tracked:
            return True
        is_dense = leaf.layout is torch.strided and not leaf.is_nested and leaf.device.type != "meta"
        return type(leaf) is Tensor and is_dense and not leaf.requires_grad

    def swap_in(self) -> None:
        """Put fakes and symbolic scalars in the place of tensors and numbers."""
        self._add_replaced()
        for place, slot in self._slots.items():
            before = self._before[place] = slot.get()
            self._capture.table.structures.append((slot, structure_of(before)))
            fakes = before if before is ABSENT else map_leaves(before, self._input_in(slot))
            self._fakes[place] = fakes
            if fakes is not before:
                slot.set(fakes)

    def _input_in(self, slot: Slot) -> Callable[[Any, tuple[Any, ...]], Any]:
        return lambda leaf, keys: self._input(leaf, nested_slot(slot, keys))

    def _input(self, leaf: Any, slot: Slot) -> Any:
        table = self._capture.table
        if isinstance(leaf, Tensor):
            found = table.tracked.get(id(leaf))
            if found is None:
                # Another place may hold the same tensor now, and hold another one in the next call.
                tracked = table.track_input(leaf, slot)
                table.tracked[id(tracked.fake)] = table.tracked.pop(id(leaf))
                return tracked.fake
            table.note_same(slot, found)
            return found.fake
        return self._capture.scalars.lift(slot, leaf) if type(leaf) in (int, float) else leaf

    def restore(self) -> None:
        """Put back what the user had."""
        for place, before in self._before.items():
            slot = self._slots[place]
            if before is ABSENT:
                slot.remove()
            elif slot.get() is not before:
                slot.set(before)

    def release(self) -> None:
        """Drop the fakes."""
        self._fakes.clear()

    def holds(self, slot: Slot) -> bool:
        """Whether the items of what lies in a place are inputs."""
        return _place_of(slot) in self._slots

    def is_swapped(self, value: Any) -> bool:
        """Whether a value is what was put into one of these places."""
        return any(value is each for each in self._fakes.values())

    def names_in(self, attributes: dict[str, Any]) -> set[str]:
        """The attributes of an object that are such places."""
        return {key for identity, key in self._slots if identity == id(attributes)}

    def may_hold(self, slot: Slot, before: Any, after: Any) -> bool:
        """Whether a place that the step sets can be traced again in this way."""
        if _place_of(slot) is None or self.holds(slot) or not isinstance(after, tuple | list | dict):
            return False
        return _has_plain_form(before) and self.may_be_set(before, after)

    def may_be_set(self, before: Any, after: Any) -> bool:
        """Whether a replay can set a place to what the step has set it to: all of it is plain, or was made by the step,
        or lay there before."""
        own = {id(leaf) for _, leaf in leaves(before)}
        return _has_plain_form(after) and all(self._is_made_here(leaf) or id(leaf) in own for _, leaf in leaves(after))

    def _is_made_here(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return isinstance(leaf, FakeTensor) and id(leaf) not in self._capture.table.by_fake
        return not has_mark(leaf)

    def found(self, slot: Slot) -> Any:
        """What the step found in a place."""
        return self._fakes[_place_of(slot)]


def _place_of(slot: Slot) -> tuple[int, Any] | None:
    if isinstance(slot, MappingSlot):
        return id(slot.mapping), slot.key
    if isinstance(slot, CellSlot):
        return id(slot.cell), ""
    return (id(slot.holder), slot.member.__name__) if isinstance(slot, MemberSlot) else None


def _has_plain_form(value: Any, depth: int = 0) -> bool:
    """Whether a value is a leaf, or a tuple of such; at the top also a list or a dict."""
    if isinstance(value, tuple):
        return (type(value) is tuple or hasattr(value, "_fields")) and all(_has_plain_form(v, depth + 1) for v in value)
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return depth == 0 and type(value) in (list, dict) and all(_has_plain_form(v, depth + 1) for v in items)
    if isinstance(value, Tensor):
        return not is_wrapper(value)
    return value is ABSENT or type(value) in _LEAVES or scalar_of(value) is not None
