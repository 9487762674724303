"""What the step left in gradients, optimizers and gradient scalers: bound after the graph ran, or refused.

Containers of an optimizer: where only leaves differ, each of these is set in place. Where the structure differs (a
deque that grew, a list that was created) a replay builds new containers and sets all their leaves.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep.capture.objects.swapped_state import StateTable, Tracked
from wholestep.capture.results.bindings import PLAIN_CONSTANTS, Bindings
from wholestep.capture.results.effect_line import Effect
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import ParameterDataError, SideEffectError, UnsupportedError
from wholestep.ir.captured_step import Change
from wholestep.ir.deferred import HostLeaf
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.user_objects.plain_contents import (
    NESTS,
    FreshContainersSlot,
    OwnerSlot,
    is_nest,
    leaves,
    map_leaves,
    mutable_nests,
    nested_slot,
    same_plain,
    structure_of,
)
from wholestep.ir.user_objects.slots import (
    ABSENT,
    Absent,
    BatchAttributeSlot,
    BatchSlot,
    GradSlot,
    HyperSlot,
    MappingSlot,
    OptimizerStateSlot,
    Slot,
)
from wholestep.ir.user_objects.wrapper_tensors import form_of, is_wrapper
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.modules_and_optimizers import SCALER_TENSORS

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture


def bind_changed_state(capture: Capture, bindings: Bindings) -> None:
    """Bind the tensors and numbers that the step set in gradients, optimizers and gradient scalers."""
    _forms(capture, bindings)
    _requires_grad(capture.table, bindings)
    _gradients(capture.table, bindings)
    seen: set[int] = set()
    """Of state and groups that a wrapper shares with the optimizer inside of it, by identity."""
    for optimizer, path in capture.world.optimizers.items():
        if id(optimizer.state) not in seen:
            _optimizer_state(capture, bindings, optimizer, path)
        if id(optimizer.param_groups) not in seen:
            _param_groups(capture, bindings, optimizer, path)
        seen |= {id(optimizer.state), id(optimizer.param_groups)}
    for scaler, path in capture.world.scalers.items():
        for name in SCALER_TENSORS:
            now = vars(scaler).get(name)
            if isinstance(now, FakeTensor) and id(now) not in capture.table.by_fake:
                slot = MappingSlot(InputKind.SCALER_STATE, f"{path}.{name}", None, vars(scaler), name)
                bindings.bind(slot, now, created=True)


def _forms(capture: Capture, bindings: Bindings) -> None:
    """An argument whose sizes or strides the step changes in place (`x.unsqueeze_(0)`) has them after each run. State
    is refused."""
    for tracked in list(capture.table.tracked.values()):
        fake, slot = tracked.input, tracked.slot
        form, before = (tuple(fake.shape), fake.stride()), local_of(tracked.real)
        if id(fake) not in capture.recorder.reshaped:
            continue
        capture.table.by_fake[id(capture.recorder.as_input(fake))] = tracked  # the placeholder has the former form
        if form == (tuple(before.shape), before.stride()):
            continue
        if not isinstance(slot, BatchSlot) or not all(type(size) is int for size in (*form[0], *form[1])):
            raise SideEffectError(
                f"the step changes sizes or strides of {slot.path} in place ({form[0]}); a replay would not.",
                fix="make a view: x.t(), x.unsqueeze(0), x.squeeze().",
                location=capture.recorder.reshaped[id(fake)][1],
            )
        where = BatchAttributeSlot(slot.kind, f"the form of {slot.path}", slot.path, slot.index, "form")
        bindings.changes.append(Change(ChangeKind.CONSTANT, where, constant=form))


def _requires_grad(table: StateTable, bindings: Bindings) -> None:
    """An argument that the step leaves requiring grad does so after each run; the same of state is refused."""
    for tracked in table.tracked.values():
        now = tracked.fake.requires_grad
        if now == tracked.real.requires_grad or not tracked.fake.is_leaf:
            continue
        slot = tracked.slot
        if isinstance(slot, BatchSlot):
            where = BatchAttributeSlot(slot.kind, f"{slot.path}.requires_grad", slot.path, slot.index, "requires_grad")
            bindings.changes.append(Change(ChangeKind.CONSTANT, where, constant=now))
        elif slot.kind is not InputKind.GRADIENT:
            raise SideEffectError(
                f"the step leaves {tracked.slot.path}.requires_grad changed, which a replay would not repeat.",
                fix="set it back at the end of the step, or change it outside.",
            ).seen_by(_sets_requires_grad(tracked.real))


def _sets_requires_grad(real: Tensor) -> Effect:
    return Effect(lambda capture: capture.stand_in(real).requires_grad)


def _gradients(table: StateTable, bindings: Bindings) -> None:
    for tracked in table.tracked.values():
        if isinstance(tracked.slot, BatchSlot) and tracked.fake.grad is not None:
            _batch_gradient(bindings, tracked, tracked.slot)
    for tracked in table.parameters:
        before = tracked.real.grad
        before_fake = table.tracked[id(before)].fake if before is not None else None
        after = tracked.fake.grad
        if after is before_fake:
            continue
        path = f"{tracked.slot.path}.grad"
        slot = GradSlot(InputKind.GRADIENT, path, tracked.slot.path, tracked.real)
        if after is None:
            bindings.changes.append(Change(ChangeKind.REMOVED, slot))
        else:
            bindings.bind(slot, after, created=before is None)


def _batch_gradient(bindings: Bindings, tracked: Tracked, slot: BatchSlot) -> None:
    """The step back-propagates into a tensor that it was given."""
    if tracked.real.grad is not None:
        raise UnsupportedError(
            f"{slot.path} has a gradient already, and the step adds to it.",
            fix="set its .grad to None before the step, or use torch.autograd.grad in it.",
        )
    where = BatchAttributeSlot(InputKind.GRADIENT, f"{slot.path}.grad", slot.path, slot.index, "grad")
    assert tracked.fake.grad is not None
    bindings.bind(where, tracked.fake.grad, created=True)


def _optimizer_state(capture: Capture, bindings: Bindings, optimizer: Optimizer, path: str) -> None:
    flag = capture.skip_flags.get(optimizer)
    before_all = capture.table.fake_state_before[optimizer]
    for owner in {**before_all, **optimizer.state}:
        tracked = capture.table.owner_of(owner)
        if tracked is None and isinstance(owner, FakeTensor):
            raise UnsupportedError(
                f"{path} keeps state for a tensor of shape {tuple(owner.shape)} that is not a parameter of it.",
                fix="key optimizer.state by the parameter itself.",
            )
        real_owner = owner if tracked is None else id(tracked.real) if type(owner) is int else tracked.real
        owner_path = tracked.slot.path if tracked else str(owner)
        of = owner_path if tracked else None
        whole = OwnerSlot(InputKind.OPTIMIZER_STATE, f"{path}.state[{owner_path}]", of, optimizer, real_owner)
        before, entries = before_all.get(owner, ABSENT), optimizer.state.get(owner, ABSENT)
        if not isinstance(entries, dict) or not isinstance(before, dict | Absent):
            _bind(bindings, whole, before, entries, flag)
            continue
        if before is ABSENT:
            before = {}
            if not entries or type(entries) is not dict:
                fresh = FreshContainersSlot(whole.kind, whole.path, of, whole)
                empty = copy.copy(entries)
                empty.clear()
                unless = bindings.skipped(flag)
                bindings.changes.append(Change(ChangeKind.CONSTANT, fresh, constant=empty, unless=unless))
        for name in {**before, **entries}:
            slot = OptimizerStateSlot(
                InputKind.OPTIMIZER_STATE, f"{whole.path}.{name}", of, optimizer, real_owner, name
            )
            _bind(bindings, slot, before.get(name, ABSENT), entries.get(name, ABSENT), flag)


def _bind(
    bindings: Bindings, slot: Slot, old: Any, new: Any, flag: fx.Node | None = None, *, after_calls: bool = False
) -> None:
    """Bind what a slot holds now, if it is not what it held before. Containers are compared leaf by leaf."""
    if is_nest(new):
        bind_nest(bindings, slot, old, new, flag=flag)
    elif old is not new and not _equal_plain(old, new):
        bindings.bind(slot, new, created=old is ABSENT, flag=flag, after_calls=after_calls)


def _param_groups(capture: Capture, bindings: Bindings, optimizer: Optimizer, path: str) -> None:
    before_groups = capture.table.fake_groups[optimizer]
    if len(optimizer.param_groups) != len(before_groups):
        raise SideEffectError(
            f"the step adds or removes a param group of {path}.", fix="call add_param_group outside of the step."
        ).seen_by(Effect(lambda capture: len(optimizer.param_groups)))
    for g, (before, now) in enumerate(zip(before_groups, optimizer.param_groups, strict=True)):
        for key in {**before, **now}:
            old, new = before.get(key, ABSENT), now.get(key, ABSENT)
            if key == "params":
                if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
                    continue
                raise ParameterDataError(f"the step changes the parameters of {path}.param_groups[{g}].")
            where = f"{path}.param_groups[{g}].{key}"
            slot = HyperSlot(InputKind.HYPER_PARAMETER, where, None, optimizer, g, key, None)
            scheduled = capture.at_calls.may_be_set(now, key)
            if scheduled:
                at_call = capture.at_calls.option(now, key, old)
                _bind(bindings, slot, old, at_call)
                if _is_left_to_scheduler(new):
                    continue  # it is called again after each run
                old = None
            changed = old is not new and not is_nest(new) and not _equal_plain(old, new)
            if changed and (optimizer, g) in capture.table.in_tuples:
                raise SideEffectError(
                    f"the step sets {where}, and a tuple or default argument holds the same param group.",
                    fix="reach the group by the optimizer: optimizer.param_groups[0].",
                )
            _bind(bindings, slot, old, new, after_calls=scheduled)


def _is_left_to_scheduler(value: Any) -> bool:
    scalar = scalar_of(value)
    return scalar is not None and isinstance(scalar.leaf, HostLeaf) and scalar.leaf.slot is not None


def _equal_plain(old: Any, new: Any) -> bool:
    return isinstance(old, PLAIN_CONSTANTS) and same_plain(new, old)


def bind_nest(
    bindings: Bindings, slot: Slot, old: Any, new: Any, *, flag: fx.Node | None = None, replaced: bool = False
) -> None:
    """After the graph ran, the slot holds containers like `new`; before the step it held `old`. `replaced`: other
    containers, also where only leaves differ."""
    containers = list(mutable_nests(new))
    new = _with_plain_keys(new)
    if not replaced and _same_structure(old, new):
        before = dict(leaves(old))
        for keys, leaf in leaves(new):
            if not _is_same(before[keys], leaf):
                bindings.refuse_shared(slot.path)
                bindings.bind(nested_slot(slot, keys), leaf, created=False, flag=flag)
        return
    bindings.refuse_shared(slot.path)
    for container in containers:
        bindings.own_container(container, slot.path)
    template = map_leaves(
        new, lambda leaf, keys: leaf if _is_fixed(leaf) else None, wrapper=lambda whole, inner: form_of(whole)
    )
    fresh = FreshContainersSlot(slot.kind, slot.path, slot.of, slot)
    unless = bindings.skipped(flag)
    bindings.changes.append(Change(ChangeKind.CONSTANT, fresh, constant=template, unless=unless))
    for keys, leaf in leaves(new):
        if not _is_fixed(leaf):
            bindings.bind(nested_slot(slot, keys), leaf, created=True, flag=flag)


def _with_plain_keys(value: Any) -> Any:
    """Specialise symbolic scalars among the keys of dicts."""
    if isinstance(value, dict):
        result = copy.copy(value)
        result.clear()
        for key, item in value.items():
            scalar = scalar_of(key)
            result[key if scalar is None else scalar.specialise("a key of a dict")] = _with_plain_keys(item)
        return result
    if isinstance(value, tuple):
        items = [_with_plain_keys(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list | deque):
        items_of: Any = copy.copy(value)
        for i, item in enumerate(value):
            items_of[i] = _with_plain_keys(item)
        return items_of
    return value


def _same_structure(old: Any, new: Any) -> bool:
    """Whether only leaves differ, each of which can be set on its own."""
    if is_wrapper(old) or is_wrapper(new):
        return type(old) is type(new) and bool(structure_of(old) == structure_of(new))
    if not isinstance(old, NESTS) or not isinstance(new, NESTS):
        return not isinstance(old, NESTS) and not isinstance(new, NESTS)
    if type(old) is not type(new) or len(old) != len(new):
        return False
    if isinstance(old, dict):
        return list(old) == list(new) and all(_same_structure(old[key], new[key]) for key in old)
    return all(_same_structure(a, b) for a, b in zip(old, new, strict=True))


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (_is_constant(new) and same_plain(new, old))


def _is_fixed(leaf: Any) -> bool:
    """Whether a leaf is a part of the containers that a replay makes. Numbers are set one by one: two traces of a call
    are compared, and what is computed in one of them is plain in the other."""
    return _is_constant(leaf) and type(leaf) not in (int, float)


def _is_constant(value: Any) -> bool:
    return isinstance(value, PLAIN_CONSTANTS) and scalar_of(value) is None
