"""Guards on optimizers and gradient scalers: param groups, options, which state exists, attributes."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

from torch.optim import Optimizer

from wholestep.guards.guard import Call, Guard, PerItemGuard, change_text, is_other_scalar
from wholestep.ir.captured_step import GuardSpecs
from wholestep.ir.user_objects.call_tree import same_objects
from wholestep.ir.user_objects.plain_contents import same_plain, skeleton, structure_of
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot
from wholestep.runtime.executor import Gather
from wholestep.torch_private.modules_and_optimizers import OPTIMIZER_INTERNALS, SCALER_SETTINGS, SCALER_TENSORS


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
        for group, (params, keys, options) in zip(groups, self._groups, strict=True):
            if group.keys() != keys:
                return False
            now = group["params"]
            if len(now) != len(params) or not all(map(is_, now, params)):
                return False
            for key, value in options.items():
                if skeleton(group.get(key, ABSENT)) != value:
                    return False
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        count, state = len(self._optimizer.param_groups), self._optimizer.state
        if count != len(self._groups):
            yield f"{self._path} has {count} param groups instead of {len(self._groups)}"
        if not self._same_owners():
            yield f"{self._path} has state for {len(state)} parameters instead of {len(self._owners)}"
        for path, before, now in self._changed_options():
            yield change_text(path, before, now)
        yield from self._other_keys()
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
    """Lists, dicts and constants in optimizer state have the same structure and values; shared tensors are shared."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._structures = specs.nested_state
        self._same = [(a, b) for a, b in specs.same_tensors if not isinstance(b, BatchSlot)]
        super().__init__([*self._structures, *self._same])

    def reasons(self, call: Call) -> Iterator[str]:
        for slot, structure in self._structures:
            if structure_of(slot.get()) != structure:
                yield f"{slot.path} has another structure"
        for slot, other in self._same:
            if slot.get() is not other.get():
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
