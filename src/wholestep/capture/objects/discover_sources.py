"""Find other places that Python reads values from: classes, Python modules, context variables, ...

Part of `discover`: the walk passes on whatever is not a module, optimizer, tensor or container.

    class Config: scale = 2.0         a class reached by name, as the type of an object, or as a metaclass
    import config                     a Python module of the user's
    ContextVar, threading.local       their value in the calling context and thread
    __slots__                         attributes without a dict
    iter(..), count(), a generator    reading has an effect: a stand-in raises while tracing
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import ChainMap, UserList
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.objects.callers import is_foreign
from wholestep.capture.python_reads.attribute_reads import class_values
from wholestep.capture.python_reads.clocks import CLOCKS
from wholestep.capture.python_reads.outside_reads import UNREPEATABLE
from wholestep.capture.python_reads.stand_ins import is_consumed
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import is_array, is_large
from wholestep.ir.user_objects.slots import ClassSlot, ContextVarSlot, MappingSlot, MemberSlot, Slot, ThreadLocalSlot

_FOUND_BY_BEING_CALLED = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
"""Classes, Python modules and `__slots__` may hold more of these than the step uses."""

REPLACED = CLOCKS | UNREPEATABLE
"""Functions that return another value each time, by identity."""

Visit = Callable[[Any, str, int, Slot | None], None]


@dataclass
class OtherSources:
    """The places that were found."""

    classes: dict[type, str] = field(default_factory=dict)
    """Classes of the user's with the path of their attributes."""
    python_modules: dict[ModuleType, str] = field(default_factory=dict)
    thread_locals: list[tuple[threading.local, str]] = field(default_factory=list)
    stand_ins: list[tuple[Slot, Any]] = field(default_factory=list)
    """Slots that hold something whose reading has an effect or differs each time (an iterator, a clock)."""
    functions: list[tuple[FunctionType, str, frozenset[str]]] = field(default_factory=list)
    """Functions of the user's, and the names of their attributes."""
    arrays: list[tuple[Any, str]] = field(default_factory=list)
    """NumPy arrays and the like."""
    fixed: list[tuple[Any, str]] = field(default_factory=list)
    """The same, where no slot holds them."""


class SourceWalk:
    """The part of the walk that looks for such places."""

    def __init__(
        self, sources: OtherSources, variables: list[tuple[str, Slot, Any]], visit: Visit, walk_methods: Any
    ) -> None:
        self._sources = sources
        self._variables = variables
        self._visit = visit
        self._walk_methods = walk_methods

    def stands_in(self, value: Any, path: str, slot: Slot | None) -> bool:
        """Whether a value must be replaced by a stand-in while the step is traced."""
        if id(value) not in REPLACED and not is_consumed(value) and not is_large(value):
            return False
        if slot is None:
            self._sources.fixed.append((value, path))
        else:
            self._sources.stand_ins.append((slot, value))
        return True

    def look_at(self, value: Any, path: str, depth: int) -> bool:
        """Whether a value is one of these places; if so, what it holds is visited too."""
        if isinstance(value, type):
            self.class_(value, depth)
        elif isinstance(value, ModuleType):
            if not is_foreign(value):
                self._sources.python_modules.setdefault(value, path)
        elif isinstance(value, UserList):
            self._visit(value.data, path, depth, None)
        elif isinstance(value, ChainMap):
            self._visit(value.maps, path, depth, None)
        elif isinstance(value, MappingProxyType):
            for behind in gc.get_referents(value):
                self._visit(behind, path, depth, None)
        elif isinstance(value, weakref.ref):
            self._visit(value(), f"{path}()", depth, None)
        elif is_array(value):
            self._sources.arrays.append((value, path))
        elif isinstance(value, ContextVar):
            slot: Slot = ContextVarSlot(InputKind.CAPTURED, f"{path}.get()", None, value)
            self._place(slot, depth)
        elif isinstance(value, threading.local):
            self._sources.thread_locals.append((value, path))
            for name in list(vars(value)):
                self._place(ThreadLocalSlot(InputKind.CAPTURED, f"{path}.{name}", None, value, name), depth)
            self.class_(type(value), depth)
        else:
            return False
        return True

    def _place(self, slot: Slot, depth: int, *, besides: tuple[type, ...] = ()) -> None:
        value = slot.get()
        self._variables.append((slot.path, slot, value))
        if not isinstance(value, besides):
            self._visit(value, slot.path, depth + 1, slot)

    def function(self, fn: FunctionType, path: str, depth: int) -> None:
        """Visit the attributes and default arguments of a function."""
        self._sources.functions.append((fn, path, frozenset(vars(fn))))
        for name in vars(fn):
            if name != "__wrapped__":
                self._place(MappingSlot(InputKind.CAPTURED, f"{path}.{name}", None, vars(fn), name), depth)
        defaults = fn.__kwdefaults__ or {}
        for name in list(defaults):
            self._place(MappingSlot(InputKind.CAPTURED, f"{path}({name}=)", None, defaults, name), depth)

    def members(self, value: Any, path: str, depth: int) -> bool:
        """Visit attributes in `__slots__`. Returns whether there are any."""
        found = False
        for base in type(value).__mro__:
            own = "__slots__" in vars(base) and not is_foreign(base)  # members of classes written in C may be read-only
            for name, member in list(vars(base).items()) if own else ():
                if isinstance(member, MemberDescriptorType):
                    found = True
                    slot = MemberSlot(InputKind.CAPTURED, f"{path}.{name}", None, value, member)
                    self._place(slot, depth, besides=_FOUND_BY_BEING_CALLED)
        return found

    def class_(self, cls: type, depth: int) -> None:
        """Visit values in the dicts of a class, of its bases and of its metaclass; and the code of its methods."""
        if issubclass(cls, Enum) or cls in self._sources.classes:
            return
        for base in (*cls.__mro__, *type(cls).__mro__):
            if is_foreign(base) or base in self._sources.classes:
                continue
            path = self._class_path(base)
            self._sources.classes[base] = path
            for name, value in class_values(base):
                where = f"{path}.{name}"
                if not isinstance(value, _FOUND_BY_BEING_CALLED):
                    self._visit(value, where, depth + 1, ClassSlot(InputKind.CAPTURED, where, None, base, name))
            self._walk_methods(base, depth)

    def _class_path(self, cls: type) -> str:
        taken = set(self._sources.classes.values())
        name = cls.__qualname__.rpartition("<locals>.")[2]
        if name in taken:
            name = f"{cls.__module__}.{name}"
        number = 2
        path = name
        while path in taken:
            path, number = f"{name}#{number}", number + 1
        return path

    def module_attributes(self, fn: FunctionType, code: CodeType, depth: int) -> None:
        """Visit what a function may read of the modules that it names: tensors there must be found before the trace."""
        for name in code.co_names:
            module = fn.__globals__.get(name)
            if isinstance(module, ModuleType) and not is_foreign(module):
                for attribute in code.co_names:
                    if attribute in vars(module) and not isinstance(vars(module)[attribute], _FOUND_BY_BEING_CALLED):
                        where = f"{name}.{attribute}"
                        slot = MappingSlot(InputKind.CAPTURED, where, None, vars(module), attribute)
                        self._visit(vars(module)[attribute], where, depth + 1, slot)
