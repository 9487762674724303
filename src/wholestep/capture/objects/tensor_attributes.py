"""Python attributes on tensors (`p.no_decay = True`, `p.main_grad`): on fakes while tracing, on tensors after a run.

A fake gets the attributes of its tensor before the step is traced. What the step reads is guarded; a tensor among the
attributes is an input where it is used; what the step sets is set on the user's tensor after each run.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wholestep.capture.results.effect_line import Effect
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import SideEffectError
from wholestep.ir.captured_step import TensorAttributesSpec
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import same_plain
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot, MappingSlot, Slot

if TYPE_CHECKING:
    from wholestep.capture.objects.discover import World
    from wholestep.capture.objects.swapped_state import StateTable, Tracked
    from wholestep.capture.results.bindings import Bindings

_SETTABLE = (int, float, bool, str, type(None))
_OTHERS = (InputKind.OPTIMIZER_STATE, InputKind.GRADIENT, InputKind.SCALER_STATE, InputKind.HYPER_PARAMETER)
"""Attributes that optimizers and scalers set on tensors for their own use."""


@dataclass(eq=False)
class OwnAttributes:
    """The attributes of one of the user's tensors when the step was captured."""

    slot: Slot
    real: Tensor
    before: dict[str, Any]
    internal: frozenset[str]
    """What torch itself set on the fake."""
    set_by_step: set[str] = field(default_factory=set)
    """Attributes that the step sets or that are inputs: only their kind is guarded."""


class TensorAttributes:
    """Copies attributes to fakes, and finds those that the step set."""

    def __init__(
        self, world: World, lifts: Callable[[str], bool], lift_number: Callable[[MappingSlot, Any], Any]
    ) -> None:
        self._world = world
        self._lifts = lifts
        self._lift_number = lift_number
        self._followed: list[tuple[Tensor, OwnAttributes]] = []
        """What user code holds (a fake, or the tensor itself) and its attributes before the step."""
        self._held_real: set[int] = set()

    def copy(self, tracked: Tracked) -> None:
        """Copy the attributes of a tensor to its fake."""
        if tracked.slot.kind in _OTHERS or id(tracked.real) in self._held_real:
            return
        real, on_fake = vars(tracked.real), vars(tracked.fake)
        own = OwnAttributes(tracked.slot, tracked.real, dict(real), frozenset(on_fake) - frozenset(real))
        self._followed.append((tracked.fake, own))
        for key, value in own.before.items():
            if key in on_fake:
                continue
            slot = MappingSlot(InputKind.CAPTURED, f"{tracked.slot.path}.{key}", None, real, key)
            if isinstance(tracked.slot, BatchSlot):
                pass  # the next call has another tensor here: a number is a guard, and reading a tensor is refused
            elif isinstance(value, Tensor):
                self._world.tensors.setdefault(id(value), (value, slot))
            elif type(value) in (int, float) and self._lifts(slot.path):
                value = self._lift_number(MappingSlot(InputKind.HYPER_PARAMETER, slot.path, None, real, key), value)
            on_fake[key] = value

    def follow_real(self, tracked: Container[int]) -> Callable[[], None]:
        """Record the attributes of real tensors that user code holds itself (in closures). Returns the undo."""
        held = [
            OwnAttributes(slot, real, dict(vars(real)), frozenset())
            for real, slot in self._world.tensors.values()
            if id(real) not in tracked
        ]
        self._held_real.update(id(own.real) for own in held)
        self._followed += [(own.real, own) for own in held]

        def put_back() -> None:
            for own in held:
                if not _same(vars(own.real), own.before):
                    vars(own.real).clear()
                    vars(own.real).update(own.before)

        return put_back

    def bind(self, table: StateTable, bindings: Bindings) -> None:
        """Bind attributes that the step set on fakes, so that a replay sets them on the user's tensors."""
        for held, own in self._followed:
            now = {k: v for k, v in vars(held).items() if k not in own.internal and "_memo" not in k}
            for key in {**own.before, **now}:
                old, new = own.before.get(key, ABSENT), now.get(key, ABSENT)
                known = table.tracked.get(id(old))
                if same_plain(new, old) or (known is not None and known.fake is new):
                    continue
                self._bind_one(own, key, old, new, bindings)

    def _bind_one(self, own: OwnAttributes, key: str, old: Any, new: Any, bindings: Bindings) -> None:
        where = f"{own.slot.path}.{key}"
        scalar = scalar_of(new)
        if scalar is not None and isinstance(scalar.leaf, Slot) and scalar.leaf.path == where:
            own.set_by_step.add(key)  # an input that the step only read
            return
        settable = isinstance(new, (*_SETTABLE, Tensor)) or scalar is not None or new is ABSENT
        if not settable or isinstance(own.slot, BatchSlot):
            raise SideEffectError(
                f"the step sets {where}, an attribute of a tensor, to a {type(new).__name__}: no replay can repeat it.",
                fix="keep it outside of the step, or in a module.",
            ).seen_by(Effect(lambda capture: vars(capture.stand_in(own.real)).get(key, ABSENT)))
        slot = MappingSlot(InputKind.CAPTURED, where, None, vars(own.real), key)
        bindings.bind(slot, new, created=old is ABSENT)
        if isinstance(new, Tensor) or scalar is not None:
            own.set_by_step.add(key)

    def specs(self) -> list[TensorAttributesSpec]:
        """What guards assume. Drops the fakes."""
        followed, self._followed = self._followed, []
        return [
            TensorAttributesSpec(
                own.slot, None if isinstance(own.slot, BatchSlot) else own.real, own.before, frozenset(own.set_by_step)
            )
            for _, own in followed
        ]


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
