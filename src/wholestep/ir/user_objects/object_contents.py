"""What a Python object holds, and how its contents are restored in place.

    children_of(obj)   (label, child) pairs: `.name` and `[0]` follow the path of `obj`, a bare name replaces it
    saved(obj)         a function that gives `obj` back the contents it has now; None where none can change
    named_by(fn)       variables of a function: closure cells, globals, attributes of the Python modules among them

All look at one object only; `reachable` walks from one to the next. Base-class methods are used throughout, so that no
property, `__getattr__` or overridden `__setitem__` of the user runs. Code of torch, of the standard library and of
installed packages is not followed: instances of their classes are state, their functions are not.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.ir.user_objects.plain_contents import PLAIN

Child = tuple[str, Any]
Restore = Callable[[], None]

_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def children_of(obj: Any) -> list[Child]:
    """What one object that is not a dict refers to and that may hold state, in a fixed order."""
    if isinstance(obj, list | tuple | deque):
        names = getattr(type(obj), "_fields", None)  # a named tuple
        labels = [f".{n}" for n in names] if names and len(names) == len(obj) else [f"[{i}]" for i in range(len(obj))]
        return [*zip(labels, obj, strict=True), *_own_attributes(obj)]
    if isinstance(obj, set | frozenset):
        return [(f"[{i}]", item) for i, item in enumerate(obj) if not isinstance(item, PLAIN)]
    if isinstance(obj, functools.partial):
        return [(".func", obj.func), (".args", obj.args), (".keywords", obj.keywords)]
    if isinstance(obj, MethodType):
        return [("self", obj.__self__), ("", obj.__func__)]
    if isinstance(obj, FunctionType):
        return _of_function(obj)
    if isinstance(obj, type):
        return [(f".{name}", unwrapped(value)) for name, value in vars(obj).items() if not name.startswith("__")]
    if isinstance(obj, Tensor):
        return _own_attributes(obj)
    if isinstance(obj, nn.Module):
        return _of_module(obj)
    return _own_attributes(obj)


def saved(obj: Any) -> Restore | None:
    """How to restore what one object holds. Contents that are still the same objects are left alone."""
    if isinstance(obj, OrderedDict):
        return _saved_mapping(obj, OrderedDict.clear, OrderedDict.__setitem__)
    if isinstance(obj, dict):
        return _both(_saved_mapping(obj, dict.clear, dict.__setitem__), _saved_attributes(obj))
    if isinstance(obj, list):
        items = list(obj)
        return _both(lambda: list.__setitem__(obj, slice(None), items), _saved_attributes(obj))
    if isinstance(obj, deque):
        queued = list(obj)

        def refill() -> None:
            obj.clear()
            obj.extend(queued)

        return refill
    if isinstance(obj, set):
        members = set(obj)

        def reunite() -> None:
            set.intersection_update(obj, members)
            set.update(obj, members)

        return reunite
    if isinstance(obj, type):
        return _saved_class(obj)
    if isinstance(obj, bytearray):
        content = bytes(obj)
        return lambda: obj.__setitem__(slice(None), content)
    if isinstance(obj, np.ndarray):
        return _saved_array(obj)
    return _saved_random(obj) or _both(_saved_attributes(obj), _saved_slots(obj))


def saved_variable(place: CellType | dict[str, Any], name: str) -> Restore:
    """How to rebind a closure variable or a global to its current value, or to unbind it."""
    if isinstance(place, dict):
        missing = object()
        value = place.get(name, missing)

        def bind() -> None:
            if value is missing:
                place.pop(name, None)
            else:
                place[name] = value

        return bind
    cell: CellType = place
    try:
        content = cell.cell_contents
    except ValueError:
        return lambda: None  # empty: the enclosing function has not reached it

    def fill() -> None:
        cell.cell_contents = content

    return fill


def is_random_object(obj: Any) -> bool:
    """True for a random generator of torch, Python or NumPy."""
    if isinstance(obj, torch.Generator | random.Random):
        return True
    return type(obj).__module__.startswith("numpy.random") and hasattr(obj, "bit_generator")


def random_state_of(obj: Any) -> Any:
    """The state of a generator, in the form in which it can be set."""
    if isinstance(obj, torch.Generator):
        return obj.get_state()
    if isinstance(obj, random.Random):
        return obj.getstate()
    return obj.bit_generator.state


def _saved_random(obj: Any) -> Restore | None:
    if not is_random_object(obj):
        return None
    state = random_state_of(obj)
    if isinstance(obj, torch.Generator):
        return lambda: (obj.set_state(state), None)[1]
    if isinstance(obj, random.Random):
        return lambda: obj.setstate(state)

    def seed_again() -> None:
        obj.bit_generator.state = state

    return seed_again


def _saved_array(array: np.ndarray[Any, Any]) -> Restore | None:
    if not array.flags.writeable:
        return None
    content = array.copy()

    def write() -> None:
        array[...] = content

    return write


def has_contents(obj: Any) -> bool:
    """True if an object holds something that `children_of` and `saved` see."""
    if isinstance(obj, dict | list | tuple | deque | set | frozenset | bytearray | np.ndarray) or is_random_object(obj):
        return True
    return _dict_of(obj) is not None or any("__slots__" in vars(cls) for cls in type(obj).__mro__[:-1])


def _of_function(fn: FunctionType) -> list[Child]:
    found: list[Child] = [(name, value) for name, _, value in named_by(fn)]
    found += [(f".defaults[{i}]", value) for i, value in enumerate(fn.__defaults__ or ())]
    found += [(f".{name}", value) for name, value in (fn.__kwdefaults__ or {}).items()]
    return [*found, *_own_attributes(fn)]


def _of_module(module: nn.Module) -> list[Child]:
    """Parameters, buffers and sub-modules by their names; then the tables themselves, which a step may edit."""
    found: list[Child] = []
    for table in _MODULE_TABLES:
        found += [(f".{name}", value) for name, value in vars(module).get(table, {}).items()]
    return found + [(f".{name}", value) for name, value in vars(module).items()]


def _own_attributes(obj: Any) -> list[Child]:
    found = [(f".{name}", value) for name, value in (_dict_of(obj) or {}).items()]
    return found + [(f".{name}", value) for name, _, value in _slots_of(obj)]


def _dict_of(obj: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots_of(obj: Any) -> Iterator[tuple[str, MemberDescriptorType, Any]]:
    """Filled slots of classes written in Python; C types have members of the same kind that are not slots."""
    for cls in type(obj).__mro__:
        if "__slots__" not in vars(cls):
            continue
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and name not in ("__weakref__", "__dict__"):
                try:
                    yield name, member, member.__get__(obj, type(obj))
                except AttributeError:
                    continue  # an empty slot


def _saved_attributes(obj: Any) -> Restore | None:
    attributes = _dict_of(obj)
    return None if attributes is None else _saved_mapping(attributes, dict.clear, dict.__setitem__)


def _saved_slots(obj: Any) -> Restore | None:
    filled = list(_slots_of(obj))
    if not any("__slots__" in vars(cls) for cls in type(obj).__mro__[:-1]) or isinstance(obj, (*PLAIN, tuple)):
        return None

    def refill() -> None:
        known = {name for name, _, _ in filled}
        for name, member, _ in list(_slots_of(obj)):
            if name not in known:
                member.__delete__(obj)
        for _, member, value in filled:
            member.__set__(obj, value)

    return refill


def _saved_mapping(mapping: Any, clear: Callable[[Any], None], put: Callable[[Any, Any, Any], None]) -> Restore:
    items = list(dict.items(mapping))

    def refill() -> None:
        now = list(dict.items(mapping))
        if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
            return
        clear(mapping)
        for key, value in items:
            put(mapping, key, value)

    return refill


def _saved_class(cls: type) -> Restore:
    before = _own_names(cls)

    def put_back() -> None:
        now = _own_names(cls)
        for name in now.keys() - before.keys():
            type.__delattr__(cls, name)
        for name, value in before.items():
            if now.get(name, before) is not value:
                type.__setattr__(cls, name, value)

    return put_back


def _own_names(cls: type) -> dict[str, Any]:
    """The attributes of a class without Python's own (dunder) ones."""
    return {name: value for name, value in vars(cls).items() if not name.startswith("__")}


def _both(first: Restore | None, second: Restore | None) -> Restore | None:
    if first is None or second is None:
        return first or second
    one, other = first, second

    def run() -> None:
        one()
        other()

    return run


def is_optimizer(obj: Any) -> bool:
    """True for an optimizer of torch, or an object with the same interface."""
    return isinstance(obj, Optimizer) or (hasattr(type(obj), "step") and "param_groups" in (_dict_of(obj) or {}))


_KNOWN = frozenset({"torch", "wholestep", "numpy", "transformers", "rich", "builtins"})
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")

Variable = tuple[str, CellType | dict[str, Any], Any]
"""Name, the cell or the dict that binds it, and what it is bound to."""


def named_by(fn: FunctionType) -> Iterator[Variable]:
    """Variables of a user's function that are bound to something."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell, cell.cell_contents
        except ValueError:
            continue  # not filled yet
    if is_foreign(fn.__module__):
        return
    names = _names(fn.__code__)
    for name in sorted(names.variables):
        if name not in fn.__globals__:
            continue
        value = fn.__globals__[name]
        yield name, fn.__globals__, value
        if isinstance(value, ModuleType) and not is_foreign(value.__name__):
            for attribute in sorted(names.attributes & vars(value).keys()):
                yield f"{name}.{attribute}", vars(value), vars(value)[attribute]


def global_names(fn: FunctionType) -> list[tuple[str, dict[str, Any]]]:
    """Globals that a user's function may bind, also those that are not bound yet."""
    if is_foreign(fn.__module__):
        return []
    return [(name, fn.__globals__) for name in sorted(_names(fn.__code__).variables)]


class _Names:
    def __init__(self, code: CodeType) -> None:
        self.variables = {i.argval for i in dis.get_instructions(code) if i.opname in _GLOBALS}
        self.attributes = set(code.co_names)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                inner = _names(const)
                self.variables |= inner.variables
                self.attributes |= inner.attributes


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> _Names:
    return _Names(code)


def unwrapped(member: Any) -> Any:
    """The function behind a static method, class method or property."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


@lru_cache(maxsize=4096)
def is_foreign(module: str | None) -> bool:
    """True if a Python module is torch's, the standard library's or an installed package: not the user's own code."""
    root = (module or "builtins").split(".")[0]
    if root in _KNOWN or root in _STANDARD:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return any(file.startswith(folder) for folder in installed if folder)
