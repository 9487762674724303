"""Guards on the inputs of the graph: they are there, numbers are numbers, and tensors look as they did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wholestep.guards.guard import Call, Guard
from wholestep.ir.guard_specs import GuardSpecs
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.slots import BatchSlot, GeneratorSlot, ModuleSlot, Slot
from wholestep.runtime.gather import Gather, picker
from wholestep.torch_private.guard_checks import TensorChecks

_NUMBER = (int, float)


class AllThere(Guard):
    """All inputs are there, and those that were numbers are numbers."""

    def __init__(self, inputs: Sequence[Slot]) -> None:
        self._numbers = [(i, slot.path) for i, slot in enumerate(inputs) if _is_number(slot)]
        self._places = [i for i, _ in self._numbers]

    def holds(self, call: Call) -> bool:
        state = call.state
        return state is not None and all(isinstance(state[i], _NUMBER) for i in self._places)

    def reasons(self, call: Call) -> Iterator[str]:
        if call.state is None:
            yield "some state that the graph reads is gone"
            return
        for i, path in self._numbers:
            if not isinstance(call.state[i], _NUMBER):
                yield f"{path} is no longer a number"


class SameForm(Guard):
    """Tensors have the type, dtype, device, sizes, strides and `requires_grad` that they had."""

    def __init__(self, specs: GuardSpecs, gather: Gather, leaves: list[Any]) -> None:
        self._gather = gather
        slots = gather.tensor_slots
        self._unused = _unused_leaves(specs, gather)
        dynamic = specs.sizes.dims
        tensors = [leaves[s.index] if isinstance(s, BatchSlot) else s.get() for s in slots]
        dims = [frozenset(dynamic.get(s.index, ()) if isinstance(s, BatchSlot) else ()) for s in slots]
        names = [slot.path for slot in slots]
        for i in self._unused:
            tensors.append(leaves[i])
            dims.append(frozenset(dynamic.get(i, ())))
            names.append(specs.arguments.paths[i])
        self._count = len(tensors)
        self._all = TensorChecks(tensors, dims, names)
        in_modules = [i for i, s in enumerate(slots) if isinstance(s, ModuleSlot)]
        others = [
            i for i, s in enumerate(slots) if not isinstance(s, ModuleSlot) and s.kind is not InputKind.OPTIMIZER_STATE
        ]
        rest = [*in_modules, *others, *range(len(slots), len(tensors))]
        self._rest = TensorChecks([tensors[i] for i in rest], [dims[i] for i in rest], [names[i] for i in rest])
        self._pick_modules = picker([gather.tensor_positions[i] for i in in_modules])
        self._pick_others = picker([gather.tensor_positions[i] for i in others])
        self._good_reading = -1
        """The reading of the state in which all tensors passed."""
        self._modules_tensors: list[Any] = []

    def is_needed(self) -> bool:
        return self._count > 0

    def holds(self, call: Call) -> bool:
        assert call.state is not None
        if self._good_reading == self._gather.reading:
            # The same optimizer state as when all were checked; nothing gives it other memory.
            leaves = call.leaves
            return self._rest.hold(
                [*self._modules_tensors, *self._pick_others(call.state), *(leaves[i] for i in self._unused)]
            )
        if not self._all.hold(self._tensors(call)):
            return False
        self._good_reading = self._gather.reading
        self._modules_tensors = self._pick_modules(call.state)
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        if not self.holds(call):
            yield self._all.explain(self._tensors(call))

    def _tensors(self, call: Call) -> list[Any]:
        assert call.state is not None
        return [*self._gather.tensors(call.state), *(call.leaves[i] for i in self._unused)]


def _unused_leaves(specs: GuardSpecs, gather: Gather) -> list[int]:
    """Tensors among the arguments that are no input; of a tensor that is there twice, the first."""
    read = {s.index for s in gather.tensor_slots if isinstance(s, BatchSlot)}
    found = []
    for i, slot in enumerate(specs.arguments.slots):
        if isinstance(slot, BatchSlot) and slot.index == i and i not in read:
            found.append(i)
    return found


def _is_number(slot: Slot) -> bool:
    return not isinstance(slot, BatchSlot | GeneratorSlot) and isinstance(slot.get(), _NUMBER)
