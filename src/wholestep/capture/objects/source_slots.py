"""Slots of places outside of instances and tensors: class attributes, `__slots__`, context variables, thread locals."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

from wholestep.capture.objects.slots import ABSENT, Slot


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
