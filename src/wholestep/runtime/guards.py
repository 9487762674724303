"""Whether a captured graph may run for a call: cheap checks in the order in which they usually fail.

Built once per graph from what capture saw. Nearly all of it runs as whole-list comparisons in C: identity of
parameters, equality of module attributes, one C++ call over all tensors. `why_not` repeats the checks slowly to say
what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from wholestep._torch_compat import (
    HOOK_ATTRIBUTES,
    SCALER_SETTINGS,
    SCALER_TENSORS,
    SWITCHES,
    DictWatch,
    TensorChecks,
    hook_registries,
)
from wholestep.capture.captured import Captured
from wholestep.capture.discover import MODULE_INTERNALS
from wholestep.capture.known import ItemLeaf
from wholestep.capture.plain import PLAIN, is_mutable_value, kind_of, same_plain, skeleton
from wholestep.capture.shapes import out_of_range
from wholestep.capture.slots import ABSENT, BatchSlot, GeneratorSlot, LocalSlot, ModuleSlot, Slot, in_users_objects
from wholestep.capture.tree import same_objects
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.runtime.gather import Gather, picker


def ambient_state() -> tuple[Any, ...]:
    """Modes of the process that decide what eager would do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        *(switch() for switch in SWITCHES),
        torch.get_default_dtype(),
    )


_grad = attrgetter("grad")


class Guards:
    """The conditions of one captured graph."""

    def __init__(self, captured: Captured, gather: Gather) -> None:
        self._captured = captured
        self._gather = gather
        self._ambient = ambient_state()
        self._structure = captured.structure
        self._tensor_leaves = [i for i, leaf in enumerate(captured.leaves) if isinstance(leaf, Tensor)]
        self._fixed_leaves = [i for i, leaf in enumerate(captured.leaves) if not isinstance(leaf, Tensor)]
        self._fixed_values = [captured.leaves[i] for i in self._fixed_leaves]
        self._build_modules()
        self._build_state()
        self._build_optimizers()
        self._build_tensors()
        self._build_scalars()
        self._build_variables()
        self._rare_checks = [check for check, needed in self._all_rare_checks() if needed]

    def _all_rare_checks(self) -> list[tuple[Callable[[list[Any]], Iterator[str]], Any]]:
        """Conditions that most steps do not have, each with what it looks at."""
        return [
            (self._attribute_differences, self._volatile_modules or self._empty_buffers),
            (self._variable_differences, self._variables),
            (self._object_differences, self._reads or self._captured.class_reads),
            (self._optimizer_differences, any(watched for _, _, watched in self._optimizer_attributes)),
            (self._kind_differences, self._kinds or self._captured.rebound_variables),
            (self._content_differences, self._mutable_leaves or self._containers),
            (self._identity_differences, self._identities or self._scaler_state),
            (self._leaf_differences, self._leaf_slots or self._leaves_with_grad or self._aliases),
            (self._scalar_differences, self._dims or self._scalar_guards),
        ]

    # Building.

    def _build_modules(self) -> None:
        plain = [(m, p) for m, p in self._captured.modules if id(m) not in self._captured.volatile]
        self._volatile_modules = [
            (m, p, self._captured.volatile[id(m)], dict(vars(m)))
            for m, p in self._captured.modules
            if id(m) in self._captured.volatile
        ]
        self._counted = {c.slot.path for c in self._captured.changes if c.kind is ChangeKind.CONSTANT}
        self._module_paths = [p for _, p in plain]
        self._module_dicts = [vars(m) for m, _ in plain]
        self._module_before = [{k: v for k, v in vars(m).items() if k not in MODULE_INTERNALS} for m, _ in plain]
        # Only what a user can set: comparing torch's own dictionaries of each module would touch ten times the memory.
        self._module_readers = [
            (_reader(list(before)), vars(m)) for (m, _), before in zip(plain, self._module_before, strict=True)
        ]
        self._module_values = [read(d) for read, d in self._module_readers]
        self._module_sizes = list(map(len, self._module_dicts))
        self._child_dicts = [vars(m)["_modules"] for m, _ in self._captured.modules if vars(m)["_modules"]]
        self._child_before = [dict(d) for d in self._child_dicts]
        self._registered = [vars(m)[w] for m, _ in self._captured.modules for w in ("_parameters", "_buffers")]
        self._registered_counts = list(map(len, self._registered))
        self._watched = list({id(d): d for d in (*self._module_dicts, *self._child_dicts, *self._registered)}.values())
        self._watch: DictWatch | None = None
        """Begun when the modules passed; while none of their dicts is written they need no second look."""
        self._good_reading = -1
        """The reading of parameters and optimizer state that passed."""

    def _build_state(self) -> None:
        table = self._captured.table
        self._slot_pairs = [(slot.mapping, slot.key) for slot, _ in table.module_slots]
        self._slot_paths = [slot.path for slot, _ in table.module_slots]
        buffers = {id(slot) for slot, _ in table.module_slots if slot.kind.value == "buffer"}
        self._is_buffer = [id(slot) in buffers for slot, _ in table.module_slots]
        self._param_pairs = [pair for pair, buf in zip(self._slot_pairs, self._is_buffer, strict=True) if not buf]
        self._param_paths = [path for path, buf in zip(self._slot_paths, self._is_buffer, strict=True) if not buf]
        self._param_objects = [
            t.real for (s, t), buf in zip(table.module_slots, self._is_buffer, strict=True) if not buf
        ]
        place = {(id(s.mapping), s.key): i for i, s in enumerate(self._captured.inputs) if isinstance(s, ModuleSlot)}
        """Parameters that are inputs were read already; the others are looked up."""
        read = [i for i, (m, k) in enumerate(self._param_pairs) if (id(m), k) in place]
        self._pick_params = picker([place[id(m), k] for m, k in (self._param_pairs[i] for i in read)])
        self._read_params = [self._param_objects[i] for i in read]
        unread = [i for i in range(len(self._param_pairs)) if i not in set(read)]
        self._unread_params = [self._param_pairs[i] for i in unread]
        self._unread_objects = [self._param_objects[i] for i in unread]
        self._empty_buffers = [
            (m._buffers, name, f"{path}.{name}")
            for m, path in self._captured.modules
            for name, buffer in m._buffers.items()
            if buffer is None
        ]
        self._grad_owners = [t.real for t in table.parameters]
        self._grad_paths = [t.slot.path for t in table.parameters]
        self._grad_absent = [t.real.grad is None for t in table.parameters]
        self._nones = [None] * len(self._grad_owners)
        self._no_grads = all(self._grad_absent)
        checked = {id(s) for s in self._gather.tensor_slots}
        self._unread = [t for t in table.parameters if id(t.slot) not in checked or isinstance(t.slot, LocalSlot)]
        """Parameters that are no input; the others have `requires_grad` checked with their shape."""
        self._requires_grad = [t.real.requires_grad for t in self._unread]

    def _build_optimizers(self) -> None:
        self._optimizers: list[tuple[Optimizer, str, list[dict[str, Any]], list[list[Any]], list[Any], list[int]]] = []
        for optimizer, path in self._captured.world.optimizers.items():
            shapes = self._captured.table.groups[optimizer]
            constants = [{key: skeleton(value) for key, value in shape.constants.items()} for shape in shapes]
            params = [shape.params for shape in shapes]
            sizes = list(map(len, optimizer.state.values()))
            self._optimizers.append((optimizer, path, constants, params, list(optimizer.state), sizes))

    def _build_tensors(self) -> None:
        tensors, dims, names = [], [], []
        for slot in self._gather.tensor_slots:
            value = self._captured.leaves[slot.index] if isinstance(slot, BatchSlot) else slot.get()
            tensors.append(value)
            declared = self._captured.dynamic_dims.get(slot.index, {}) if isinstance(slot, BatchSlot) else {}
            dims.append(frozenset(declared))
            names.append(slot.path)
        read = {s.index for s in self._gather.tensor_slots if isinstance(s, BatchSlot)}
        tracked = self._captured.table.tracked
        unused: list[int] = []
        self._unused_leaves = unused
        self._leaf_slots: list[tuple[int, Slot]] = []
        """Argument leaves that are also found elsewhere: a parameter passed to the step, the same tensor twice."""
        for i in self._tensor_leaves:
            slot = tracked[id(self._captured.leaves[i])].slot
            if not isinstance(slot, BatchSlot):
                self._leaf_slots.append((i, slot))
            elif i not in read and slot.index == i:
                unused.append(i)
        for i in unused:
            tensors.append(self._captured.leaves[i])
            dims.append(frozenset(self._captured.dynamic_dims.get(i, {})))
            names.append(self._captured.leaf_paths[i])
        self._tensors = TensorChecks(tensors, dims, names) if tensors else None
        self._checked_reading = -1
        slots, position = self._gather.tensor_slots, self._gather.tensor_positions
        in_modules = [i for i, s in enumerate(slots) if isinstance(s, ModuleSlot)]
        others = [
            i for i, s in enumerate(slots) if not isinstance(s, ModuleSlot) and s.kind is not InputKind.OPTIMIZER_STATE
        ]
        self._pick_modules = picker([position[i] for i in in_modules])
        self._pick_rest = picker([position[i] for i in others])
        rest = [*in_modules, *others, *range(len(slots), len(tensors))]
        self._rest = TensorChecks([tensors[i] for i in rest], [dims[i] for i in rest], [names[i] for i in rest])
        self._modules_tensors: list[Any] = []
        self._aliases = _aliased_leaves(self._captured)
        self._leaves_with_grad = [i for i in self._tensor_leaves if self._captured.leaves[i].requires_grad]

    def _build_scalars(self) -> None:
        self._scalar_guards = self._captured.scalar_guards
        self._items = self._captured.items
        used = {id(leaf): leaf for g in self._scalar_guards for leaf in g.expression.leaves()}.values()
        self._number_leaves = list(used) if all(isinstance(leaf, Slot) for leaf in used) else None
        """The numbers that guards look at, where those are all they look at: unchanged numbers need no look."""
        self._good_numbers: list[Any] | None = None
        self._shape_guards = self._captured.shapes.guards()
        self._dims = [
            (leaf, dim, declared, self._captured.leaf_paths[leaf])
            for leaf, dims in self._captured.dynamic_dims.items()
            for dim, declared in dims.items()
        ]
        self._number_positions = [i for i, s in enumerate(self._captured.inputs) if _is_number_slot(s)]
        self._scaler_state = [
            (scaler, path, _unused(scaler), _scaler_constants(scaler))
            for scaler, path in self._captured.world.scalers.items()
        ]

        self._hook_registries = hook_registries(
            [m for m, _ in self._captured.modules], list(self._captured.world.optimizers)
        )
        self._hook_counts = list(map(len, self._hook_registries))
        self._tensor_hooks = self._tensors_with_hooks()
        self._next_hook = RemovableHandle.next_id
        self._has_hooks = any(self._hook_counts) or bool(self._tensor_hooks)

    def add_conditions_on_sizes(self) -> None:
        """Take over what was assumed of sizes since the capture: lowering compares them too."""
        self._shape_guards = self._captured.shapes.guards()

    def _build_variables(self) -> None:
        lifted = {s.path for s in self._captured.inputs if s.kind is InputKind.HYPER_PARAMETER}
        self._variables = [
            (path, slot, value)
            for path, slot, value in self._captured.world.variables
            if path not in self._captured.rebound_variables and path not in lifted
        ]
        self._reads = [(obj, path, list(values.items())) for obj, path, values in self._captured.reads]
        self._containers = self._captured.containers
        self._identities = [
            (slot, tracked.real)
            for tracked in self._captured.table.tracked.values()
            for slot in (in_users_objects(tracked.slot),)
            if slot.kind is InputKind.PARAMETER and not isinstance(slot, BatchSlot | ModuleSlot)
        ]
        self._kinds = self._captured.kinds
        self._mutable_leaves = [
            (i, skeleton(v)) for i, v in zip(self._fixed_leaves, self._fixed_values, strict=True) if is_mutable_value(v)
        ]
        self._optimizer_attributes: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
        for o, path in self._captured.world.optimizers.items():
            skip = {"state", "param_groups", "step"} | self._captured.volatile.get(id(o), set())
            watched = {k: v for k, v in vars(o).items() if k not in skip and not k.startswith("_")}
            self._optimizer_attributes.append((vars(o), path, watched))

    # Checking.

    def hold(self, leaves: list[Any], structure: Any, state: list[Any]) -> bool:
        """Whether the graph may run. `state` is what `gather` read."""
        if ambient_state() != self._ambient or structure != self._structure:
            return False
        for i, value in zip(self._fixed_leaves, self._fixed_values, strict=True):
            leaf = leaves[i]
            if leaf is not value and not same_plain(leaf, value):
                return False
        try:
            return (
                self._modules_hold()
                and self._state_holds(state)
                and self._grads_hold()
                and [t.real.requires_grad for t in self._unread] == self._requires_grad
                and self._hooks_hold()
                and self._optimizers_hold()
                and self._tensors_hold(leaves, state)
                and self._numbers_hold(state)
                and not any(next(check(leaves), None) for check in self._rare_checks)
            )
        except (RuntimeError, KeyError, TypeError, ValueError):
            # Comparing attributes that are tensors or arrays, or a slot that is gone: another graph.
            return False

    def _modules_hold(self) -> bool:
        if self._watch is not None and self._watch.unchanged():
            return True
        if (
            list(map(len, self._module_dicts)) != self._module_sizes
            or [read(d) for read, d in self._module_readers] != self._module_values
            or self._child_dicts != self._child_before
            or not all(map(is_, [m.get(k) for m, k in self._unread_params], self._unread_objects))
            or list(map(len, self._registered)) != self._registered_counts
        ):
            return False
        self._watch = DictWatch(self._watched)
        return True

    def _state_holds(self, state: list[Any]) -> bool:
        """Parameters are the same objects, and optimizers have state for the same parameters."""
        if self._good_reading == self._gather.reading:
            return True
        if not same_objects(self._pick_params(state), self._read_params) or not self._owners_hold():
            return False
        self._good_reading = self._gather.reading
        return True

    def _owners_hold(self) -> bool:
        for optimizer, _, _, _, owners, sizes in self._optimizers:
            if not same_objects(optimizer.state, owners) or list(map(len, optimizer.state.values())) != sizes:
                return False
        return True

    def _hooks_hold(self) -> bool:
        """Every hook of torch gets a number; while the next one is the same, none was added anywhere."""
        now = RemovableHandle.next_id
        if now == self._next_hook and not self._has_hooks:
            return True
        if list(map(len, self._hook_registries)) != self._hook_counts:
            return False
        if self._tensors_with_hooks() != self._tensor_hooks:
            return False
        self._next_hook = now
        return True

    def _grads_hold(self) -> bool:
        grads = list(map(_grad, self._grad_owners))
        if self._no_grads:
            return grads == self._nones
        return [g is None for g in grads] == self._grad_absent

    def _tensors_with_hooks(self) -> list[int]:
        """Numbers of the parameters that have a hook: nearly always none."""
        found: list[int] = []
        for get in HOOK_ATTRIBUTES:
            hooks = list(map(get, self._grad_owners))
            if hooks != self._nones:
                found += [i for i, registry in enumerate(hooks) if registry]
        return found

    def _tensors_hold(self, leaves: list[Any], state: list[Any]) -> bool:
        if self._tensors is None:
            return True
        if self._checked_reading == self._gather.reading:
            # The same optimizer state as when all were checked; nothing gives it other memory.
            return self._rest.hold(
                [*self._modules_tensors, *self._pick_rest(state), *(leaves[i] for i in self._unused_leaves)]
            )
        tensors = [*self._gather.tensors(state), *(leaves[i] for i in self._unused_leaves)]
        if not self._tensors.hold(tensors):
            return False
        self._checked_reading = self._gather.reading
        self._modules_tensors = self._pick_modules(state)
        return True

    def _optimizers_hold(self) -> bool:
        for optimizer, _, constants, params, _, _ in self._optimizers:
            groups = optimizer.param_groups
            if len(groups) != len(params):
                return False
            for group, known, owned in zip(groups, constants, params, strict=True):
                now = group["params"]
                if len(now) != len(owned) or not all(map(is_, now, owned)):
                    return False
                for key, value in known.items():
                    if skeleton(group.get(key, ABSENT)) != value:
                        return False
        return True

    def _numbers_hold(self, state: list[Any]) -> bool:
        return all(isinstance(state[i], int | float) for i in self._number_positions)

    def _slow_differences(self, leaves: list[Any]) -> Iterator[str]:
        """The rarer conditions; each difference as text."""
        for check in self._rare_checks:
            yield from check(leaves)

    def _attribute_differences(self, leaves: list[Any]) -> Iterator[str]:
        for module, path, volatile, before in self._volatile_modules:
            now = {k: v for k, v in vars(module).items() if k not in volatile}
            if now != {k: v for k, v in before.items() if k not in volatile}:
                yield f"an attribute of {path} changed"
        for buffers, name, path in self._empty_buffers:
            if buffers.get(name) is not None:
                yield f"{path} is no longer None"

    def _variable_differences(self, leaves: list[Any]) -> Iterator[str]:
        for path, slot, value in self._variables:
            now = slot.get()
            if now is not value and not same_plain(now, value):
                yield f"{path} was {_brief(value)} and is {_brief(now)}"

    def _object_differences(self, leaves: list[Any]) -> Iterator[str]:
        for obj, path, values in self._reads:
            attributes = vars(obj)
            for name, value in values:
                now = attributes.get(name, ABSENT)
                if not same_plain(now, value):
                    yield f"{path}.{name} was {_brief(value)} and is {_brief(now)}"

        for obj, path, class_values in self._captured.class_reads:
            for name, value in class_values.items():
                now = getattr(obj, name, ABSENT)
                if not same_plain(now, value):
                    yield f"{path}.{name} was {_brief(value)} and is {_brief(now)}"

    def _optimizer_differences(self, leaves: list[Any]) -> Iterator[str]:
        for attributes, path, before in self._optimizer_attributes:
            for key, value in before.items():
                if attributes.get(key, ABSENT) is not value and not same_plain(attributes.get(key, ABSENT), value):
                    yield f"{path}.{key} was {_brief(value)} and is {_brief(attributes.get(key, ABSENT))}"

    def _kind_differences(self, leaves: list[Any]) -> Iterator[str]:
        for path, (slot, kind) in self._captured.rebound_variables.items():
            if kind_of(slot.get()) != kind:
                yield f"{path} holds another kind of thing"
        for attributes, key, path, kind in self._kinds:
            if kind_of(attributes.get(key, ABSENT)) != kind:
                yield f"{path} holds another kind of thing"

    def _content_differences(self, leaves: list[Any]) -> Iterator[str]:
        for i, contents in self._mutable_leaves:
            if skeleton(leaves[i]) != contents:
                yield f"the contents of {self._captured.leaf_paths[i]} changed"
        for container, path, contents in self._containers:
            if skeleton(container) != contents:
                yield f"the contents of {path} changed"

    def _identity_differences(self, leaves: list[Any]) -> Iterator[str]:
        for slot, real in self._identities:
            if slot.get() is not real:
                yield f"{slot.path} is another tensor"
        for scaler, path, unused, constants in self._scaler_state:
            if _unused(scaler) != unused:
                yield f"{path} has {'' if any(unused) else 'no longer '}been used"
            if _scaler_constants(scaler) != constants:
                yield f"a setting of {path} changed"

    def _leaf_differences(self, leaves: list[Any]) -> Iterator[str]:
        for i, slot in self._leaf_slots:
            if leaves[i] is not slot.get():
                yield f"{self._captured.leaf_paths[i]} is no longer {slot.path}"
        for i in self._leaves_with_grad:
            if leaves[i].is_leaf and leaves[i].grad is not None and not any(i == j for j, _ in self._leaf_slots):
                yield f"{self._captured.leaf_paths[i]}.grad is set"
        for first, second in self._aliases:
            if leaves[first] is not leaves[second]:
                yield f"{self._captured.leaf_paths[first]} and {self._captured.leaf_paths[second]} are two tensors"

    def _scalar_differences(self, leaves: list[Any]) -> Iterator[str]:
        if self._dims:
            sizes = self._check_dims(leaves)
            for text, check in self._shape_guards:
                if not check(sizes):
                    yield f"sizes {sizes} break {text}"
        if self._scalar_guards:
            if self._number_leaves is not None:
                numbers = [slot.get() for slot in self._number_leaves]
                if numbers == self._good_numbers:
                    return
            value = self._leaf_value(leaves)
            memo: dict[int, Any] = {}
            for guard in self._scalar_guards:
                if not guard.holds(value, memo):
                    yield f"{guard.describe()} no longer holds"
                    return
            if self._number_leaves is not None:
                self._good_numbers = numbers

    def _check_dims(self, leaves: list[Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for leaf, dim, declared, path in self._dims:
            size = leaves[leaf].shape[dim]
            if size < declared.min or (declared.max is not None and size > declared.max):
                raise out_of_range(path, dim, size, declared)
        for name, places in self._captured.shapes.sources.items():
            for leaf, dim in places:
                size = leaves[leaf].shape[dim]
                if sizes.setdefault(name, size) != size:
                    raise TypeError("sizes that were equal are not")
        return sizes

    def _leaf_value(self, leaves: list[Any]) -> Callable[[Any], Any]:
        slots = self._captured.placeholder_slots

        def current(node: Any) -> Any:
            slot = slots[node]
            return leaves[slot.index] if isinstance(slot, BatchSlot) else slot.get()

        items = self._items.run(current) if self._items is not None else {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, ItemLeaf):
                found = items[leaf.node]
                return found.item() if isinstance(found, Tensor) else found
            if isinstance(leaf, Slot):
                return leaf.get()
            raise TypeError(f"cannot evaluate {leaf!r}")

        return value

    # Explaining.

    def why_not(self, leaves: list[Any], structure: Any, state: list[Any] | None) -> str:
        """The first difference between this graph's conditions and a call, for people."""
        return next(self._reasons(leaves, structure, state), "a condition that could not be named")

    def changed_number(self) -> str | None:
        """The path of a number that differs: read from a plain object, or counted up by the step on a module."""
        for path, before, now in zip(self._module_paths, self._module_before, self._module_dicts, strict=True):
            for key, value in before.items():
                where = f"{path}.{key}"
                if where in self._counted and type(value) in (int, float) and now.get(key) != value:
                    return where
        for obj, path, values in self._reads:
            for name, value in values:
                if _other_number(vars(obj).get(name, ABSENT), value):
                    return f"{path}.{name}"
        for attributes, path, before in self._optimizer_attributes:
            for key, value in before.items():
                if f"{path}.{key}" in self._counted and _other_number(attributes.get(key, ABSENT), value):
                    return f"{path}.{key}"
        for path, slot, value in self._variables:
            if _other_number(slot.get(), value):
                return path
        return None

    def _reasons(self, leaves: list[Any], structure: Any, state: list[Any] | None) -> Iterator[str]:
        if ambient_state() != self._ambient:
            yield "autocast, grad mode, inference mode or the default dtype is different"
        if structure != self._structure:
            yield "the arguments have another structure"
            return
        for i, value in zip(self._fixed_leaves, self._fixed_values, strict=True):
            if not same_plain(leaves[i], value):
                plain = isinstance(value, int | float | str | bool | type(None))
                was = f"was {value!r} and is {leaves[i]!r}" if plain else "is another object"
                yield f"{self._captured.leaf_paths[i]} {was}"
        for path, before, now in zip(self._module_paths, self._module_before, self._module_dicts, strict=True):
            for key in {**before, **now}:
                old, new = before.get(key, ABSENT), now.get(key, ABSENT)
                if key not in MODULE_INTERNALS and not same_plain(old, new):
                    yield f"{path}.{key} was {_brief(old)} and is {_brief(new)}"
        if self._child_dicts != self._child_before:
            yield "a submodule was replaced, added or removed"
        for path, (mapping, key), real in zip(self._param_paths, self._param_pairs, self._param_objects, strict=True):
            if mapping.get(key) is not real:
                yield f"{path} is another parameter"
        if list(map(len, self._registered)) != self._registered_counts:
            yield "a parameter or buffer was registered or removed"
        for optimizer, path, _constants, params, owners, _sizes in self._optimizers:
            if len(optimizer.param_groups) != len(params):
                yield f"{path} has {len(optimizer.param_groups)} param groups instead of {len(params)}"
            if not same_objects(optimizer.state, owners):
                yield f"{path} has state for {len(optimizer.state)} parameters instead of {len(owners)}"
        if not self._optimizers_hold() or not self._owners_hold():
            yield "an option, a parameter or the state of an optimizer changed"
        for path, owner, absent in zip(self._grad_paths, self._grad_owners, self._grad_absent, strict=True):
            if (owner.grad is None) != absent:
                yield f"{path}.grad is {'set' if absent else 'None'}"
        for tracked, required in zip(self._unread, self._requires_grad, strict=True):
            if tracked.real.requires_grad != required:
                yield f"{tracked.slot.path}.requires_grad is {not required}"
        if list(map(len, self._hook_registries)) != self._hook_counts or (
            self._tensors_with_hooks() != self._tensor_hooks
        ):
            yield "a hook was added or removed"
        if state is None:
            yield "some state that the graph reads is gone"
            return
        if not self._tensors_hold(leaves, state) and self._tensors is not None:
            tensors = [*self._gather.tensors(state), *(leaves[i] for i in self._unused_leaves)]
            yield self._tensors.explain(tensors)
        yield from self._slow_differences(leaves)


def _reader(keys: list[str]) -> Callable[[dict[str, Any]], Any]:
    """Reads some attributes at once."""
    return itemgetter(*keys) if keys else len


def _other_number(now: Any, value: Any) -> bool:
    return type(now) is type(value) and type(now) in (int, float) and not same_plain(now, value)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value)[:80] if isinstance(value, PLAIN) or value is ABSENT else f"a {type(value).__name__}"


def _is_number_slot(slot: Slot) -> bool:
    return not isinstance(slot, BatchSlot | GeneratorSlot) and isinstance(slot.get(), int | float)


def _unused(scaler: Any) -> tuple[bool, ...]:
    """Which tensors of a GradScaler do not exist yet."""
    return tuple(vars(scaler).get(name) is None for name in SCALER_TENSORS)


def _scaler_constants(scaler: Any) -> tuple[Any, ...]:
    return tuple(vars(scaler).get(name) for name in SCALER_SETTINGS)


def _aliased_leaves(captured: Captured) -> list[tuple[int, int]]:
    """Argument leaves that were one tensor object at capture."""
    first: dict[int, int] = {}
    pairs = []
    for i, leaf in enumerate(captured.leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) in first:
                pairs.append((first[id(leaf)], i))
            first.setdefault(id(leaf), i)
    return pairs
