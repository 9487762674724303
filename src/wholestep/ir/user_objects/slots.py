"""Where state lives in the user's objects: a slot can be read, rebound and emptied.

    model.fc.weight                        ModuleSlot(fc, "_parameters", "weight")
    model.fc.weight.grad                   GradSlot(weight)
    optimizer.state[model.fc.weight].step  OptimizerStateSlot(optimizer, weight, "step")
    optimizer.param_groups[0].betas[1]     HyperSlot(optimizer, 0, "betas", 1)
    batch['x']                             BatchSlot(3)
    Config.scale                           ClassSlot(Config, "scale")

Slots hold the objects that own the state, never the state, so `load_state_dict` between two steps is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.ir.signature import InputKind
from wholestep.torch_private.distributed import dtensor_over, is_dtensor, local_of, spec_of


class Absent:
    """Stands for a slot that holds nothing."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that holds one tensor or number."""

    kind: InputKind
    path: str
    of: str | None

    def get(self) -> Any:
        raise NotImplementedError

    def set(self, value: Any) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class MappingSlot(Slot):
    """An entry of a dictionary: a module's parameter or buffer, an attribute, a global, an item of a user's dict."""

    mapping: MutableMapping[Any, Any]
    key: Any

    def get(self) -> Any:
        return self.mapping.get(self.key, ABSENT)

    def set(self, value: Any) -> None:
        self.mapping[self.key] = value

    def remove(self) -> None:
        self.mapping.pop(self.key, None)


@dataclass(frozen=True, eq=False)
class StoredItemSlot(Slot):
    """What a dict stores under a key, past the methods of its class (`class Config(dict)` with a `__setitem__`)."""

    mapping: dict[Any, Any]
    key: Any

    def get(self) -> Any:
        return dict.get(self.mapping, self.key, ABSENT)

    def set(self, value: Any) -> None:
        dict.__setitem__(self.mapping, self.key, value)

    def remove(self) -> None:
        dict.pop(self.mapping, self.key, None)


@dataclass(frozen=True, eq=False)
class ModuleSlot(MappingSlot):
    """A parameter or buffer of a module."""

    module: nn.Module


@dataclass(frozen=True, eq=False)
class SequenceSlot(Slot):
    """An element of a list."""

    sequence: MutableSequence[Any]
    index: int

    def get(self) -> Any:
        return self.sequence[self.index] if self.index < len(self.sequence) else ABSENT

    def set(self, value: Any) -> None:
        self.sequence[self.index] = value


@dataclass(frozen=True, eq=False)
class GroupParamSlot(SequenceSlot):
    """A parameter that only an optimizer's param group refers to."""


@dataclass(frozen=True, eq=False)
class CellSlot(Slot):
    """A variable of an enclosing function."""

    cell: CellType

    def get(self) -> Any:
        return self.cell.cell_contents

    def set(self, value: Any) -> None:
        self.cell.cell_contents = value

    def remove(self) -> None:
        del self.cell.cell_contents


@dataclass(frozen=True, eq=False)
class FixedSlot(Slot):
    """A tensor inside an immutable container: it can be read, not replaced."""

    value: Any

    def get(self) -> Any:
        return self.value


@dataclass(frozen=True, eq=False)
class GradSlot(Slot):
    """`param.grad`."""

    param: Tensor

    def get(self) -> Any:
        return self.param.grad

    def set(self, value: Any) -> None:
        self.param.grad = value

    def remove(self) -> None:
        self.param.grad = None


@dataclass(frozen=True, eq=False)
class OptimizerStateSlot(Slot):
    """`optimizer.state[param][key]`."""

    optimizer: Optimizer
    param: Any
    key: Any

    def get(self) -> Any:
        entry = self.optimizer.state.get(self.param)
        return ABSENT if entry is None else entry.get(self.key, ABSENT)

    def set(self, value: Any) -> None:
        state = self.optimizer.state
        if self.param not in state:
            state[self.param] = {}  # some optimizers keep a plain dict, which makes no entry by itself
        state[self.param][self.key] = value

    def remove(self) -> None:
        self.optimizer.state.get(self.param, {}).pop(self.key, None)


@dataclass(frozen=True, eq=False)
class HyperSlot(Slot):
    """`optimizer.param_groups[group][key]`, or one element of it."""

    optimizer: Optimizer
    group: int
    key: str
    index: int | None

    def get(self) -> Any:
        groups = self.optimizer.param_groups
        if self.group >= len(groups):
            return ABSENT
        value = groups[self.group].get(self.key, ABSENT)
        if self.index is None or value is ABSENT:
            return value
        return value[self.index] if isinstance(value, list | tuple) and self.index < len(value) else ABSENT

    def set(self, value: Any) -> None:
        group = self.optimizer.param_groups[self.group]
        if self.index is None:
            group[self.key] = value
        else:
            items = list(group[self.key])
            items[self.index] = value
            group[self.key] = type(group[self.key])(items)

    def remove(self) -> None:
        del self.optimizer.param_groups[self.group][self.key]


@dataclass(frozen=True, eq=False)
class BatchSlot(Slot):
    """A leaf of the arguments of the call."""

    index: int


@dataclass(frozen=True, eq=False)
class ComputedSlot(Slot):
    """A number that is computed from what lies in other slots."""

    def compute(self, value_of: Callable[[Slot], Any]) -> Any:
        """The number; ABSENT where there is none."""
        raise NotImplementedError


def value_in(slot: Slot, leaves: Sequence[Any]) -> Any:
    """What a slot holds in a call with these leaves of arguments."""
    if isinstance(slot, BatchSlot):
        return leaves[slot.index]
    return slot.compute(lambda each: value_in(each, leaves)) if isinstance(slot, ComputedSlot) else slot.get()


@dataclass(frozen=True, eq=False)
class BatchAttributeSlot(Slot):
    """`.grad`, `.requires_grad` or the "form" (sizes and strides) of a leaf of the arguments of the call."""

    index: int
    attribute: str


@dataclass(frozen=True, eq=False)
class SameMemorySlot(Slot):
    """A slot that takes another tensor over the memory of a parameter: `p.data = state["old"]` made them one."""

    root: Slot
    parameter: Slot

    def get(self) -> Any:
        return self.root.get()

    def set(self, value: Any) -> None:
        self.root.set(self.parameter.get().detach())


@dataclass(frozen=True, eq=False)
class LocalSlot(Slot):
    """A slot that holds a DTensor; the graph sees its local shard."""

    inner: Slot
    spec: Any
    """Mesh, placements and global shape: part of what a graph is made for."""

    def get(self) -> Any:
        value = self.inner.get()
        return local_of(value) if is_dtensor(value) and spec_of(value) == self.spec else ABSENT

    def set(self, value: Any) -> None:
        self.inner.set(dtensor_over(value, self.spec))

    def remove(self) -> None:
        self.inner.remove()


def in_users_objects(slot: Slot) -> Slot:
    """The slot in the user's objects, behind one that wraps it."""
    return slot.inner if isinstance(slot, LocalSlot) else slot


@dataclass(frozen=True, eq=False)
class GeneratorSlot(Slot):
    """A random generator that the step passes to a random operator."""

    generator: torch.Generator

    def get(self) -> Any:
        return self.generator


@dataclass(frozen=True, eq=False)
class ClassSlot(Slot):
    """An attribute in the dict of a class: `Config.scale`, and `self.scale` where the instance has none."""

    owner: type
    name: str

    def get(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)

    def set(self, value: Any) -> None:
        type.__setattr__(self.owner, self.name, value)

    def remove(self) -> None:
        if self.name in vars(self.owner):
            type.__delattr__(self.owner, self.name)


@dataclass(frozen=True, eq=False)
class MemberSlot(Slot):
    """An attribute of an object whose class lists it in `__slots__`."""

    holder: Any
    member: MemberDescriptorType

    def get(self) -> Any:
        try:
            return self.member.__get__(self.holder, type(self.holder))
        except AttributeError:
            return ABSENT

    def set(self, value: Any) -> None:
        self.member.__set__(self.holder, value)

    def remove(self) -> None:
        if self.get() is not ABSENT:
            self.member.__delete__(self.holder)


@dataclass(frozen=True, eq=False)
class DefaultsSlot(Slot):
    """The defaults of a function, as one tuple."""

    function: FunctionType

    def get(self) -> Any:
        return self.function.__defaults__

    def set(self, value: Any) -> None:
        self.function.__defaults__ = value


@dataclass(frozen=True, eq=False)
class ContextVarSlot(Slot):
    """The value of a `contextvars.ContextVar` in the context of the caller."""

    variable: ContextVar[Any]

    def get(self) -> Any:
        return self.variable.get(ABSENT)

    def set(self, value: Any) -> None:
        self.variable.set(value)

    def remove(self) -> None:
        """A context variable cannot be unset; a capture runs in a copy of the context, which is dropped."""


@dataclass(frozen=True, eq=False)
class ThreadLocalSlot(Slot):
    """An attribute of a `threading.local` in the calling thread."""

    local: threading.local
    name: str

    def get(self) -> Any:
        return vars(self.local).get(self.name, ABSENT)

    def set(self, value: Any) -> None:
        vars(self.local)[self.name] = value

    def remove(self) -> None:
        vars(self.local).pop(self.name, None)
