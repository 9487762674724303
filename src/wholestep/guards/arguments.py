"""Guards on the arguments of a call: their structure, what is no tensor, and which tensors are one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from wholestep.guards.guard import Call, Guard, Listed, is_other_number
from wholestep.ir.guard_specs import GuardSpecs
from wholestep.ir.user_objects.container_contents import ArrayCopy, Contents, is_array
from wholestep.ir.user_objects.plain_values import CONTAINERS, same_plain


class SameStructure(Guard):
    """The arguments are nested as they were."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._structure = specs.arguments.structure

    def holds(self, call: Call) -> bool:
        return bool(call.structure == self._structure)

    def reasons(self, call: Call) -> Iterator[str]:
        if not self.holds(call):
            yield "the arguments have another structure"


class SameObjects(Guard):
    """Arguments that are no tensors are the same objects, or the same plain values."""

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

    def changed_numbers(self, call: Call) -> Iterator[str]:
        return (self._paths[i] for i, value in self._fixed if is_other_number(call.leaves[i], value))


class SameContents(Listed):
    """Lists, dicts and arrays among the arguments hold what they held."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._paths = specs.arguments.paths
        leaves = [(leaf, specs.arguments.paths[i]) for i, leaf in specs.arguments.constants.items()]
        containers = [(leaf, path) for leaf, path in leaves if isinstance(leaf, CONTAINERS)]
        self._contents = Contents(containers)
        self._arrays = [ArrayCopy(leaf, path) for leaf, path in leaves if is_array(leaf)]
        super().__init__([*containers, *self._arrays])

    def holds(self, call: Call) -> bool:
        return self._contents.are_same() and all(copy.is_same() for copy in self._arrays)

    def reasons(self, call: Call) -> Iterator[str]:
        changed = [*self._contents.changed(), *(copy.path for copy in self._arrays if not copy.is_same())]
        return (f"the contents of {path} changed" for path in changed)


class FoundElsewhere(Listed):
    """A tensor that was also found elsewhere (a parameter passed to the step) still is what lies there."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._paths = specs.arguments.paths
        self._slots = specs.arguments.found_elsewhere
        super().__init__(self._slots)

    def reasons(self, call: Call) -> Iterator[str]:
        for i, slot in self._slots:
            if call.leaves[i] is not slot.get():
                yield f"{self._paths[i]} is no longer {slot.path}"


class NoGradients(Listed):
    """Tensors among the arguments that require grad have no gradient yet."""

    def __init__(self, specs: GuardSpecs, leaves: list[Any]) -> None:
        self._paths = specs.arguments.paths
        elsewhere = {i for i, _ in specs.arguments.found_elsewhere}
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._places = [i for i, tensor in tensors if tensor.requires_grad and i not in elsewhere]
        super().__init__(self._places)

    def reasons(self, call: Call) -> Iterator[str]:
        for i in self._places:
            leaf = call.leaves[i]
            if leaf.is_leaf and leaf.grad is not None:
                yield f"{self._paths[i]}.grad is set"


class SameTensorTwice(Listed):
    """Arguments that were one tensor still are."""

    def __init__(self, specs: GuardSpecs, leaves: list[Any]) -> None:
        self._paths = specs.arguments.paths
        self._pairs = _aliased(leaves)
        super().__init__(self._pairs)

    def reasons(self, call: Call) -> Iterator[str]:
        for first, second in self._pairs:
            if call.leaves[first] is not call.leaves[second]:
                yield f"{self._paths[first]} and {self._paths[second]} are two tensors"


def _aliased(leaves: list[Any]) -> list[tuple[int, int]]:
    first: dict[int, int] = {}
    pairs = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) in first:
                pairs.append((first[id(leaf)], i))
            first.setdefault(id(leaf), i)
    return pairs
