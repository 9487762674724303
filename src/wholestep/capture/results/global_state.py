"""Values that outlive a call: globals of modules, class attributes, closures and default arguments of functions.

Most of what user code caches while it is traced lands in one of these or in what `discover` found. They are copied
before the trace (shallowly: one copy per module, class and container), so that an entry with a fake tensor is restored
to exactly what was there. Installed packages are left out, because they have thousands of classes: what a step stores
there is found by `leftover_fakes`.
"""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from operator import is_
from types import (
    BuiltinFunctionType,
    FunctionType,
    GenericAlias,
    MethodDescriptorType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

from wholestep.ir.user_objects.plain_contents import PLAIN, assign_contents, copy_of
from wholestep.ir.user_objects.slots import ABSENT

_LARGE = 20_000
_LRU_CACHE = type(functools.lru_cache(len))
_CONTAINERS = frozenset({list, dict, set, deque, defaultdict, OrderedDict})  # a subclass may load its items on access

TracedIn = Callable[[Any], tuple[int, ...]]
"""The identities of the traced values in a value."""


@dataclass(frozen=True)
class Leftover:
    """A place where a traced value was found after the trace, and removed."""

    where: str
    tensors: tuple[int, ...]
    """Identities of the traced values; holding them here would look like one more holder."""


@dataclass(eq=False)
class _Entries:
    """Names bound to values: `vars` of a module, a class or an object."""

    owner: Any
    path: str
    before: dict[str, Any]

    def changed(self) -> Iterator[tuple[str, Any]]:
        now = vars(self.owner)
        if len(now) == len(self.before) and all(map(is_, now.values(), self.before.values())):
            return
        for name, value in list(now.items()):
            if value is not self.before.get(name, ABSENT):
                yield name, value

    def put_back(self, name: str) -> None:
        before = self.before.get(name, ABSENT)
        if isinstance(self.owner, type):
            delattr(self.owner, name) if before is ABSENT else setattr(self.owner, name, before)
        elif before is ABSENT:
            del vars(self.owner)[name]
        else:
            vars(self.owner)[name] = before


class GlobalState:
    """The contents of the modules of the user and of other packages before a trace.

    Made for every trace: a program of some hundred modules has thousands of functions, nearly all of them without
    attributes, defaults and closure, so those take a short path.
    """

    def __init__(self) -> None:
        self._entries: list[_Entries] = []
        self._bare: list[tuple[FunctionType, str]] = []
        """Functions that had no attributes, with the names of their owners."""
        self._containers: list[tuple[Any, Any, str]] = []
        self._cells: list[tuple[Any, Any, str]] = []
        self._seen: set[int] = set()
        self.caches: list[Any] = []
        """`functools.lru_cache` wrappers."""
        self._context = contextvars.copy_context()
        for name in sys.modules.keys() - NOT_THE_USERS:
            module = sys.modules[name]
            file = vars(module).get("__file__") if type(module) is ModuleType else None
            if type(module) is ModuleType and _is_users(name, file if isinstance(file, str) else ""):
                self._record(_Entries(module, name, dict(vars(module))), name, 0)
            else:
                NOT_THE_USERS.add(name)

    def _record(self, entries: _Entries, module: str, depth: int) -> None:
        """Record what an object has, and what that holds."""
        self._entries.append(entries)
        for key, value in entries.before.items():
            kind = type(value)
            if kind in _HOLD_NOTHING or ((kind is FunctionType or kind is type) and value.__module__ != module):
                continue
            if key[:2] == "__":
                continue
            if kind is FunctionType and self._is_bare(value, entries.path):
                continue
            self._value(value, f"{entries.path}.{key}", module, depth)

    def _is_bare(self, fn: FunctionType, owner: str) -> bool:
        """Whether a function has nothing of its own yet: no attributes, no default arguments, no closure."""
        if fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__:
            return False
        if vars(fn):
            return False
        self._bare.append((fn, owner))
        return True

    def _value(self, value: Any, path: str, module: str, depth: int) -> None:
        kind = type(value)
        if kind in _HOLD_NOTHING or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind in _CONTAINERS:
            if len(value) <= _LARGE:
                self._containers.append((value, copy_of(value), path))
                if depth < 2 and isinstance(value, dict):
                    for key, item in list(value.items()):
                        if type(item) in _CONTAINERS:
                            self._value(item, f"{path}[{key!r}]", module, depth + 1)
        elif kind is FunctionType:
            if value.__module__ == module:
                self._function(value, path, module, depth)
        elif kind in _WRAPPERS:
            inner = value.func if kind is functools.partial else value.__func__
            self._value(inner, path, module, depth)
        elif issubclass(kind, _NO_HOLDERS):
            return
        elif isinstance(value, type):
            if value.__module__ == module:
                self._named(value, path, module, depth)
        elif kind is _LRU_CACHE:
            self.caches.append(value)
        elif depth < 2 and _is_holder(value):
            self._named(value, path, module, depth + 1)

    def _named(self, owner: Any, path: str, module: str, depth: int) -> None:
        self._record(_Entries(owner, path, dict(attributes_of(owner) or vars(owner))), module, depth + 1)

    def _function(self, fn: FunctionType, path: str, module: str, depth: int) -> None:
        self._named(fn, path, module, depth)
        for default in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._value(default, f"a default argument of {path}", module, depth + 1)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            contents = _contents(cell)
            self._cells.append((cell, contents, f"{name} in the closure of {path}"))
            if contents is not ABSENT:
                self._value(contents, f"{name} in the closure of {path}", module, depth + 1)

    def put_back(self, traced_in: TracedIn, context: contextvars.Context | None = None) -> list[Leftover]:
        """Undo what put a traced value into one of the places, and only that.

        `context` is the one that the step ran in; what the step set there is discarded with it.
        """
        found: list[Leftover] = []
        got_some = [_Entries(fn, f"{owner}.{fn.__name__}", {}) for fn, owner in self._bare if vars(fn)]
        for entries in [*self._entries, *got_some]:
            for name, value in entries.changed():
                if traced := traced_in(value):
                    found.append(Leftover(f"{entries.path}.{name}", traced))
                    entries.put_back(name)
        for container, contents, path in self._containers:
            for where, value in _added(container, contents):
                if traced := traced_in(value) or (traced_in(where.key) if isinstance(where, _Key) else ()):
                    found.append(Leftover(f"{path}{where}", traced))
                    assign_contents(container, contents)
                    break
        for cell, contents, path in self._cells:
            now = _contents(cell)
            if now is not contents and (traced := traced_in(now)):
                found.append(Leftover(path, traced))
                if contents is ABSENT:
                    del cell.cell_contents
                else:
                    cell.cell_contents = contents
        for variable, value in (context or {}).items():
            if value is not self._context.get(variable, ABSENT) and (traced := traced_in(value)):
                found.append(Leftover(f"the ContextVar {variable.name}", traced))
        return found


_NO_HOLDERS = (*PLAIN, ModuleType, Enum)
_WRAPPERS = frozenset({staticmethod, classmethod, functools.partial})
_HOLD_NOTHING = frozenset(
    {
        *PLAIN,
        *(tuple, frozenset, range, slice, property, bytearray, object, type(...)),
        *(ModuleType, BuiltinFunctionType, WrapperDescriptorType, MethodDescriptorType, GenericAlias, UnionType),
    }
)
"""Types of most values in most modules: they hold no traced value."""


def _is_holder(value: Any) -> bool:
    is_users = isinstance(value, threading.local) or type(value).__module__ not in _PLAIN_MODULES
    return is_users and attributes_of(value) is not None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object, without asking its `__getattr__`."""
    if isinstance(value, threading.local):
        return vars(value)
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


_PLAIN_MODULES = frozenset(
    {"builtins", "types", "typing", "functools", "re", "enum", "abc", "logging", "torch", "weakref"}
)


_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


NOT_THE_USERS: set[str] = set()
"""Names of modules that are known not to be the user's: there are thousands."""


@functools.lru_cache(maxsize=4096)
def _is_users(name: str, file: str) -> bool:
    """Whether a module is neither a part of Python nor installed."""
    if name == "__main__":
        return True
    root = name.partition(".")[0]
    if not file or root in sys.stdlib_module_names or root == "wholestep":
        return False
    return not any(part in file for part in _INSTALLED)


class _Key:
    """The key of an entry that was added to a dict."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __str__(self) -> str:
        return f"[{self.key!r}]" if isinstance(self.key, (*PLAIN, tuple)) else f"[a {type(self.key).__name__}]"


def _added(container: Any, before: Any) -> Iterator[tuple[Any, Any]]:
    """Items that are other objects than before, each with the text for its place."""
    if isinstance(container, dict):
        if len(container) == len(before) and all(map(is_, container.values(), before.values())):
            return
        for key, value in list(container.items()):
            if value is not before.get(key, ABSENT):
                yield _Key(key), value
    elif len(container) != len(before) or not all(map(is_, container, before)):
        known = {id(item) for item in before}
        for i, item in enumerate(container):
            if id(item) not in known:
                yield "" if isinstance(container, set) else f"[{i}]", item


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return ABSENT
