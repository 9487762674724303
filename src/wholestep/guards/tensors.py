"""Guards on tensors: the inputs of the graph exist, and tensors have the same metadata and the same Python attributes
(`p.no_decay = True`) as at capture; and guards on what autograd attaches to parameters: gradients, `requires_grad`,
hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wholestep.guards.guard import Call, Guard, PerItemGuard, change_text, is_other_scalar
from wholestep.ir.captured_step import GuardSpecs, TensorAttributesSpec
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import same_plain
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot, ComputedSlot, GeneratorSlot, LocalSlot, ModuleSlot, Slot
from wholestep.runtime.executor import Gather, picker
from wholestep.torch_private.autograd import HOOK_ATTRIBUTES
from wholestep.torch_private.guard_checks import DictWatch, TensorChecks
from wholestep.torch_private.modules_and_optimizers import hook_registries

_NUMBER = (int, float)


class InputsExist(Guard):
    """All inputs exist, and scalar inputs are still scalars."""

    def __init__(self, inputs: Sequence[Slot]) -> None:
        self._numbers = [(i, slot.path) for i, slot in enumerate(inputs) if _is_number(slot)]
        self._indices = [i for i, _ in self._numbers]

    def holds(self, call: Call) -> bool:
        state = call.state
        return state is not None and all(isinstance(state[i], _NUMBER) for i in self._indices)

    def reasons(self, call: Call) -> Iterator[str]:
        if call.state is None:
            yield "some state that the graph reads no longer exists"
            return
        for i, path in self._numbers:
            if not isinstance(call.state[i], _NUMBER):
                yield f"{path} is no longer a number"


class SameMetadata(Guard):
    """Tensors have the same type, dtype, device, sizes, strides and `requires_grad`."""

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
        self._passed_version = -1
        """`Gather.version` when all tensors were last checked and held."""
        self._modules_tensors: list[Any] = []

    def is_needed(self) -> bool:
        return self._count > 0

    def holds(self, call: Call) -> bool:
        assert call.state is not None
        if self._passed_version == self._gather.version:
            # The optimizer state is the state that was checked; its tensors keep their metadata.
            leaves = call.leaves
            return self._rest.hold(
                [*self._modules_tensors, *self._pick_others(call.state), *(leaves[i] for i in self._unused)]
            )
        if not self._all.hold(self._tensors(call)):
            return False
        self._passed_version = self._gather.version
        self._modules_tensors = self._pick_modules(call.state)
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        if not self.holds(call):
            yield self._all.explain(self._tensors(call))

    def _tensors(self, call: Call) -> list[Any]:
        assert call.state is not None
        return [*self._gather.tensors(call.state), *(call.leaves[i] for i in self._unused)]


def _unused_leaves(specs: GuardSpecs, gather: Gather) -> list[int]:
    """Tensors among the arguments that are not inputs of the graph; of a tensor that occurs twice, the first."""
    read = {s.index for s in gather.tensor_slots if isinstance(s, BatchSlot)}
    found = []
    for i, slot in enumerate(specs.arguments.slots):
        if isinstance(slot, BatchSlot) and slot.index == i and i not in read:
            found.append(i)
    return found


def _is_number(slot: Slot) -> bool:
    return not isinstance(slot, BatchSlot | GeneratorSlot | ComputedSlot) and isinstance(slot.get(), _NUMBER)


class SameTensorAttributes(Guard):
    """Tensors have the same Python attributes; checked again only after one was set."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._tensors = [(own, vars(own.real)) for own in specs.tensor_attributes if own.real is not None]
        self._batch = [own for own in specs.tensor_attributes if own.real is None]
        self._watch: DictWatch | None = None

    def is_needed(self) -> bool:
        return bool(self._tensors or self._batch)

    def holds(self, call: Call) -> bool:
        if self._batch and next(self._in_batch(call), None) is not None:
            return False
        if self._watch is not None and self._watch.unchanged():
            return True
        if any(next(_differences(own, now), None) is not None for own, now in self._tensors):
            return False
        self._watch = DictWatch([now for _, now in self._tensors])
        return True

    def _in_batch(self, call: Call) -> Iterator[tuple[str, Any, Any]]:
        for own in self._batch:
            assert isinstance(own.slot, BatchSlot)
            yield from _differences(own, vars(call.leaves[own.slot.index]))

    def _changed(self, call: Call) -> Iterator[tuple[str, Any, Any]]:
        yield from self._in_batch(call)
        for own, now in self._tensors:
            yield from _differences(own, now)

    def reasons(self, call: Call) -> Iterator[str]:
        return (change_text(path, before, now) for path, before, now in self._changed(call))

    def changed_scalars(self, call: Call) -> Iterator[str]:
        for path, before, now in self._changed(call):
            if is_other_scalar(now, before):
                yield path


def _differences(own: TensorAttributesSpec, now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Attributes that changed: path, value at capture, value now."""
    before = own.before
    if not before and not now:
        return
    for key in {**before, **now}:
        old, new = before.get(key, ABSENT), now.get(key, ABSENT)
        if same_plain(new, old) or (isinstance(old, Tensor) and isinstance(new, Tensor)):
            continue
        if key in own.set_by_step and type(old) is type(new):
            continue
        yield f"{own.slot.path}.{key}", old, new


_grad = attrgetter("grad")


class SameGradients(Guard):
    """The parameters that had a gradient have one; the others have None."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._owners = [parameter for parameter, _ in specs.parameters]
        self._paths = [slot.path for _, slot in specs.parameters]
        self._absent = [owner.grad is None for owner in self._owners]
        self._none_there = [None] * len(self._owners) if all(self._absent) else None

    def holds(self, call: Call) -> bool:
        grads = list(map(_grad, self._owners))
        if self._none_there is not None:
            return grads == self._none_there
        return [grad is None for grad in grads] == self._absent

    def reasons(self, call: Call) -> Iterator[str]:
        for path, owner, absent in zip(self._paths, self._owners, self._absent, strict=True):
            if (owner.grad is None) != absent:
                yield f"{path}.grad is {'set' if absent else 'None'}"


class SameRequiresGrad(PerItemGuard):
    """`requires_grad` is the same for parameters that are not inputs of the graph (`SameMetadata` checks inputs)."""

    def __init__(self, specs: GuardSpecs, gather: Gather) -> None:
        checked = {id(slot) for slot in gather.tensor_slots}
        self._parameters = [
            (parameter, parameter.requires_grad, slot.path)
            for parameter, slot in specs.parameters
            if id(slot) not in checked or isinstance(slot, LocalSlot)
        ]
        super().__init__(self._parameters)

    def reasons(self, call: Call) -> Iterator[str]:
        for parameter, required, path in self._parameters:
            if parameter.requires_grad != required:
                yield f"{path}.requires_grad is {not required}"


class SameHooks(Guard):
    """No hook was added to or removed from modules, optimizers and parameters.

    torch numbers its hooks: while the next number is the same, no hook was added anywhere.
    """

    def __init__(self, specs: GuardSpecs) -> None:
        self._owners = [parameter for parameter, _ in specs.parameters]
        self._nones = [None] * len(self._owners)
        self._registries = hook_registries([m for m, _ in specs.modules], list(specs.optimizers))
        self._hooks = [list(registry.values()) for registry in self._registries]
        self._on_tensors = self._tensors_with_hooks()
        self._next = RemovableHandle.next_id
        self._has_hooks = any(self._hooks) or bool(self._on_tensors)

    def holds(self, call: Call) -> bool:
        next_id = RemovableHandle.next_id
        if next_id == self._next and not self._has_hooks:
            return True
        if not self._same_hooks():
            return False
        self._next = next_id
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        if not self._same_hooks():
            yield "a hook was added or removed"

    def _same_hooks(self) -> bool:
        same = all(map(_same_objects, self._registries, self._hooks))
        on_tensors = self._tensors_with_hooks()
        return same and len(on_tensors) == len(self._on_tensors) and all(map(_same, on_tensors, self._on_tensors))

    def _tensors_with_hooks(self) -> list[tuple[int, Any]]:
        """The hooks of parameters, each with the index of its parameter: nearly always none."""
        found: list[tuple[int, Any]] = []
        for get in HOOK_ATTRIBUTES:
            hooks = list(map(get, self._owners))
            if hooks != self._nones:
                found += [(i, hook) for i, registry in enumerate(hooks) if registry for hook in registry.values()]
        return found


def _same_objects(registry: Any, hooks: list[Any]) -> bool:
    return len(registry) == len(hooks) and all(map(is_, registry.values(), hooks))


def _same(one: tuple[int, Any], other: tuple[int, Any]) -> bool:
    return one[0] == other[0] and one[1] is other[1]
