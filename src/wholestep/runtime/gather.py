"""Read the inputs of a graph from the user's objects: one pass over the slots, grouped by how they are reached."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from wholestep.capture.slots import (
    ABSENT,
    BatchSlot,
    GradSlot,
    MappingSlot,
    OptimizerStateSlot,
    Slot,
)
from wholestep.capture.tree import same_objects

_NOTHING: dict[Any, Any] = {}


def picker(positions: list[int]) -> Callable[[list[Any]], list[Any]]:
    """A function that takes the values at some positions out of a list."""
    if len(positions) < 2:
        return lambda values: [values[i] for i in positions]
    pick = itemgetter(*positions)
    return lambda values: list(pick(values))


class Gather:
    """Reads all inputs of one graph, in the order of its placeholders."""

    def __init__(self, slots: list[Slot], leaves: list[Any]) -> None:
        self.slots = slots
        held = [leaves[s.index] if isinstance(s, BatchSlot) else s.get() for s in slots]
        self.tensor_positions = [i for i, value in enumerate(held) if isinstance(value, Tensor)]
        self.tensor_slots = [slots[i] for i in self.tensor_positions]
        self._pick_tensors = picker(self.tensor_positions)
        self._size = len(slots)
        self._mapping = [(i, s.mapping, s.key) for i, s in enumerate(slots) if isinstance(s, MappingSlot)]
        self._grads = [(i, s.param) for i, s in enumerate(slots) if isinstance(s, GradSlot)]
        self._batch = [(i, s.index) for i, s in enumerate(slots) if isinstance(s, BatchSlot)]
        by_optimizer: dict[Any, list[tuple[int, Any, Any]]] = {}
        for i, s in enumerate(slots):
            if isinstance(s, OptimizerStateSlot):
                by_optimizer.setdefault(s.optimizer, []).append((i, s.param, s.key))
        self._states = []
        for optimizer, entries in by_optimizer.items():
            owners = list(optimizer.state)
            number = {id(owner): j for j, owner in enumerate(owners)}
            numbered = [(i, number[id(param)], key) for i, param, key in entries]
            self._states.append((optimizer, owners, numbered, entries))
        fast = MappingSlot | GradSlot | BatchSlot | OptimizerStateSlot
        self._others = [(i, s) for i, s in enumerate(slots) if not isinstance(s, fast)]

    def read(self, leaves: list[Any]) -> list[Any] | None:
        """The inputs now; None if some slot is gone."""
        values: list[Any] = [None] * self._size
        try:
            for i, index in self._batch:
                values[i] = leaves[index]
            for i, mapping, key in self._mapping:
                values[i] = mapping[key]
            for i, param in self._grads:
                values[i] = param.grad
            for optimizer, owners, numbered, entries in self._states:
                state = optimizer.state
                if same_objects(state, owners):
                    # By number: looking a parameter up by hash costs more than all the rest.
                    found = list(state.values())
                    for i, j, key in numbered:
                        values[i] = found[j][key]
                else:
                    for i, param, key in entries:
                        values[i] = state.get(param, _NOTHING)[key]
        except (KeyError, IndexError):
            return None
        for i, slot in self._others:
            value = slot.get()
            if value is ABSENT:
                return None
            values[i] = value
        return values

    def tensors(self, values: list[Any]) -> list[Any]:
        """The inputs that were tensors at capture."""
        return self._pick_tensors(values)
