"""The user's state, replaced by fakes while a step is traced, and restored whatever happens.

Every tensor that the step can change is replaced where user code reads it: in modules, in the groups and the state of
optimizers, in `param.grad`, in scalers, in closures. Numbers in param groups and in optimizer state become symbolic
scalars. `restore` runs the undo list backwards; until then nothing of the user's is written.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.capture.objects.discover import World, owns
from wholestep.capture.objects.identities import swap_id, swap_keys, swap_type
from wholestep.capture.objects.tensor_attributes import TensorAttributes
from wholestep.capture.python_reads.stand_ins import with_parts
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import CapturedTensorError, UnsupportedError
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import (
    OwnerSlot,
    copy_nest,
    is_nest,
    map_leaves,
    mutable_nests,
    nested_slot,
    refuse_sets_of_tensors,
    structure_of,
)
from wholestep.ir.user_objects.slots import (
    CellSlot,
    FixedSlot,
    GradSlot,
    GroupParamSlot,
    HyperSlot,
    LocalSlot,
    MappingSlot,
    ModuleSlot,
    OptimizerStateSlot,
    SequenceSlot,
    Slot,
    in_users_objects,
)
from wholestep.ir.user_objects.wrapper_tensors import is_wrapper
from wholestep.torch_private.autograd import is_transformed
from wholestep.torch_private.distributed import dtensor_over, is_dtensor, local_of, spec_of
from wholestep.torch_private.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    mark_parameter,
    new_fake,
    overrides_functions,
    take_class,
)
from wholestep.torch_private.modules_and_optimizers import SCALER_NUMBERS, SCALER_TENSORS

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
MakeScalar = Callable[[Slot, Any], Any]
"""Makes a number in a slot the SymFloat or SymInt that the step sees."""


@dataclass(eq=False)
class Tracked:
    """One tensor of the user's and its fake."""

    real: Tensor
    fake: Tensor
    slot: Slot

    @property
    def input(self) -> Tensor:
        """The fake that is the graph's input: the local shard of a DTensor."""
        found: Tensor = local_of(self.fake)
        return found


@dataclass(eq=False)
class GroupShape:
    """A param group at capture: its parameters, the numbers that became inputs, and all other values."""

    params: list[Tensor]
    options: frozenset[str]
    """Keys of the group, `params` among them."""
    constants: dict[str, Any]
    numbers: dict[str, Any] = field(default_factory=dict)


class StateTable:
    """All state that a step works on, real and fake side by side."""

    def __init__(
        self,
        world: World,
        fake_mode: FakeTensorMode,
        make_scalar: MakeScalar,
        lift_number: MakeScalar,
        lifts: Callable[[str], bool],
    ) -> None:
        self.world = world
        self.tracked: dict[int, Tracked] = {}
        """By identity of the real tensor."""
        self.by_fake: dict[int, Tracked] = {}
        self.groups: dict[Optimizer, list[GroupShape]] = {}
        self.structures: list[tuple[Slot, Any]] = []
        """Values in optimizers that are neither a tensor nor a number, with what a guard compares."""
        self.same_tensors: list[tuple[Slot, Slot]] = []
        """Places that hold a tensor which was found elsewhere before."""
        self.shared: dict[str, str] = {}
        """Paths of lists and dicts in optimizers that are one object, each with another path of it."""
        self._containers: dict[int, str] = {}
        self.fake_groups: dict[Optimizer, list[dict[str, Any]]] = {}
        self.fake_state_before: dict[Optimizer, dict[Any, Any]] = {}
        self.parameters: list[Tracked] = []
        self.module_slots: list[tuple[ModuleSlot, Tracked]] = []
        self._frozen_wrappers: list[tuple[ModuleSlot, Any]] = []
        """Frozen weights of modules that are made of other tensors (quantized ones), with one made of fakes."""
        self._group_fakes: dict[int, tuple[GroupShape, dict[str, Any]]] = {}
        """By identity of a real param group: a wrapper may share those of the optimizer inside of it."""
        self._state_fakes: dict[int, dict[Any, dict[Any, Any]]] = {}
        """By identity of the real `optimizer.state`."""
        self._list_fakes: dict[int, list[dict[str, Any]]] = {}
        """By identity of the real `optimizer.param_groups`."""
        self.swapped_containers: list[Any] = []
        """Param groups and their lists: the step saw nothing but their fakes."""
        self._real_containers: dict[int, Any] = {}
        """By identity of the fake."""
        self.filled_in_place: set[int] = set()
        """Identities of lists of param groups that hold the fakes themselves while a step is traced."""
        self.in_tuples: list[tuple[Optimizer, int]] = []
        """Param groups that something holds where no fake can be put."""
        self._mode = fake_mode
        self._make_scalar = make_scalar
        self._lift_number = lift_number
        self._lifts = lifts
        self._undo: list[Callable[[], None]] = []
        self._wholes: dict[int, tuple[Any, Any]] = {}
        """Tuples of the user's by identity: one of fakes, and itself."""
        self._real_wholes: dict[int, Any] = {}
        """Tuples of the user's by the identity of those of fakes."""
        self.attributes = TensorAttributes(world, lifts, lift_number)

    def build(self) -> None:
        """Make a fake for every tensor of modules, optimizers and scalers."""
        for module, path in self.world.modules.items():
            for name, param in module._parameters.items():
                if param is not None:
                    self._module_tensor(module, "_parameters", name, param, InputKind.PARAMETER, path)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._module_tensor(module, "_buffers", name, buffer, InputKind.BUFFER, path)
        for optimizer, path in self.world.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    if id(param) not in self.tracked:
                        found = self.world.tensors.get(id(param))
                        where = f"{path}.param_groups[{g}].params[{i}]"
                        slot = (
                            found[1] if found else GroupParamSlot(InputKind.PARAMETER, where, None, group["params"], i)
                        )
                        self._track(param, _as_kind(slot, InputKind.PARAMETER))
        for real, slot in self.world.tensors.values():
            if real.requires_grad and id(real) not in self.tracked and real.is_leaf:
                self._track(real, _as_kind(slot, InputKind.PARAMETER))
        for tracked in list(self.tracked.values()):
            if tracked.slot.kind is InputKind.PARAMETER:
                self.parameters.append(tracked)

    def _module_tensor(
        self, module: nn.Module, where: str, name: str, real: Tensor, kind: InputKind, path: str
    ) -> None:
        slot = ModuleSlot(kind, f"{path}.{name}", None, getattr(module, where), name, module)
        if is_wrapper(real) and not real.requires_grad:
            self._frozen_wrappers.append((slot, self._fake_wrapper(real, slot)))
            return
        tracked = self.tracked.get(id(real)) or self._track(real, slot)
        self.module_slots.append((slot, tracked))

    def _fake_wrapper(self, real: Tensor, slot: Slot) -> Any:
        inside = replace(slot, kind=InputKind.BUFFER)
        self.structures.append((slot, structure_of(real)))
        fake = map_leaves(real, lambda leaf, keys: self._fake_leaf(leaf, nested_slot(inside, keys)))
        if isinstance(real, nn.Parameter):
            mark_parameter(fake)
        return fake

    def _track(self, real: Tensor, slot: Slot) -> Tracked:
        self.refuse_unsupported_tensor(local_of(real), slot.path)
        fake = new_fake(self._mode, local_of(real))
        if is_dtensor(real):
            slot = LocalSlot(slot.kind, slot.path, slot.of, slot, spec_of(real))
            fake = dtensor_over(fake, slot.spec)
        elif type(real) not in _PLAIN:
            take_class(fake, type(real))
        if isinstance(real, nn.Parameter):
            mark_parameter(fake)
        if real.requires_grad and real.is_leaf:
            fake.requires_grad_(True)
        tracked = Tracked(real, fake, slot)
        self.tracked[id(real)] = tracked
        self.by_fake[id(fake)] = self.by_fake[id(tracked.input)] = tracked
        self.attributes.copy(tracked)
        return tracked

    def track_input(self, real: Tensor, slot: Slot, fake: Tensor | None = None) -> Tracked:
        """Make a batch leaf or a captured tensor an input."""
        if fake is None:
            return self._track(real, slot)
        if real.requires_grad and real.is_leaf:
            fake.requires_grad_(True)
        tracked = Tracked(real, fake, slot)
        self.tracked[id(real)] = tracked
        self.by_fake[id(fake)] = tracked
        self.attributes.copy(tracked)
        return tracked

    @staticmethod
    def refuse_unsupported_tensor(real: Tensor, path: str) -> None:
        """Only plain strided tensors are captured."""
        kind = type(real)
        if nn.parameter.is_lazy(real):
            raise UnsupportedError(
                f"{path} has no shape yet: its module is lazy.", fix="call the model once before the step."
            )
        if kind not in _PLAIN and (
            kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or overrides_functions(kind)
        ):
            raise UnsupportedError(
                f"{path} is a {kind.__name__}; tensor subclasses are not captured.",
                fix="pass a plain tensor: x.as_subclass(torch.Tensor) (for DTensor, use the parallel= option).",
            )
        if is_transformed(real):
            raise UnsupportedError(
                f"{path} belongs to a torch.func transform that surrounds the call.",
                fix="call the step outside of it; torch.vmap, grad and jvp inside of a step are captured.",
            )
        if real.is_nested or real.layout is not torch.strided:
            layout = "nested" if real.is_nested else str(real.layout)
            raise UnsupportedError(f"{path} is a {layout} tensor.", fix="make it dense before the step.")
        if real.device.type == "meta":
            raise UnsupportedError(
                f"{path} has no data (it is on the meta device).", fix="materialise the model first."
            )
        if real.requires_grad and not real.is_leaf:
            raise CapturedTensorError(
                f"{path} was computed outside of the step and carries an autograd history.",
                fix="compute it inside of the step, or detach() it.",
            )

    def swap_in(self) -> None:
        """Put the fakes in the places that user code reads."""
        self._undo.append(self.attributes.follow_real(self.tracked))
        for slot, tracked in self.module_slots:
            self._swap(slot, tracked.fake)
        for weight, wrapper in self._frozen_wrappers:
            self._swap(weight, wrapper)
        for real, other in self.world.other_slots:
            if id(real) in self.tracked and not isinstance(other, FixedSlot):
                self._swap(other, self.tracked[id(real)].fake)
        for tracked in self.parameters:
            if not isinstance(in_users_objects(tracked.slot), ModuleSlot | FixedSlot | GroupParamSlot):
                self._swap(in_users_objects(tracked.slot), tracked.fake)
            self._grad(tracked)
        for optimizer, path in self.world.optimizers.items():
            self._swap_optimizer(optimizer, path)
        for wrapper, path in self.world.wrappers:
            self._swap_wrapper(wrapper, path)
        for container, _ in self.world.containers:
            undo = swap_keys(container, lambda real: self.tracked[id(real)].fake if id(real) in self.tracked else real)
            if undo is not None:
                self._undo.append(undo)
        for place, whole in self.world.immutables:
            self._swap_parts(place, whole)
        if self.world.asks_for_ids:
            self._undo.append(swap_id(list(self.world.asks_for_ids.values()), self.real_of))
        if self.world.asks_for_types:
            self._undo.append(swap_type(list(self.world.asks_for_types.values()), self.kind_of))
        for scaler, path in self.world.scalers.items():
            for attr in SCALER_TENSORS:
                real = vars(scaler).get(attr)
                if isinstance(real, Tensor):
                    where = MappingSlot(InputKind.SCALER_STATE, f"{path}.{attr}", None, vars(scaler), attr)
                    self._swap(where, self._track(real, where).fake)
            for attr in SCALER_NUMBERS:
                number = vars(scaler).get(attr)
                if type(number) in (int, float):
                    where = MappingSlot(InputKind.HYPER_PARAMETER, f"{path}.{attr}", None, vars(scaler), attr)
                    self._swap(where, self._make_scalar(where, number))

    def real_of(self, value: Any) -> Any:
        """The user's tensor for a fake; any other value itself."""
        tracked = self.by_fake.get(id(value))
        return tracked.real if tracked is not None and value is tracked.fake else value

    def _swap_parts(self, slot: Slot, whole: Any) -> None:
        """Put a tuple of fakes in the place of a tuple of tensors."""
        fakes = self._wholes.get(id(whole))
        if fakes is None:
            made = with_parts(whole, lambda part: self.tracked[id(part)].fake if id(part) in self.tracked else part)
            fakes = self._wholes[id(whole)] = made, whole
            self._real_wholes[id(made)] = whole
        if fakes[0] is not whole and slot.get() is whole:
            self._swap(slot, fakes[0])

    def whole_of(self, value: Any) -> Any:
        """The user's tuple that a tuple of fakes stands for; anything else is itself."""
        return self._real_wholes.get(id(value), value)

    def kind_of(self, value: Any) -> type:
        """The type that a value has in eager."""
        real = self.real_of(value)
        if real is value and isinstance(value, FakeTensor):
            return nn.Parameter if isinstance(value, nn.Parameter) else Tensor
        return type(real) if scalar_of(value) is None else value.__class__  # symbolic scalars report int or float

    def note_same(self, slot: Slot, tracked: Tracked) -> None:
        """The graph assumes that a place holds the tensor of another one."""
        self.same_tensors.append((slot, in_users_objects(tracked.slot)))

    def remove_hooks(self, hooks: list[tuple[dict[Any, Any], Any]]) -> None:
        """Remove entries from registries of hooks; `restore` puts the registries back."""
        for registry, key in hooks:
            before = dict(registry)
            del registry[key]

            def undo(registry: dict[Any, Any] = registry, before: dict[Any, Any] = before) -> None:
                registry.clear()
                registry.update(before)

            self._undo.append(undo)

    def restore(self) -> None:
        """Undo all replacements."""
        while self._undo:
            self._undo.pop()()

    def release(self, kind: type[Slot]) -> None:
        """Drop the tensors of one kind of slot."""
        self.tracked = {key: t for key, t in self.tracked.items() if not isinstance(t.slot, kind)}
        self.by_fake = {}

    def release_fakes(self) -> None:
        """Drop what only the trace needed."""
        self.by_fake, self.fake_groups, self.fake_state_before = {}, {}, {}
        self._wholes, self._real_wholes = {}, {}
        self._group_fakes, self._state_fakes, self._list_fakes, self._real_containers = {}, {}, {}, {}

    def _swap(self, slot: Slot, fake: Any) -> None:
        before = slot.get()
        slot.set(fake)
        self._undo.append(lambda: slot.set(before))

    def _grad(self, tracked: Tracked) -> None:
        grad = tracked.real.grad
        if grad is None:
            return
        slot = GradSlot(InputKind.GRADIENT, f"{tracked.slot.path}.grad", tracked.slot.path, tracked.real)
        found = self.tracked.get(id(grad))
        if found is None:
            found = self._track(grad, slot)
        else:
            self.note_same(slot, found)
        tracked.fake.grad = found.fake

    def _swap_optimizer(self, optimizer: Optimizer, path: str) -> None:
        real_groups, real_state = optimizer.param_groups, optimizer.state
        for g, group in enumerate(real_groups):
            if id(group) not in self._group_fakes:
                self._group_fakes[id(group)] = self._fake_group(optimizer, path, g, group)
        self.groups[optimizer] = [self._group_fakes[id(group)][0] for group in real_groups]
        fake_groups = [self._group_fakes[id(group)][1] for group in real_groups]
        fake_groups = self._list_fakes.setdefault(id(real_groups), fake_groups)
        self.fake_groups[optimizer] = copy_nest(fake_groups)
        fake_state = self._state_fakes.get(id(real_state))
        if fake_state is None:
            fake_state = self._state_fakes[id(real_state)] = self._fake_state(optimizer, path)
        self.fake_state_before[optimizer] = copy_nest(dict(fake_state))
        vars(optimizer)["param_groups"] = fake_groups
        vars(optimizer)["state"] = fake_state

        def undo() -> None:
            vars(optimizer)["param_groups"] = real_groups
            vars(optimizer)["state"] = real_state

        self._undo.append(undo)
        groups = list(zip(real_groups, fake_groups, strict=True))
        for real, fake in ((real_groups, fake_groups), *groups):
            self._swap_places(real, fake, real_groups)
        swapped = set(map(id, self.swapped_containers))
        self.in_tuples += [(optimizer, g) for g, (group, _) in enumerate(groups) if id(group) not in swapped]

    def _swap_places(self, real: Any, fake: Any, groups: list[Any]) -> None:
        """Put the fake also into other places that hold it (`self.param_groups = optimizer.param_groups`)."""
        places = [s for s in self.world.places.get(id(real), ()) if getattr(s, "sequence", None) is not groups]
        settable = [s for s in places if isinstance(s, MappingSlot | SequenceSlot | CellSlot) and s.get() is real]
        self._real_containers[id(fake)] = real
        for slot in settable:
            self._swap(slot, fake)
        if len(settable) == len(places):
            self.swapped_containers.append(real)
        elif isinstance(real, list):  # a tuple holds it, or a default argument
            self._undo.append(partial(real.__setitem__, slice(None), list(real)))
            real[:] = fake
            self.swapped_containers.append(real)
            self.filled_in_place.add(id(real))

    def is_of_optimizer(self, container: Any) -> bool:
        """Whether a list or dict is the fake of a param group or of a list of them: `collect` reads what changed."""
        return id(container) in self._real_containers

    def real_container(self, value: Any) -> Any:
        """The user's list or dict for the fake of it; any other value itself."""
        return self._real_containers.get(id(value), value)

    def _swap_wrapper(self, wrapper: Optimizer, path: str) -> None:
        """An optimizer without state of its own may still hold the list of groups of the one that it wraps."""
        if not owns(wrapper, "param_groups"):
            return
        groups = self._list_fakes.get(id(wrapper.param_groups))
        if groups is None:
            raise UnsupportedError(
                f"{path} has param groups of its own and takes its state from elsewhere.",
                fix="share the list of the optimizer inside: self.param_groups = inner.param_groups.",
            )
        slot = MappingSlot(InputKind.HYPER_PARAMETER, f"{path}.param_groups", None, vars(wrapper), "param_groups")
        self._swap(slot, groups)

    def _fake_group(
        self, optimizer: Optimizer, path: str, g: int, group: dict[str, Any]
    ) -> tuple[GroupShape, dict[str, Any]]:
        # A list of parameters that an attribute shares with a group holds their fakes already.
        tracked = [self.tracked.get(id(p)) or self.by_fake[id(p)] for p in group["params"]]
        shape = GroupShape([t.real for t in tracked], frozenset(group), {})
        fake_group: dict[str, Any] = {"params": [t.fake for t in tracked]}
        for key, value in group.items():
            if key != "params":
                fake_group[key] = self._hyper(optimizer, path, g, key, value, shape)
        return shape, fake_group

    def _hyper(self, optimizer: Optimizer, path: str, g: int, key: str, value: Any, shape: GroupShape) -> Any:
        where = f"{path}.param_groups[{g}].{key}"
        self._note_containers(value, where)
        if isinstance(value, Tensor):
            slot = HyperSlot(InputKind.HYPER_PARAMETER, where, None, optimizer, g, key, None)
            found = self.tracked.get(id(value)) or self._track(value, slot)
            shape.numbers[key] = value
            return found.fake
        if _is_number(value) and (isinstance(value, float) or key in _FLOAT_LIKE):
            shape.numbers[key] = value
            slot = HyperSlot(InputKind.HYPER_PARAMETER, where, None, optimizer, g, key, None)
            return self._make_scalar(slot, value)
        if type(value) is int and self._lifts(where):
            shape.numbers[key] = value
            slot = HyperSlot(InputKind.HYPER_PARAMETER, where, None, optimizer, g, key, None)
            return self._lift_number(slot, value)
        if type(value) in (tuple, list) and any(isinstance(v, float | Tensor) for v in value):
            shape.numbers[key] = value
            items = []
            for i, item in enumerate(value):
                slot = HyperSlot(InputKind.HYPER_PARAMETER, f"{where}[{i}]", None, optimizer, g, key, i)
                if isinstance(item, Tensor):
                    items.append((self.tracked.get(id(item)) or self._track(item, slot)).fake)
                else:
                    items.append(self._make_scalar(slot, item) if _is_number(item) else item)
            return type(value)(items)
        shape.constants[key] = value
        return copy_nest(value)

    def _note_containers(self, value: Any, path: str) -> None:
        for container in mutable_nests(value):
            other = self._containers.setdefault(id(container), path)
            if other != path:
                self.shared[path], self.shared[other] = other, path

    def _fake_state(self, optimizer: Optimizer, path: str) -> dict[Any, Any]:
        fake_state: dict[Any, Any] = defaultdict(dict)
        for owner, entries in optimizer.state.items():
            tracked = self.owner_of(owner)
            owner_path = tracked.slot.path if tracked else str(owner)
            of = owner_path if tracked else None
            where = f"{path}.state[{owner_path}]"
            if isinstance(entries, dict):
                fake_entries: dict[Any, Any] = copy.copy(entries)
                for name, value in entries.items():
                    slot: Slot = OptimizerStateSlot(
                        InputKind.OPTIMIZER_STATE, f"{where}.{name}", of, optimizer, owner, name
                    )
                    fake_entries[name] = self._fake_value(value, slot)
            else:
                slot = OwnerSlot(InputKind.OPTIMIZER_STATE, where, of, optimizer, owner)
                fake_entries = self._fake_value(entries, slot)
            fake_state[self._fake_owner(owner, tracked)] = fake_entries
        return fake_state

    def owner_of(self, owner: Any) -> Tracked | None:
        """The parameter that a key of `optimizer.state` stands for: the parameter itself or its `id`, real or fake."""
        key = owner if type(owner) is int else id(owner)
        return self.tracked.get(key) or self.by_fake.get(key)

    @staticmethod
    def _fake_owner(owner: Any, tracked: Tracked | None) -> Any:
        # `id(p)` in the optimizer's code is that of the real tensor (`swap_id`).
        return owner if tracked is None or type(owner) is int else tracked.fake

    def _fake_value(self, value: Any, slot: Slot) -> Any:
        """What the step sees of one value in optimizer state."""
        self._note_containers(value, slot.path)
        if is_nest(value) or (not isinstance(value, Tensor) and type(value) not in (int, float)):
            refuse_sets_of_tensors(value, slot.path)
            self.structures.append((slot, structure_of(value)))
        return map_leaves(value, lambda leaf, keys: self._fake_leaf(leaf, nested_slot(slot, keys)))

    def _fake_leaf(self, value: Any, slot: Slot) -> Any:
        if isinstance(value, Tensor):
            found = self.tracked.get(id(value))
            if found is None:
                return self._track(value, slot).fake
            self.note_same(slot, found)
            return found.fake
        if type(value) in (int, float):
            return self._make_scalar(slot, value)
        return value


_FLOAT_LIKE = frozenset({"lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "rho", "lambd", "lr_decay"})
"""Hyper-parameters that are floats even where the user wrote an int."""


def _is_number(value: Any) -> bool:
    """A float (numpy's too) or an int; not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_kind(slot: Slot, kind: InputKind) -> Slot:
    return replace(slot, kind=kind)
