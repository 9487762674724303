"""`Gather`: reads the inputs of a graph from the user's objects, in one pass over the slots, grouped by their type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from wholestep.ir.user_objects.slots import (
    ABSENT,
    BatchSlot,
    GradSlot,
    LocalSlot,
    MappingSlot,
    ModuleSlot,
    OptimizerStateSlot,
    Slot,
)
from wholestep.torch_private.dtensor import local_of
from wholestep.torch_private.guard_checks import DictWatch

_EMPTY: dict[Any, Any] = {}


def picker(positions: list[int]) -> Callable[[list[Any]], list[Any]]:
    """A function from a list to its values at some positions."""
    if len(positions) < 2:
        return lambda values: [values[i] for i in positions]
    pick = itemgetter(*positions)
    return lambda values: list(pick(values))


class Gather:
    """Reads all inputs of one graph, in the order of its placeholders.

    Values that lie in dicts (parameters, buffers, optimizer state) are cached until one of the dicts is written.
    """

    def __init__(self, slots: Sequence[Slot], leaves: list[Any], optimizers: Iterable[Any] = ()) -> None:
        self.slots = slots
        held = [leaves[s.index] if isinstance(s, BatchSlot) else s.get() for s in slots]
        self.tensor_positions = [i for i, value in enumerate(held) if isinstance(value, Tensor)]
        self.tensor_slots = [slots[i] for i in self.tensor_positions]
        self._pick_tensors = picker(self.tensor_positions)
        self._size = len(slots)
        self._modules = [(i, s.mapping, s.key) for i, s in enumerate(slots) if isinstance(s, ModuleSlot)]
        self._mapping = [
            (i, s.mapping, s.key)
            for i, s in enumerate(slots)
            if isinstance(s, MappingSlot) and not isinstance(s, ModuleSlot)
        ]
        self._grads = [(i, s.param) for i, s in enumerate(slots) if isinstance(s, GradSlot)]
        self._batch = [(i, s.index) for i, s in enumerate(slots) if isinstance(s, BatchSlot)]
        by_optimizer: dict[Any, list[tuple[int, Any, Any]]] = {optimizer: [] for optimizer in optimizers}
        for i, s in enumerate(slots):
            if isinstance(s, OptimizerStateSlot):
                by_optimizer.setdefault(s.optimizer, []).append((i, s.param, s.key))
        self._states = list(by_optimizer.items())
        self._state_dicts: list[Any] = []
        self._watch: DictWatch | None = None
        self._cached: list[Any] | None = None
        self.version = 0
        """Grows when the dicts are read again: for the same version, the cached objects are the same."""
        self._local = [
            (i, s, s.inner)
            for i, s in enumerate(slots)
            if isinstance(s, LocalSlot) and isinstance(s.inner, ModuleSlot | OptimizerStateSlot)
        ]
        self._locals: list[tuple[Any, Any]] = []
        """DTensors that lie in dicts, each with its local shard."""
        fast = MappingSlot | GradSlot | BatchSlot | OptimizerStateSlot
        cached = {i for i, _, _ in self._local}
        self._others = [(i, s) for i, s in enumerate(slots) if not isinstance(s, fast) and i not in cached]

    def read(self, leaves: list[Any]) -> list[Any] | None:
        """The current inputs; None if one no longer exists."""
        try:
            if self._cached is None or not self._same_dicts():
                self._read_dicts()
            assert self._cached is not None
            values = self._cached.copy()
            for i, mapping, key in self._mapping:
                values[i] = mapping[key]
            for i, index in self._batch:
                values[i] = leaves[index]
            for i, param in self._grads:
                values[i] = param.grad
        except (KeyError, IndexError):
            return None
        for i, slot in self._others:
            value = slot.get()
            if value is ABSENT:
                return None
            values[i] = value
        return values

    def _same_dicts(self) -> bool:
        same = all(o.state is held for (o, _), held in zip(self._states, self._state_dicts, strict=True))
        same = same and all(local_of(whole) is local for whole, local in self._locals)
        return same and self._watch is not None and self._watch.unchanged()

    def _read_dicts(self) -> None:
        self.version += 1
        self._cached = None
        values: list[Any] = [None] * self._size
        dicts: dict[int, Any] = {}
        for i, mapping, key in self._modules:
            values[i] = mapping[key]
            dicts[id(mapping)] = mapping
        self._state_dicts = [optimizer.state for optimizer, _ in self._states]
        for (_, entries), state in zip(self._states, self._state_dicts, strict=True):
            for i, param, key in entries:
                values[i] = state.get(param, _EMPTY)[key]
            dicts |= {id(d): d for d in (state, *state.values())}
        self._locals = []
        for i, slot, inner in self._local:
            whole, local = inner.get(), slot.get()
            if local is ABSENT:
                raise KeyError(slot.path)
            values[i] = local
            self._locals.append((whole, local))
            if isinstance(inner, ModuleSlot):
                dicts[id(inner.mapping)] = inner.mapping
        plain = all(isinstance(d, dict) for d in dicts.values())
        self._watch = DictWatch(list(dicts.values())) if plain else None
        self._cached = values

    def tensors(self, values: list[Any]) -> list[Any]:
        """The inputs that were tensors at capture."""
        return self._pick_tensors(values)
