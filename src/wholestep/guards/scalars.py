"""Guards on what the trace assumed of sizes and of numbers where Python branched on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from wholestep.guards.guard import Call, Listed
from wholestep.ir.dynamic_sizes import out_of_range
from wholestep.ir.guard_specs import GuardSpecs
from wholestep.ir.known_values import ItemLeaf
from wholestep.ir.user_objects.slots import BatchSlot, Slot


class SizesInRange(Listed):
    """Declared dynamic sizes are in their range, and are as the trace assumed."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._sizes = specs.sizes
        self._paths = specs.arguments.paths
        self._dims = [
            (leaf, dim, declared, specs.arguments.paths[leaf])
            for leaf, dims in specs.sizes.dims.items()
            for dim, declared in dims.items()
        ]
        super().__init__(self._dims)
        self.renew()

    def renew(self) -> None:
        """Take over what was assumed since: lowering compares sizes, too."""
        self._assumed = self._sizes.assumed()

    def reasons(self, call: Call) -> Iterator[str]:
        self._raise_out_of_range(call.leaves)
        sizes: dict[str, int] = {}
        for name, places in self._sizes.sources.items():
            found = {f"{self._paths[leaf]}.shape[{dim}]": call.leaves[leaf].shape[dim] for leaf, dim in places}
            if len(set(found.values())) > 1:
                yield "one size became several: " + ", ".join(f"{where} is {size}" for where, size in found.items())
                return
            sizes[name] = next(iter(found.values()))
        for text, check in self._assumed:
            if not check(sizes):
                yield f"sizes {sizes} break {text}"

    def _raise_out_of_range(self, leaves: list[Any]) -> None:
        for leaf, dim, declared, path in self._dims:
            size = leaves[leaf].shape[dim]
            if size < declared.min or (declared.max is not None and size > declared.max):
                raise out_of_range(path, dim, size, declared)


class SameNumberTypes(Listed):
    """Numbers that became inputs are still of the type that they had: `1`, `1.0` and `True` may take other branches."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._numbers = specs.scalar_types
        super().__init__(self._numbers)

    def reasons(self, call: Call) -> Iterator[str]:
        for slot, kind in self._numbers:
            now = value_in(call, slot)
            if type(now) is not kind:
                yield f"{slot.path} is no longer of type {kind.__name__}"


class SameBranches(Listed):
    """Numbers that Python compared while tracing (a learning rate, a step count) compare the same way."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._conditions = specs.conditions
        self._items = specs.items
        self._slots = specs.placeholder_slots
        used = {id(leaf): leaf for condition in self._conditions for leaf in condition.leaves}.values()
        self._numbers = list(used) if all(isinstance(leaf, Slot) for leaf in used) else None
        """The numbers that guards look at, where those are all they look at: unchanged numbers need no look."""
        self._good_numbers: list[Any] | None = None
        super().__init__(self._conditions)

    def reasons(self, call: Call) -> Iterator[str]:
        numbers = None if self._numbers is None else [value_in(call, slot) for slot in self._numbers]
        if numbers is not None and numbers == self._good_numbers:
            return
        value = self._value_in(call)
        memo: dict[int, Any] = {}
        for condition in self._conditions:
            if not condition.holds(value, memo):
                yield f"{condition.text} no longer holds"
                return
        self._good_numbers = numbers

    def _value_in(self, call: Call) -> Callable[[Any], Any]:
        """What gives the value of a leaf of an expression."""

        def current(node: Any) -> Any:
            return value_in(call, self._slots[node])

        items = self._items.run(current) if self._items is not None else {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, ItemLeaf):
                found = items[leaf.node]
                return found.item() if isinstance(found, Tensor) else found
            if isinstance(leaf, Slot):
                return value_in(call, leaf)
            raise TypeError(f"cannot evaluate {leaf!r}")

        return value


def value_in(call: Call, slot: Slot) -> Any:
    """What a slot holds in this call."""
    return call.leaves[slot.index] if isinstance(slot, BatchSlot) else slot.get()
