"""Guards on modules (attributes, submodules, parameters, buffers), optimizers and scalers (groups, options, state)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_, itemgetter
from typing import Any

from torch.optim import Optimizer

from wholestep.guards.guard import (
    Call,
    DictVersionGuard,
    Guard,
    PerItemGuard,
    change_text,
    is_other_scalar,
    other_scalars,
)
from wholestep.ir.captured_step import GuardSpecs
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.call_tree import same_objects
from wholestep.ir.user_objects.plain_contents import same_plain, skeleton, structure_of
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot
from wholestep.runtime.executor import Gather
from wholestep.torch_private.modules_and_optimizers import (
    MODULE_INTERNALS,
    OPTIMIZER_INTERNALS,
    SCALER_SETTINGS,
    SCALER_TENSORS,
)


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
                yield from other_scalars(f"{path}.{key}", now.get(key, ABSENT), value)


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
                yield from other_scalars(f"{path}.{key}", vars(module).get(key, ABSENT), value)


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


def _types(group: dict[str, Any]) -> list[type]:
    return list(map(type, group.values()))


class SameOptimizer(Guard):
    """An optimizer has the same param groups and options, and state for the same parameters."""

    def __init__(self, optimizer: Optimizer, path: str, specs: GuardSpecs, gather: Gather) -> None:
        self._optimizer = optimizer
        self._path = path
        self._gather = gather
        groups = specs.param_groups[optimizer]
        self._groups = [
            (group.params, group.options, {key: skeleton(value) for key, value in group.constants.items()})
            for group in groups
        ]
        self._options = [dict(group.constants) for group in groups]
        own = not type(optimizer).__module__.startswith("torch.")
        self._types = [_types(group) if own or specs.reads_param_groups else None for group in optimizer.param_groups]
        """The types of all options, where user code may tell `1` from `1.0`; torch's optimizers do not."""
        self._order = [list(group) for group in optimizer.param_groups]
        self._owners = list(optimizer.state)
        self._sizes = _sizes(optimizer.state)
        self._passed_version = -1
        """`Gather.version` when the state was last checked and held."""

    def holds(self, call: Call) -> bool:
        return self._state_holds() and self._groups_hold()

    def _state_holds(self) -> bool:
        if self._passed_version == self._gather.version:
            return True
        if not self._same_owners() or _sizes(self._optimizer.state) != self._sizes:
            return False
        self._passed_version = self._gather.version
        return True

    def _same_owners(self) -> bool:
        return same_objects(self._optimizer.state, self._owners)

    def _groups_hold(self) -> bool:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            return False
        for group, types, (params, keys, options) in zip(groups, self._types, self._groups, strict=True):
            if group.keys() != keys or (types is not None and _types(group) != types):
                return False
            now = group["params"]
            if len(now) != len(params) or not all(map(is_, now, params)):
                return False
            for key, value in options.items():
                if skeleton(group.get(key, ABSENT)) != value:
                    return False
        return True

    def _other_types(self) -> Iterator[str]:
        groups = zip(self._optimizer.param_groups, self._types, self._order, strict=False)
        for g, (group, types, order) in enumerate(groups):
            if types is not None and group.keys() == set(order) and list(group) != order:
                yield f"the options of {self._path}.param_groups[{g}] are in another order"
                continue
            for key, now, before in zip(group, _types(group), types or (), strict=False):
                if now is not before:
                    yield f"{self._path}.param_groups[{g}].{key} has another type than at capture"

    def reasons(self, call: Call) -> Iterator[str]:
        count, state = len(self._optimizer.param_groups), self._optimizer.state
        if count != len(self._groups):
            yield f"{self._path} has {count} param groups instead of {len(self._groups)}"
        if not self._same_owners():
            yield f"{self._path} has state for {len(state)} parameters instead of {len(self._owners)}"
        for path, before, now in self._changed_options():
            yield change_text(path, before, now)
        yield from self._other_keys()
        yield from self._other_types()
        if not self.holds(call):
            yield "a parameter or the state of an optimizer changed"

    def changed_scalars(self, call: Call) -> Iterator[str]:
        return (path for path, before, now in self._changed_options() if is_other_scalar(now, before))

    def _other_keys(self) -> Iterator[str]:
        for g, (group, (_, keys, _)) in enumerate(zip(self._optimizer.param_groups, self._groups, strict=False)):
            for key in sorted(group.keys() - keys, key=str):
                yield f"{self._path}.param_groups[{g}] has the new option {key!r}"

    def _changed_options(self) -> Iterator[tuple[str, Any, Any]]:
        """Options of param groups whose values changed: path, value at capture, value now."""
        for g, (group, options) in enumerate(zip(self._optimizer.param_groups, self._options, strict=False)):
            for key, value in options.items():
                now = group.get(key, ABSENT)
                if skeleton(now) != skeleton(value):
                    yield f"{self._path}.param_groups[{g}].{key}", value, now


def _sizes(state: Any) -> list[int]:
    """The number of entries for each parameter; a value that is not a dict counts as one."""
    return [len(entries) if isinstance(entries, dict) else 1 for entries in state.values()]


class SameNestedState(PerItemGuard):
    """Lists, dicts and constants in optimizer state have the same structure and values; two places that held one tensor
    still do."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._structures = specs.nested_state
        self._same = specs.same_tensors
        super().__init__([*self._structures, *self._same])

    def reasons(self, call: Call) -> Iterator[str]:
        for slot, structure in self._structures:
            if structure_of(slot.get()) != structure:
                yield f"{slot.path} has another structure"
        for slot, other in self._same:
            if slot.get() is not (call.leaves[other.index] if isinstance(other, BatchSlot) else other.get()):
                yield f"{slot.path} and {other.path} were one tensor and are two"


class OptimizerAttributes(PerItemGuard):
    """Optimizers have the same attributes, of those that a user can set."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._attributes: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
        for optimizer, path in specs.optimizers.items():
            skip = (OPTIMIZER_INTERNALS - {"defaults"}) | specs.volatile.get(id(optimizer), set())
            own = not type(optimizer).__module__.startswith("torch.")  # torch's private attributes belong to torch
            before = {k: v for k, v in vars(optimizer).items() if k not in skip and (own or not k.startswith("_"))}
            before["step"] = vars(optimizer).get("step", ABSENT)  # a method that is replaced on the instance
            if before:
                self._attributes.append((vars(optimizer), path, before))
        super().__init__(self._attributes)

    def reasons(self, call: Call) -> Iterator[str]:
        for attributes, path, before in self._attributes:
            for key, value in before.items():
                now = attributes.get(key, ABSENT)
                if now is not value and not same_plain(now, value):
                    yield change_text(f"{path}.{key}", value, now)

    def changed_scalars(self, call: Call) -> Iterator[str]:
        for attributes, path, before in self._attributes:
            for key, value in before.items():
                if is_other_scalar(attributes.get(key, ABSENT), value):
                    yield f"{path}.{key}"


class SameScalers(PerItemGuard):
    """Gradient scalers have the same settings, and their tensors exist or not as at capture."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._scalers = [(s, path, _unused(s), _settings(s)) for s, path in specs.scalers.items()]
        super().__init__(self._scalers)

    def reasons(self, call: Call) -> Iterator[str]:
        for scaler, path, unused, settings in self._scalers:
            if _unused(scaler) != unused:
                yield f"{path} has {'' if any(unused) else 'no longer '}been used"
            if _settings(scaler) != settings:
                yield f"a setting of {path} changed"


def _unused(scaler: Any) -> tuple[bool, ...]:
    """For each tensor of a GradScaler, whether it does not exist yet."""
    return tuple(vars(scaler).get(name) is None for name in SCALER_TENSORS)


def _settings(scaler: Any) -> tuple[Any, ...]:
    return tuple(vars(scaler).get(name) for name in SCALER_SETTINGS)
