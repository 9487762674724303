"""Guards on the arguments of a call (tree structure, non-tensor leaves, which tensors are one object, dynamic sizes)
and on scalar inputs (their types, and the branches that Python took on them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from wholestep.guards.guard import Call, Guard, PerItemGuard, inputs_in_containers, is_other_scalar
from wholestep.ir.captured_step import AutomaticDim, GuardSpecs, out_of_range
from wholestep.ir.deferred import ItemLeaf
from wholestep.ir.user_objects.plain_contents import CONTAINERS, ArrayCopy, Contents, is_array, same_plain
from wholestep.ir.user_objects.slots import Slot, value_in


class SameStructure(Guard):
    """The arguments have the same tree structure."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._structure = specs.arguments.structure

    def holds(self, call: Call) -> bool:
        return bool(call.structure == self._structure)

    def reasons(self, call: Call) -> Iterator[str]:
        if not self.holds(call):
            yield "the arguments have another structure"


class SameObjects(Guard):
    """Non-tensor leaves are the same objects, or equal plain values."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._paths = specs.arguments.paths
        self._fixed = list(specs.arguments.constants.items())

    def holds(self, call: Call) -> bool:
        leaves = call.leaves
        for i, value in self._fixed:
            leaf = leaves[i]
            if leaf is not value and not same_plain(leaf, value):
                return False
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for i, value in self._fixed:
            now = call.leaves[i]
            if not same_plain(now, value):
                plain = isinstance(value, int | float | str | bool | type(None))
                yield f"{self._paths[i]} " + (f"was {value!r} and is {now!r}" if plain else "is another object")

    def changed_scalars(self, call: Call) -> Iterator[str]:
        return (self._paths[i] for i, value in self._fixed if is_other_scalar(call.leaves[i], value))


class SameContents(PerItemGuard):
    """Lists, dicts and arrays among the arguments have the same contents."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._paths = specs.arguments.paths
        leaves = [(leaf, specs.arguments.paths[i]) for i, leaf in specs.arguments.constants.items()]
        containers = [(leaf, path) for leaf, path in leaves if isinstance(leaf, CONTAINERS)]
        self._contents = Contents(containers, inputs=inputs_in_containers(specs))
        self._arrays = [ArrayCopy(leaf, path) for leaf, path in leaves if is_array(leaf)]
        super().__init__([*containers, *self._arrays])

    def holds(self, call: Call) -> bool:
        return self._contents.are_same() and all(copy.is_same() for copy in self._arrays)

    def reasons(self, call: Call) -> Iterator[str]:
        changed = [*self._contents.changed(), *(copy.path for copy in self._arrays if not copy.is_same())]
        return (f"the contents of {path} changed" for path in changed)

    def changed_scalars(self, call: Call) -> Iterator[str]:
        return (path for path, before, now in self._contents.changed_items() if is_other_scalar(now, before))


class SameStateArguments(PerItemGuard):
    """An argument that is also state (a parameter passed to the step) is still that state."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._paths = specs.arguments.paths
        self._slots = specs.arguments.found_elsewhere
        super().__init__(self._slots)

    def reasons(self, call: Call) -> Iterator[str]:
        for i, slot in self._slots:
            if call.leaves[i] is not slot.get():
                yield f"{self._paths[i]} is no longer {slot.path}"


class NoArgumentGradients(PerItemGuard):
    """Tensor arguments that require grad have no gradient."""

    def __init__(self, specs: GuardSpecs, leaves: list[Any]) -> None:
        self._paths = specs.arguments.paths
        elsewhere = {i for i, _ in specs.arguments.found_elsewhere}
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._indices = [i for i, tensor in tensors if tensor.requires_grad and i not in elsewhere]
        super().__init__(self._indices)

    def reasons(self, call: Call) -> Iterator[str]:
        for i in self._indices:
            leaf = call.leaves[i]
            if leaf.is_leaf and leaf.grad is not None:
                yield f"{self._paths[i]}.grad is set"


class SameInference(Guard):
    """Tensors among the arguments were made under `torch.inference_mode()`, or were not, as at the capture."""

    def __init__(self, specs: GuardSpecs, leaves: list[Any]) -> None:
        self._paths = specs.arguments.paths
        self._indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._before = [leaves[i].is_inference() for i in self._indices]

    def is_needed(self) -> bool:
        return bool(self._indices)

    def holds(self, call: Call) -> bool:
        leaves = call.leaves
        return [leaves[i].is_inference() for i in self._indices] == self._before

    def reasons(self, call: Call) -> Iterator[str]:
        for i, before in zip(self._indices, self._before, strict=True):
            if call.leaves[i].is_inference() != before:
                yield f"{self._paths[i]} was {'' if before else 'not '}made under torch.inference_mode() at the capture"


class SameArgumentAliases(PerItemGuard):
    """Arguments that were the same tensor still are."""

    def __init__(self, specs: GuardSpecs, leaves: list[Any]) -> None:
        self._paths = specs.arguments.paths
        self._pairs = _aliased(leaves)
        super().__init__(self._pairs)

    def reasons(self, call: Call) -> Iterator[str]:
        for first, second in self._pairs:
            if call.leaves[first] is not call.leaves[second]:
                yield f"{self._paths[first]} and {self._paths[second]} were one tensor and are two"


def _aliased(leaves: list[Any]) -> list[tuple[int, int]]:
    first: dict[int, int] = {}
    pairs = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) in first:
                pairs.append((first[id(leaf)], i))
            first.setdefault(id(leaf), i)
    return pairs


class DynamicSizes(PerItemGuard):
    """Dynamic sizes are in their declared range, and meet the conditions that the trace assumed."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._sizes = specs.sizes
        self._paths = specs.arguments.paths
        self._dims = [
            (leaf, dim, declared, specs.arguments.paths[leaf])
            for leaf, dims in specs.sizes.dims.items()
            for dim, declared in dims.items()
        ]
        super().__init__(self._dims)
        self.update()

    def update(self) -> None:
        """Read the assumed conditions again: lowering adds some."""
        self._assumed = self._sizes.assumed()

    def reasons(self, call: Call) -> Iterator[str]:
        excluded = self._excluded(call.leaves)
        if excluded:
            yield excluded
            return
        for leaf in self._sizes.dims:  # strides of symbolic sizes follow from them only in contiguous tensors
            if not call.leaves[leaf].is_contiguous():
                yield f"{self._paths[leaf]} is not contiguous"
                return
        sizes: dict[str, int] = {}
        for name, places in self._sizes.sources.items():
            found = {f"{self._paths[leaf]}.shape[{dim}]": call.leaves[leaf].shape[dim] for leaf, dim in places}
            if len(set(found.values())) > 1:
                yield "sizes that were equal differ: " + ", ".join(f"{at} is {size}" for at, size in found.items())
                return
            sizes[name] = next(iter(found.values()))
        for text, check in self._assumed:
            if not check(sizes):
                yield f"the sizes {sizes} do not meet {text}"

    def _excluded(self, leaves: list[Any]) -> str:
        """A size out of the range of its dimension, as text; raises DynamicShapeError if the user declared it."""
        for leaf, dim, declared, path in self._dims:
            size = leaves[leaf].shape[dim]
            if size < declared.min or (declared.max is not None and size > declared.max):
                if not isinstance(declared, AutomaticDim):
                    raise out_of_range(path, dim, size, declared)
                return f"{path} has size {size} in dimension {dim}"
        return ""


class SameScalarTypes(PerItemGuard):
    """Scalar inputs have the same Python type: `1`, `1.0` and `True` may take different branches."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._numbers = specs.scalar_types
        super().__init__(self._numbers)

    def reasons(self, call: Call) -> Iterator[str]:
        for slot, kind in self._numbers:
            now = value_in(slot, call.leaves)
            if type(now) is not kind:
                yield f"{slot.path} is no longer of type {kind.__name__}"


class SameScalarConditions(PerItemGuard):
    """Conditions that Python evaluated on scalar inputs while tracing (on a learning rate, a step count) still hold."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._conditions = specs.conditions
        self._items = specs.items
        self._slots = specs.placeholder_slots
        used = {id(leaf): leaf for condition in self._conditions for leaf in condition.leaves}.values()
        self._scalars = list(used) if all(isinstance(leaf, Slot) for leaf in used) else None
        """All scalars in the conditions, if they contain nothing else: unchanged values need no evaluation."""
        self._passed_values: list[Any] | None = None
        super().__init__(self._conditions)

    def reasons(self, call: Call) -> Iterator[str]:
        values = None if self._scalars is None else [value_in(slot, call.leaves) for slot in self._scalars]
        if values is not None and values == self._passed_values and (0 not in values or self._same_zeros(values)):
            return
        value = self._value_in(call)
        memo: dict[int, Any] = {}
        for condition in self._conditions:
            if not condition.holds(value, memo):
                yield f"{condition.text} no longer holds"
                return
        self._passed_values = values

    def _same_zeros(self, values: list[Any]) -> bool:
        """Whether values that are equal to those that passed are zeros of the same sign, too."""
        return all(map(same_plain, values, self._passed_values or ()))

    def _value_in(self, call: Call) -> Callable[[Any], Any]:
        """A function from a leaf of an expression to its value in this call."""

        def current(node: Any) -> Any:
            return value_in(self._slots[node], call.leaves)

        items = self._items.run(current) if self._items is not None else {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, ItemLeaf):
                found = items[leaf.node]
                return found.item() if isinstance(found, Tensor) else found
            if isinstance(leaf, Slot):
                return value_in(leaf, call.leaves)
            raise TypeError(f"cannot evaluate {leaf!r}")

        return value
