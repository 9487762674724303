"""What the step changed in containers of an optimizer: bound leaf by leaf, or built anew.

Where only leaves differ, each of these is set in place. Where the structure differs (a deque that grew, a list that was
created) a replay builds new containers and sets all their leaves.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from torch import fx

from wholestep.capture.results.bindings import PLAIN_CONSTANTS, Bindings
from wholestep.capture.scalars.scalars import scalar_of
from wholestep.ir.captured_step import Change
from wholestep.ir.signature import ChangeKind
from wholestep.ir.user_objects.nested_containers import (
    NESTS,
    FreshContainersSlot,
    leaves,
    map_leaves,
    mutable_nests,
    nested_slot,
)
from wholestep.ir.user_objects.plain_values import same_plain
from wholestep.ir.user_objects.slots import Slot


def bind_nest(bindings: Bindings, slot: Slot, old: Any, new: Any, *, flag: fx.Node | None = None) -> None:
    """After the graph ran, the slot holds containers like `new`; before the step it held `old`."""
    containers = list(mutable_nests(new))
    new = _with_plain_keys(new)
    if _same_structure(old, new):
        before = dict(leaves(old))
        for keys, leaf in leaves(new):
            if not _is_same(before[keys], leaf):
                bindings.refuse_shared(slot.path)
                bindings.bind(nested_slot(slot, keys), leaf, created=False, flag=flag)
        return
    bindings.refuse_shared(slot.path)
    for container in containers:
        bindings.own_container(container, slot.path)
    template = map_leaves(new, lambda leaf, keys: leaf if _is_constant(leaf) else None)
    fresh = FreshContainersSlot(slot.kind, slot.path, slot.of, slot)
    unless = bindings.skipped(flag)
    bindings.changes.append(Change(ChangeKind.CONSTANT, fresh, constant=template, unless=unless))
    for keys, leaf in leaves(new):
        if not _is_constant(leaf):
            bindings.bind(nested_slot(slot, keys), leaf, created=True, flag=flag)


def _with_plain_keys(value: Any) -> Any:
    """Dicts whose keys are numbers of the graph get plain ones, under guards."""
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
    if not isinstance(old, NESTS) or not isinstance(new, NESTS):
        return not isinstance(old, NESTS) and not isinstance(new, NESTS)
    if type(old) is not type(new) or len(old) != len(new):
        return False
    if isinstance(old, dict):
        return list(old) == list(new) and all(_same_structure(old[key], new[key]) for key in old)
    return all(_same_structure(a, b) for a, b in zip(old, new, strict=True))


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (_is_constant(new) and same_plain(new, old))


def _is_constant(value: Any) -> bool:
    return isinstance(value, PLAIN_CONSTANTS) and scalar_of(value) is None
