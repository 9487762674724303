"""Guard on Python attributes that user code put on tensors (`p.no_decay = True`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from wholestep.guards.guard import Call, Guard
from wholestep.guards.wording import is_other_number, was_and_is
from wholestep.ir.guard_specs import GuardSpecs, TensorAttributesSpec
from wholestep.ir.user_objects.plain_values import same_plain
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot
from wholestep.torch_private.guard_checks import DictWatch


class SameTensorAttributes(Guard):
    """Tensors have the attributes that they had; looked at again only where one was set."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._tensors = [(own, vars(own.real)) for own in specs.tensor_attributes if own.real is not None]
        self._batch = [own for own in specs.tensor_attributes if own.real is None]
        self._watch: DictWatch | None = None

    def is_needed(self) -> bool:
        return bool(self._tensors or self._batch)

    def holds(self, call: Call) -> bool:
        if self._batch and next(self._in_batch(call), None) is not None:
            return False
        if self._watch is not None and self._watch.unchanged():
            return True
        if any(next(_differences(own, now), None) is not None for own, now in self._tensors):
            return False
        self._watch = DictWatch([now for _, now in self._tensors])
        return True

    def _in_batch(self, call: Call) -> Iterator[tuple[str, Any, Any]]:
        for own in self._batch:
            assert isinstance(own.slot, BatchSlot)
            yield from _differences(own, vars(call.leaves[own.slot.index]))

    def _changed(self, call: Call) -> Iterator[tuple[str, Any, Any]]:
        yield from self._in_batch(call)
        for own, now in self._tensors:
            yield from _differences(own, now)

    def reasons(self, call: Call) -> Iterator[str]:
        return (was_and_is(path, before, now) for path, before, now in self._changed(call))

    def changed_numbers(self, call: Call) -> Iterator[str]:
        for path, before, now in self._changed(call):
            if is_other_number(now, before):
                yield path


def _differences(own: TensorAttributesSpec, now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Attributes that changed: path, value at capture, value now."""
    before = own.before
    if not before and not now:
        return
    for key in {**before, **now}:
        old, new = before.get(key, ABSENT), now.get(key, ABSENT)
        if same_plain(new, old) or (isinstance(old, Tensor) and isinstance(new, Tensor)):
            continue
        if key in own.set_by_step and type(old) is type(new):
            continue
        yield f"{own.slot.path}.{key}", old, new
