"""Find other places that Python reads values from: classes, Python modules, context variables, ...

Part of `discover`: the walk passes on whatever is not a module, optimizer, tensor or container.

    class Config: scale = 2.0         a class reached by name, as the type of an object, or as a metaclass
    import config                     a Python module of the user's
    ContextVar, threading.local       their value in the calling context and thread
    __slots__                         attributes without a dict
    iter(..), count(), a generator    reading has an effect: a stand-in raises while tracing
"""

from __future__ import annotations

import decimal
import dis
import functools
import gc
import io
import logging
import sys
import sysconfig
import threading
import weakref
from abc import ABCMeta
from collections import ChainMap, UserList, deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.objects.user_code import is_foreign, is_installed
from wholestep.capture.python_reads.attribute_reads import class_values
from wholestep.capture.python_reads.clocks import CLOCKS
from wholestep.capture.python_reads.outside_reads import UNREPEATABLE
from wholestep.capture.python_reads.stand_ins import IMMUTABLE, StandIn, is_consumed, with_parts
from wholestep.ir.captured_step import NamesReplaced
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import LRU_CACHE, class_code, entries_of, is_array, is_large, own_dict
from wholestep.ir.user_objects.slots import (
    ABSENT,
    ClassSlot,
    ContextVarSlot,
    FixedSlot,
    MappingSlot,
    MemberSlot,
    Slot,
    ThreadLocalSlot,
)

_FOUND_BY_BEING_CALLED = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
"""Classes, Python modules and `__slots__` may hold more of these than the step uses."""

_OF_ENUM = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})
"""Attributes that every member of an enumeration has."""
_LARGEST_TABLE = 200
_LARGE_MODULES = frozenset({"torch", "numpy"})
"""Modules that user code names often, and that have no abstract classes to ask."""
REPLACED = CLOCKS | UNREPEATABLE
"""Functions that return another value each time, by identity."""

Visit = Callable[[Any, str, int, Slot | None], None]


def _replaced(value: Any) -> Any:
    """A different object where a stand-in is needed: only the difference counts."""
    if id(value) in REPLACED:
        return _replaced
    return StandIn(value, "") if is_consumed(value) or is_large(value) else value


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
    libraries: dict[int, tuple[ModuleType | type, dict[str, Any]]] = field(default_factory=dict)
    """Modules that are not the user's, by identity, with what user code names of them; classes of libraries whose
    objects the step may call, with their methods."""
    loggers: dict[int, tuple[logging.Logger, str]] = field(default_factory=dict)
    weak: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """Weak references, by identity."""
    abstract_classes: dict[int, type] = field(default_factory=dict)
    """Abstract base classes that user code names, by identity."""
    lru_caches: dict[int, tuple[Any, str, Any]] = field(default_factory=dict)
    """Functions with `functools.lru_cache` by identity, with their paths and what `cache_info()` told."""
    counts_in_decimal: bool = False
    """Whether the step may compute with `decimal`, whose precision is state of the thread."""
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
        if isinstance(value, IMMUTABLE) and id(value) not in REPLACED:
            if slot is not None and not isinstance(slot, FixedSlot) and with_parts(value, _replaced) is not value:
                self._sources.stand_ins.append((slot, value))
            return False  # its parts are visited
        if _replaced(value) is value:
            return False
        if slot is None or isinstance(slot, FixedSlot):
            self._sources.fixed.append((value, path))
        else:
            self._sources.stand_ins.append((slot, value))
        return True

    def visit_source(self, value: Any, path: str, depth: int) -> bool:
        """Whether a value is one of these places; if so, what it holds is visited too."""
        if isinstance(value, type):
            self.class_(value, depth)
        elif isinstance(value, ModuleType):
            if not is_foreign(value):
                self._sources.python_modules.setdefault(value, path)
                if _is_the_users(value) and "__getattr__" in vars(value):
                    self._visit(vars(value)["__getattr__"], f"{path}.__getattr__", depth, None)
        elif isinstance(value, UserList):
            self._visit(value.data, path, depth, None)
        elif isinstance(value, ChainMap):
            self._visit(value.maps, path, depth, None)
        elif isinstance(value, MappingProxyType | KeysView | ValuesView | ItemsView):
            for behind in gc.get_referents(value):
                self._visit(behind, path, depth, None)
        elif type(value) is LRU_CACHE:
            self._lru_cache(value, path, depth)
        elif isinstance(value, Decimal):
            self._sources.counts_in_decimal = True
        elif isinstance(value, weakref.ref):
            self._sources.weak.setdefault(id(value), (value, path))
            self._visit(value(), f"{path}()", depth, None)
        elif isinstance(value, weakref.WeakValueDictionary | weakref.WeakKeyDictionary | weakref.WeakSet):
            held: Any = value
            self._visit(held.data, path, depth, None)
            for key in list(held.data) if not isinstance(value, weakref.WeakValueDictionary) else ():
                self._visit(key, f"{path}[..]", depth + 1, None)
        elif is_array(value):
            self._sources.arrays.append((value, path))
        elif isinstance(value, logging.Logger):
            self._logger(value, path, depth)
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

    def _lru_cache(self, cache: Any, path: str, depth: int) -> None:
        """The function behind a cache, and what it returned before."""
        self._sources.lru_caches[id(cache)] = cache, path, cache.cache_info()
        self._visit(cache.__wrapped__, path, depth, None)
        entries = entries_of(cache)
        own = (vars(cache), cache.__wrapped__, entries)
        results = list(entries.values()) if entries and cache.cache_info().maxsize is None else []
        for held in [*gc.get_referents(cache), *results]:  # keys and results
            if not isinstance(held, type) and not any(held is each for each in own):
                slot = FixedSlot(InputKind.CAPTURED, f"{path}(..)", None, held)
                self._visit(held, slot.path, depth + 1, slot if isinstance(held, Tensor) else None)

    def functions_in(self, member: Any, owner: str, depth: int) -> Iterator[FunctionType]:
        """The functions that a member of a class runs: a method, a property, a cache or partial of one."""
        if isinstance(member, FunctionType):
            if not is_foreign(member):  # an enumeration holds functions of Python's `enum`
                yield member
        elif isinstance(member, classmethod | staticmethod):
            yield from self.functions_in(member.__func__, owner, depth)
        elif isinstance(member, property):
            for each in (member.fget, member.fset):
                yield from self.functions_in(each, owner, depth)
        elif isinstance(member, functools.cached_property):
            yield from self.functions_in(member.func, owner, depth)
        elif isinstance(member, functools.partialmethod):
            yield from self.functions_in(member.func, owner, depth)
            self._visit([*member.args, member.keywords], f"an argument of {owner}", depth, None)
        elif isinstance(member, functools.singledispatchmethod):
            yield from self.functions_in(member.dispatcher, owner, depth)
        elif type(member) is LRU_CACHE:
            self._visit(member, f"{owner}.{member.__name__}", depth, None)

    def _logger(self, logger: logging.Logger, path: str, depth: int) -> None:
        """The level of a logger; and its handlers, which may keep what they are given."""
        self._sources.loggers.setdefault(id(logger), (logger, path))
        above: logging.Logger | None = logger
        while above is not None:
            for i, handler in enumerate(above.handlers):
                where = f"{path}.handlers[{i}]"
                if not is_foreign(type(handler)):
                    self._visit(handler, where, depth + 1, None)
                elif str(type(handler).__module__).split(".")[0] == "logging":
                    for key, value in list(vars(handler).items()):
                        if isinstance(value, list | dict | deque | io.IOBase):
                            slot = MappingSlot(InputKind.CAPTURED, f"{where}.{key}", None, vars(handler), key)
                            self._visit(value, slot.path, depth + 1, slot)
            above = above.parent if above.propagate else None

    def _place(self, slot: Slot, depth: int, *, besides: tuple[type, ...] = ()) -> None:
        value = slot.get()
        self._variables.append((slot.path, slot, value))
        if not isinstance(value, besides):
            self._visit(value, slot.path, depth + 1, slot)

    def function(self, fn: FunctionType, path: str, depth: int) -> None:
        """Visit the attributes and default arguments of a function."""
        self._sources.functions.append((fn, path, frozenset(vars(fn))))
        for name in vars(fn):
            if name not in ("__wrapped__", "_clear_cache"):  # (of singledispatch)
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
        if issubclass(cls, Enum):
            for name, member in {} if is_foreign(cls) else cls.__members__.items():
                self._visit(member._value_, f"{cls.__qualname__}.{name}.value", depth + 1, None)
                if not _OF_ENUM.issuperset(own_dict(member)):
                    self._visit(own_dict(member), f"{cls.__qualname__}.{name}", depth + 1, None)
            self._walk_methods(cls, depth)
            return
        if cls in self._sources.classes:
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

    def named_value(self, value: Any) -> None:
        """User code names a class or module: `isinstance` may ask an abstract one which classes were registered."""
        if isinstance(value, ABCMeta):
            self._sources.abstract_classes[id(value)] = value
        elif value is Decimal or value is decimal:
            self._sources.counts_in_decimal = True

    def library_classes(self, objects: Iterable[Any]) -> None:
        """Methods of torch and other libraries that the step may run: they can be replaced."""
        kinds = {base for kind in {type(each) for each in objects} for base in kind.__mro__[:-1]}
        for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
            if is_foreign(kind):
                self._sources.libraries.setdefault(id(kind), (kind, dict(class_code(kind))))
        self._sources.libraries.setdefault(id(Tensor), (Tensor, dict(class_code(Tensor))))
        functions = {name: value for name, value in vars(functional).items() if callable(value)}
        self._sources.libraries[id(functional)] = functional, functions

    def _library(self, module: ModuleType, code: CodeType, depth: int, nested: int) -> None:
        """What code names of a module that is not the user's (`F.gelu`, `sys.argv`), also in modules in it."""
        held = self._sources.libraries.setdefault(id(module), (module, {}))[1]
        for name in code.co_names:
            value = NamesReplaced.originals.get((id(module), name), vars(module).get(name, ABSENT))
            if value is ABSENT or (nested == 0 and id(value) in REPLACED):
                continue
            held[name] = value
            if isinstance(value, ModuleType) and is_foreign(value) and nested < 3:
                self._library(value, code, depth, nested + 1)
            elif (
                type(value) in (list, dict)
                and module.__name__.split(".")[0] in sys.stdlib_module_names
                and not _is_large_table(value)
            ):
                self._visit(value, f"{module.__name__}.{name}", depth + 1, None)

    def module_attributes(self, fn: FunctionType, code: CodeType, depth: int) -> None:
        """Visit what a function may read of the modules that it names: tensors there must be found before the trace."""
        named = {name: fn.__globals__.get(name) for name in code.co_names}
        for module in named.values():
            if isinstance(module, ModuleType) and is_foreign(module):
                self._library(module, code, depth, 0)
        imported = imported_modules(fn.__globals__, code)
        for value in named.values():
            self.named_value(value)
            if isinstance(value, ModuleType) and value.__name__ not in _LARGE_MODULES:
                for attribute in code.co_names:
                    inner = vars(value).get(attribute)
                    self.named_value(inner)
                    if isinstance(inner, ModuleType):  # collections.abc.Sequence
                        for each in code.co_names:
                            self.named_value(vars(inner).get(each))
        package = _package_of(fn)
        for name, module in {**named, **imported}.items():
            if not isinstance(module, ModuleType) or package not in ("", module.__name__.split(".")[0]):
                continue
            if not is_foreign(module):
                if name in imported:
                    self._visit(module, name, depth + 1, None)
                for attribute in code.co_names:
                    if attribute in vars(module) and not isinstance(vars(module)[attribute], _FOUND_BY_BEING_CALLED):
                        where = f"{name}.{attribute}"
                        slot = MappingSlot(InputKind.CAPTURED, where, None, vars(module), attribute)
                        self._visit(vars(module)[attribute], where, depth + 1, slot)


def _package_of(fn: FunctionType) -> str:
    """The installed package that a function is of, which keeps values in modules of its own; "" for the user's program,
    which may keep them in any."""
    return (fn.__module__ or "").split(".")[0] if is_installed(fn.__code__) else ""


def _is_large_table(value: Any) -> bool:
    return len(value) > _LARGEST_TABLE or value is sys.modules or value is sys.path_importer_cache


def imported_modules(namespace: dict[str, Any], code: CodeType) -> dict[str, ModuleType]:
    """Modules that code imports itself, or may look up by a name that it spells (`sys.modules["config"]`)."""
    package = str(namespace.get("__package__") or str(namespace.get("__name__", "")).rpartition(".")[0])
    found: dict[str, ModuleType] = {}
    for level, name in sorted(_imports(code)):
        if level:
            parents = package.split(".")
            name = ".".join(part for part in (*parents[: len(parents) + 1 - level], name) if part)
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            found[name] = module
    if _looks_up_modules(namespace, code) and all(is_foreign(module) for module in found.values()):
        found |= {name: module for name, module in list(sys.modules.items()) if _is_the_users(module)}
    return found


_LOOKS_UP_MODULES = frozenset({"modules", "import_module", "__import__"})


def _looks_up_modules(namespace: dict[str, Any], code: CodeType) -> bool:
    """Whether code may look up a module by a name that it computes. (`model.modules()` does not.)"""
    named = _LOOKS_UP_MODULES & set(code.co_names)
    if named != {"modules"}:
        return bool(named)
    held = (namespace.get(name) for name in code.co_names)
    return "sys" in code.co_names or any(value is sys or value is sys.modules for value in held)


_PACKAGES = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))


def _is_the_users(module: Any) -> bool:
    """Whether a module is neither of Python nor of an installed package."""
    if type(module) is not ModuleType or is_foreign(module):
        return False
    return not str(vars(module).get("__file__") or "").startswith(_PACKAGES)


@lru_cache(maxsize=8192)
def _imports(code: CodeType) -> frozenset[tuple[int, str]]:
    """The names of modules that code imports or spells, and how many packages up (`from ..a import b`)."""
    found: set[tuple[int, str]] = set()
    before: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, listed = before[-2] or 0, before[-1] or ()
            name = str(instruction.argval)
            found |= {(level, name), *((level, f"{name}.{each}".lstrip(".")) for each in listed)}
        before.append(instruction.argval)
    if _LOOKS_UP_MODULES & set(code.co_names):
        found |= {(0, const) for const in code.co_consts if isinstance(const, str)}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= _imports(const)
    return frozenset(found)
