"""Search the object graph for optimizers, schedulers, scalers and modules that `discover` does not reach.

`discover` follows attributes, lists, dicts and closures a few levels deep, because everything that it finds is
guarded. This search goes further (`__slots__`, class attributes, Python modules, bound methods, weak references,
generators, deep nests) and only records how each object is reached. An object counts when the step *calls* it.

    wrapper (slots) --inner--> list --[0]--> optimizer          Chain(target, [ObjectLink, ObjectLink])

Each link can be read again at little cost: a guard compares what it leads to by identity.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor

from wholestep.capture.objects.user_code import is_foreign
from wholestep.ir.captured_step import ObjectLink
from wholestep.ir.user_objects.plain_contents import PLAIN
from wholestep.ir.user_objects.slots import ABSENT

_MOST_OBJECTS = 5_000
_CACHED = type(functools.lru_cache(lambda: None))
_LONGEST = 1_000
"""Of longer containers only the first elements are searched."""
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_CLOSED = frozenset({"torch", "wholestep", "numpy", "logging", "rich", "transformers", "triton", "pytest", "_pytest"})
_NEVER = (*PLAIN, Tensor, CodeType, FrameType, BuiltinFunctionType, property, GetSetDescriptorType)


@dataclass(frozen=True, eq=False)
class Chain:
    """How an object is reached from one that `discover` found."""

    target: Any
    path: str
    links: tuple[ObjectLink, ...]
    origin: str
    """Path of the object where the chain begins."""

    def holders(self) -> Iterator[tuple[Any, str]]:
        """The objects on the way from the origin to the target, with their paths."""
        path = self.origin
        for link in self.links:
            yield link.parent, path
            path = link.path


def search(roots: Iterable[tuple[Any, str]], wanted: tuple[type, ...], known: Callable[[Any], bool]) -> list[Chain]:
    """The wanted objects that are reached from the roots and not known, each by a shortest chain."""
    found: dict[int, Chain] = {}
    came_from: dict[int, ObjectLink | None] = {}
    origins: dict[int, str] = {}
    queue: deque[tuple[Any, str]] = deque()
    for root, path in roots:
        if id(root) not in came_from:
            came_from[id(root)] = None
            origins[id(root)] = path
            queue.append((root, path))
    while queue and len(came_from) < _MOST_OBJECTS:
        value, path = queue.popleft()
        if isinstance(value, wanted):
            if known(value):
                continue
            links = _links_to(value, came_from)
            found[id(value)] = Chain(value, path, links, origins[id(links[0].parent if links else value)])
        for link in links_of(value, path):
            if id(link.child) not in came_from and not isinstance(link.child, _NEVER):
                came_from[id(link.child)] = link  # the link keeps the child alive: its id is not reused
                queue.append((link.child, link.path))
    return list(found.values())


def _links_to(value: Any, came_from: dict[int, ObjectLink | None]) -> tuple[ObjectLink, ...]:
    links: list[ObjectLink] = []
    link = came_from[id(value)]
    while link is not None:
        links.append(link)
        link = came_from[id(link.parent)]
    return tuple(reversed(links))


def links_of(value: Any, path: str) -> Iterator[ObjectLink]:
    """The objects that an object refers to."""
    for name, read in _named(value):
        try:
            child = read()
        except (AttributeError, KeyError, IndexError, ValueError, TypeError):  # an empty cell, slot or reference
            continue
        if child is not ABSENT:
            yield ObjectLink(value, child, f"{path}{name}", read)
    if _is_opaque(value):
        for child in gc.get_referents(value):
            if not isinstance(child, type):
                yield ObjectLink(value, child, path, None)


_Named = Iterator[tuple[str, Callable[[], Any]]]


def _named(value: Any) -> _Named:
    if isinstance(value, dict | UserDict | MappingProxyType):
        # What a dict holds: its class may make another object, slowly, at each `d[key]` (transformers' ACT2FN).
        item = functools.partial(dict.__getitem__, value) if isinstance(value, dict) else value.__getitem__
        for key in list(value)[:_LONGEST]:
            yield f"[{key!r}]" if isinstance(key, PLAIN) else "[..]", functools.partial(item, key)
    elif isinstance(value, list | tuple):
        for i in range(min(len(value), _LONGEST)):
            yield f"[{i}]", functools.partial(value.__getitem__, i)
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield ".__self__", functools.partial(getattr, value, "__self__")
        yield ".__func__", functools.partial(getattr, value, "__func__")
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield f".{name}", functools.partial(getattr, value, name)
    elif isinstance(value, CellType):
        yield "", functools.partial(getattr, value, "cell_contents")
    elif isinstance(value, weakref.ref):
        yield "()", value
    elif isinstance(value, GeneratorType):
        for name in value.gi_frame.f_locals if value.gi_frame is not None else ():
            yield f".{name}", functools.partial(_local, value, name)
    elif isinstance(value, ModuleType | type):
        # `discover` follows what the methods of a class refer to.
        skipped = () if isinstance(value, ModuleType) else (FunctionType, classmethod, staticmethod)
        if not _is_foreign(value):
            for name, member in list(vars(value).items()):
                if not name.startswith("__") and not isinstance(member, skipped):
                    yield f".{name}", functools.partial(vars(value).get, name, ABSENT)
    elif not _is_closed(type(value)):
        yield from _of_object(value)


def _of_object(value: Any) -> _Named:
    if has_own_dict(value):
        attributes = object.__getattribute__(value, "__dict__")
        for name in list(attributes):
            yield f".{name}", functools.partial(attributes.get, name, ABSENT)
    for name, member in slots_of(type(value)):
        yield f".{name}", functools.partial(member.__get__, value)
    yield "", functools.partial(type, value)


def _of_function(function: FunctionType) -> _Named:
    if _is_foreign(function) and not function.__closure__:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"->{name}", functools.partial(getattr, cell, "cell_contents")
    for i in range(len(function.__defaults__ or ())):
        yield f".__defaults__[{i}]", functools.partial((function.__defaults__ or ()).__getitem__, i)
    if not _is_foreign(function):
        for name in _global_names(function.__code__):
            yield f"->{name}", functools.partial(function.__globals__.get, name, ABSENT)
    for name in vars(function):
        yield "" if name == "__wrapped__" else f".{name}", functools.partial(vars(function).get, name, ABSENT)


def has_own_dict(value: Any) -> bool:
    """Whether an object keeps attributes in a dict; a proxy would return that of another object."""
    return type(value).__dictoffset__ != 0


def slots_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The `__slots__` of a class and of those above it, with their descriptors."""
    for base in cls.__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(member, MemberDescriptorType):
                yield name, member


def _local(generator: GeneratorType[Any, Any, Any], name: str) -> Any:
    frame = generator.gi_frame
    return ABSENT if frame is None else frame.f_locals.get(name, ABSENT)


@functools.cache
def _global_names(code: CodeType) -> frozenset[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= _global_names(const)
    return frozenset(found)


def _is_foreign(value: Any) -> bool:
    """A function, class or Python module of torch, of the standard library and the like."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    root = (name or "").split(".")[0] if isinstance(name, str) else ""
    return root in _CLOSED or root in _STANDARD or root == "builtins"


def _is_closed(cls: type) -> bool:
    return (cls.__module__ or "").split(".")[0] in _CLOSED and is_foreign(cls)


def _is_opaque(value: Any) -> bool:
    """An object of a type written in C, whose referents have no names: an iterator, a set, a deque."""
    if isinstance(value, FunctionType | MethodType | ModuleType | type | dict | list | tuple | CellType):
        return False
    if isinstance(value, _CACHED):
        return True
    cls = type(value)
    root = (cls.__module__ or "").split(".")[0]
    return root == "builtins" or (root in _STANDARD and not has_own_dict(value))
