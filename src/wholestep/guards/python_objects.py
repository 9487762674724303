"""Guards on what the step's Python read: variables, attributes of plain objects and classes, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.guards.guard import Call, Listed, is_other_number, was_and_is
from wholestep.ir.guard_specs import GuardSpecs
from wholestep.ir.user_objects.container_contents import ArrayCopy, Contents, is_large
from wholestep.ir.user_objects.plain_values import kind_of, own_dict, same_plain
from wholestep.ir.user_objects.slots import ABSENT


class SameVariables(Listed):
    """Closure variables and globals hold what they held."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._variables = [
            (path, slot, value)
            for path, slot, value in specs.variables
            if path not in specs.rebound_variables and path not in specs.lifted
        ]
        super().__init__(self._variables)

    def reasons(self, call: Call) -> Iterator[str]:
        for path, slot, value in self._variables:
            now = slot.get()
            if now is not value and not same_plain(now, value):
                yield was_and_is(path, value, now)

    def changed_numbers(self, call: Call) -> Iterator[str]:
        return (path for path, slot, value in self._variables if is_other_number(slot.get(), value))


class SameReads(Listed):
    """Attributes of plain objects that the step read are as they were."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._reads = [(obj, path, list(values.items())) for obj, path, values in specs.reads]
        super().__init__(self._reads)

    def reasons(self, call: Call) -> Iterator[str]:
        for obj, path, values in self._reads:
            attributes = own_dict(obj)
            for name, value in values:
                now = attributes.get(name, ABSENT)
                if not same_plain(now, value):
                    yield was_and_is(f"{path}.{name}", value, now)

    def changed_numbers(self, call: Call) -> Iterator[str]:
        for obj, path, values in self._reads:
            for name, value in values:
                if is_other_number(own_dict(obj).get(name, ABSENT), value):
                    yield f"{path}.{name}"


class SameClassReads(Listed):
    """Plain values that the step read from the classes of such objects are as they were."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._reads = specs.class_reads
        super().__init__(self._reads)

    def reasons(self, call: Call) -> Iterator[str]:
        for obj, path, values in self._reads:
            for name, value in values.items():
                now = getattr(obj, name, ABSENT)
                if not same_plain(now, value):
                    yield was_and_is(f"{path}.{name}", value, now)


class SameKinds(Listed):
    """Variables and attributes that the step itself sets hold the kind of thing that they held."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._variables = [(path, slot, kind) for path, (slot, kind) in specs.rebound_variables.items()]
        self._attributes = specs.kinds
        super().__init__([*self._variables, *self._attributes])

    def reasons(self, call: Call) -> Iterator[str]:
        for path, slot, kind in self._variables:
            if kind_of(slot.get()) != kind:
                yield f"{path} holds another kind of thing"
        for attributes, key, path, kind in self._attributes:
            if kind_of(attributes.get(key, ABSENT)) != kind:
                yield f"{path} holds another kind of thing"


class SameContainers(Listed):
    """Lists and dicts that the step may have read hold what they held."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._contents = Contents(specs.containers)
        super().__init__(specs.containers)

    def holds(self, call: Call) -> bool:
        return self._contents.are_same()

    def reasons(self, call: Call) -> Iterator[str]:
        return (f"the contents of {path} changed" for path in self._contents.changed())


class SameArrays(Listed):
    """NumPy arrays that the step may have read hold what they held."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._arrays = [ArrayCopy(held, path) for held, path in specs.arrays if not is_large(held)]
        super().__init__(self._arrays)

    def reasons(self, call: Call) -> Iterator[str]:
        return (f"the contents of {copy.path} changed" for copy in self._arrays if not copy.is_same())


class SameChains(Listed):
    """Objects that the step calls are still reached by the same links from its arguments and variables."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._links = specs.links
        super().__init__(self._links)

    def reasons(self, call: Call) -> Iterator[str]:
        for link in self._links:
            if not link.holds():
                yield f"{link.path} is another object"


class SameTensors(Listed):
    """Parameters that lie outside of modules (in a list, in a param group) are the same objects."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._parameters = specs.loose_parameters
        super().__init__(self._parameters)

    def reasons(self, call: Call) -> Iterator[str]:
        for slot, real in self._parameters:
            if slot.get() is not real:
                yield f"{slot.path} is another tensor"
