"""Guards on modules: attributes that a user can set, submodules, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_, itemgetter
from typing import Any

from wholestep.guards.guard import Call, DictVersionGuard, Guard, PerItemGuard, change_text, is_other_scalar
from wholestep.ir.captured_step import GuardSpecs
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import same_plain
from wholestep.ir.user_objects.slots import ABSENT
from wholestep.torch_private.modules_and_optimizers import MODULE_INTERNALS


class SameAttributes(Guard):
    """Modules have the same attributes. For modules whose attributes the step sets, see `SameOtherAttributes`."""

    def __init__(self, specs: GuardSpecs) -> None:
        modules = [(m, path) for m, path in specs.modules if id(m) not in specs.volatile]
        self.dicts = [vars(m) for m, _ in modules]
        self._paths = [path for _, path in modules]
        # Only attributes that a user can set: with torch's own dicts of each module it would read ten times the memory.
        self._before = [{k: v for k, v in d.items() if k not in MODULE_INTERNALS} for d in self.dicts]
        self._readers = [(_reader(list(before)), d) for d, before in zip(self.dicts, self._before, strict=True)]
        self._values = [list(before.values()) for before in self._before]
        self._sizes = list(map(len, self.dicts))

    def holds(self, call: Call) -> bool:
        if list(map(len, self.dicts)) != self._sizes:
            return False
        for (read, d), values in zip(self._readers, self._values, strict=True):
            try:
                now = read(d)
            except KeyError:
                return False  # one was removed and another added
            if not all(map(is_, now, values)) and not all(map(same_value, now, values)):
                return False
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for path, before, now in zip(self._paths, self._before, self.dicts, strict=True):
            for key in {**before, **now}:
                old, new = before.get(key, ABSENT), now.get(key, ABSENT)
                if key not in MODULE_INTERNALS and not same_value(new, old):
                    yield change_text(f"{path}.{key}", old, new)

    def changed_scalars(self, call: Call) -> Iterator[str]:
        for path, before, now in zip(self._paths, self._before, self.dicts, strict=True):
            for key, value in before.items():
                if is_other_scalar(now.get(key, ABSENT), value):
                    yield f"{path}.{key}"


class SameSubmodules(Guard):
    """No submodule was replaced, added or removed."""

    def __init__(self, specs: GuardSpecs) -> None:
        self.dicts = [vars(m)["_modules"] for m, _ in specs.modules if vars(m)["_modules"]]
        self._before = [dict(d) for d in self.dicts]

    def holds(self, call: Call) -> bool:
        return all(map(_same_entries, self.dicts, self._before))

    def reasons(self, call: Call) -> Iterator[str]:
        if not self.holds(call):
            yield "a submodule was replaced, added or removed"


class SameParameters(Guard):
    """Parameters are the same objects."""

    def __init__(self, specs: GuardSpecs) -> None:
        slots = [(slot, tensor) for slot, tensor in specs.module_tensors if slot.kind is not InputKind.BUFFER]
        self._entries = [(slot.mapping, slot.key) for slot, _ in slots]
        self._paths = [slot.path for slot, _ in slots]
        self._objects = [tensor for _, tensor in slots]

    def holds(self, call: Call) -> bool:
        return all(map(is_, [mapping.get(key) for mapping, key in self._entries], self._objects))

    def reasons(self, call: Call) -> Iterator[str]:
        for path, (mapping, key), before in zip(self._paths, self._entries, self._objects, strict=True):
            if mapping.get(key) is not before:
                yield f"{path} is another parameter"


class SameCounts(Guard):
    """Modules have the same number of parameters and buffers."""

    def __init__(self, specs: GuardSpecs) -> None:
        self.dicts = [vars(m)[kind] for m, _ in specs.modules for kind in ("_parameters", "_buffers")]
        self._counts = list(map(len, self.dicts))

    def holds(self, call: Call) -> bool:
        return list(map(len, self.dicts)) == self._counts

    def reasons(self, call: Call) -> Iterator[str]:
        if not self.holds(call):
            yield "a parameter or buffer was registered or removed"


class SameOtherAttributes(PerItemGuard):
    """Modules whose attributes the step sets: their other attributes are the same."""

    def __init__(self, specs: GuardSpecs) -> None:
        volatile = specs.volatile
        self._modules = []
        for module, path in specs.modules:
            if id(module) in volatile:
                before = {k: v for k, v in vars(module).items() if k not in volatile[id(module)]}
                self._modules.append((module, path, volatile[id(module)], before))
        super().__init__(self._modules)

    def reasons(self, call: Call) -> Iterator[str]:
        for module, path, volatile, before in self._modules:
            now = vars(module)
            for key in {**before, **now}:
                old, new = before.get(key, ABSENT), now.get(key, ABSENT)
                if new is not old and key not in volatile and not same_value(new, old):
                    yield change_text(f"{path}.{key}", old, new)

    def changed_scalars(self, call: Call) -> Iterator[str]:
        for module, path, _, before in self._modules:
            for key, value in before.items():
                if is_other_scalar(vars(module).get(key, ABSENT), value):
                    yield f"{path}.{key}"


class SameNoneBuffers(PerItemGuard):
    """Buffers that were None are still None."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._buffers = [
            (module._buffers, name, f"{path}.{name}")
            for module, path in specs.modules
            for name, buffer in module._buffers.items()
            if buffer is None
        ]
        super().__init__(self._buffers)

    def reasons(self, call: Call) -> Iterator[str]:
        for buffers, name, path in self._buffers:
            if buffers.get(name) is not None:
                yield f"{path} is no longer None"


def attribute_guards(specs: GuardSpecs) -> DictVersionGuard:
    """Guards on attributes and submodules, checked again after an attribute of a module was set."""
    attributes = SameAttributes(specs)
    submodules = SameSubmodules(specs)
    return DictVersionGuard([attributes, submodules], [*attributes.dicts, *submodules.dicts])


def parameter_guards(specs: GuardSpecs) -> DictVersionGuard:
    """Guards on parameters and buffers, checked again after one was set."""
    counts = SameCounts(specs)
    return DictVersionGuard([SameParameters(specs), counts], counts.dicts)


def _reader(keys: list[str]) -> Callable[[dict[str, Any]], Any]:
    """A function that reads some attributes at once; a missing name raises KeyError."""
    if len(keys) == 1:
        (key,) = keys
        return lambda attributes: (attributes[key],)
    return itemgetter(*keys) if keys else lambda attributes: ()


def same_value(now: Any, before: Any) -> bool:
    """Whether an attribute holds the same object, the same plain value, or a tuple of them."""
    if same_plain(now, before):
        return True
    if type(now) is tuple and type(before) is tuple:
        return len(now) == len(before) and all(map(same_value, now, before))
    return False


def _same_entries(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))
