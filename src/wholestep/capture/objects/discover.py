"""Find what a step works on: modules, optimizers, scalers, schedulers, tensors, generators.

They are looked for in the arguments, in the function's closure, in the globals it names, in `self`, and in what those
hold (lists, dicts, attributes of plain objects, functions of the user). Each gets the path by which a person would
reach it; the first path found wins.
"""

from __future__ import annotations

import dis
import functools
import inspect
import random
import re
import weakref
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.objects.discover_sources import OtherSources, SourceWalk
from wholestep.capture.objects.object_search import Chain, has_own_dict, search
from wholestep.capture.objects.user_code import is_foreign, is_installed
from wholestep.capture.python_reads.stand_ins import IMMUTABLE, with_parts
from wholestep.errors import UnsupportedError, WrappedError
from wholestep.ir.captured_step import ObjectLink
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.call_tree import flatten, name_leaves
from wholestep.ir.user_objects.plain_contents import CONTAINERS, has_attributes, own_dict
from wholestep.ir.user_objects.plain_contents import PLAIN as _PLAIN
from wholestep.ir.user_objects.slots import CellSlot, DefaultsSlot, FixedSlot, MappingSlot, SequenceSlot, Slot
from wholestep.options import Options
from wholestep.parallel.place_models import Placing, placed_by_plan
from wholestep.parallel.plan import Plan
from wholestep.parallel.torch_wrappers import plan_of_wrappers
from wholestep.torch_private.autograd import tensor_hooks
from wholestep.torch_private.distributed import default_group
from wholestep.torch_private.guard_checks import generator_key
from wholestep.torch_private.modules_and_optimizers import (
    MODULE_INTERNALS,
    OPTIMIZER_INTERNALS,
    global_module_hooks,
    module_hooks,
    optimizer_step_hooks,
)

_MAX_DEPTH = 6
TARGETS = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_NESTS = (list, tuple, dict, set, frozenset, deque)


@dataclass
class World:
    """All objects that a step can reach and that may hold state."""

    modules: dict[nn.Module, str] = field(default_factory=dict)
    """Every module (sub-modules too) with its path."""
    optimizers: dict[Optimizer, str] = field(default_factory=dict)
    schedulers: dict[LRScheduler, str] = field(default_factory=dict)
    scalers: dict[Any, str] = field(default_factory=dict)
    holders: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """Plain objects (a Trainer, a config) by identity."""
    tensors: dict[int, tuple[Tensor, Slot]] = field(default_factory=dict)
    """Tensors that are not a parameter or buffer of a module, by identity."""
    other_slots: list[tuple[Tensor, Slot]] = field(default_factory=list)
    """Further places that hold a tensor which was already found (`_flat_weights` of an RNN)."""
    containers: list[tuple[Any, str]] = field(default_factory=list)
    """Lists and dicts that the step's code names or its modules hold."""
    generators: dict[int, tuple[torch.Generator, str]] = field(default_factory=dict)
    variables: list[tuple[str, Slot, Any]] = field(default_factory=list)
    """What closures and globals that the step's code names are bound to: path, slot, value."""
    reads_param_groups: bool = False
    """Whether code of the user's names param groups: it can tell `1` from `1.0` there."""
    asks_for_ids: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Global namespaces of user code that calls `id`, by identity."""
    asks_for_types: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Global namespaces of user code that calls `type`, by identity."""
    random_objects: list[tuple[Any, str]] = field(default_factory=list)
    """Generators of Python and numpy (`random.Random`, `numpy.random.Generator`) that the step can reach."""
    sources: OtherSources = field(default_factory=OtherSources)
    """Classes, Python modules, thread locals and other places that values are read from."""
    find: Callable[[Any, str, Slot | None], None] = field(default=lambda value, path, slot: None)
    """Follows a value that the step reached by a path that discovery did not see."""
    wrappers: list[tuple[Optimizer, str]] = field(default_factory=list)
    """Optimizers that take param groups or state from another one (`AcceleratedOptimizer`); also among the holders."""
    frontier: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """Objects where the walk ended (too deep, `__slots__`, classes, Python modules), by identity: `object_search`
    continues from them."""
    chains: list[Chain] = field(default_factory=list)
    """How objects that were found by being called are reached from the frontier."""
    behind: dict[int, Chain] = field(default_factory=dict)
    """Objects behind the frontier that the step is not known to call, by identity."""

    places: dict[int, list[Slot | None]] = field(default_factory=dict)
    """The slots that hold lists and dicts, by their identity; None where the slot cannot be set."""
    immutables: list[tuple[Slot, Any]] = field(default_factory=list)
    """Tuples, frozensets, partials and defaults of functions that hold tensors, and the slots they lie in."""
    codes: dict[int, tuple[FunctionType, CodeType]] = field(default_factory=dict)
    """Functions of the user's with their code, by identity."""
    builtin_names: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)
    """Global namespaces and the names in user code that they do not have, by identity."""
    class_dicts_of: set[str] = field(default_factory=set)
    """The modules whose classes' dicts code may look into (`vars(Config)`): "" where the user's program does, which may
    look into any; a module of an installed package looks into those of its own classes."""
    links: dict[int, ObjectLink] = field(default_factory=dict)
    """The link by which the walk reached an object, by identity of the object."""

    def links_to(self, called: set[int]) -> list[ObjectLink]:
        """The links by which objects that the step calls are reached from its arguments and variables."""
        found: dict[int, ObjectLink] = {}
        for chain in self.chains:
            for link in chain.links:
                found.setdefault(id(link.child), link)
            called = called | {id(chain.links[0].parent)} if chain.links else called
        for identity in called:
            way = self.links.get(identity)
            while way is not None and id(way.child) not in found:
                found[id(way.child)] = way
                way = self.links.get(id(way.parent))
        return list(found.values())

    def forget_search(self) -> None:
        """Drop what only the search needed: a graph must not keep a batch alive."""
        for found in (self.links, self.frontier, self.behind):
            found.clear()
        self.chains.clear()

    def sees_dict_of(self, cls: type) -> bool:
        """Whether user code may look into the dict of a class."""
        return "" in self.class_dicts_of or cls.__module__ in self.class_dicts_of

    def knows(self, value: Any) -> bool:
        """Whether an optimizer, scheduler, scaler or module was found."""
        if isinstance(value, weakref.ProxyTypes):
            return True  # the walk went to what it stands for
        return any(value in found for found in (self.optimizers, self.schedulers, self.scalers, self.modules))


def discover(
    fn: Callable[..., Any],
    arguments: Iterable[tuple[str, Any]],
    called: Callable[[Any], bool] = lambda value: False,
    *,
    hooks: bool = False,
) -> World:
    """Walk the arguments, then the function. `called`: objects behind the frontier that the step is known to call.
    `hooks`: also walk what hooks of modules, parameters and optimizers read."""
    walk = _Walk()
    for name, value in arguments:
        walk.visit(value, name, 0, None)
    walk.function(fn, "", 0)
    world = walk.world
    if hooks:
        walk.hooks()
    walk.library_classes()
    behind = search(list(world.frontier.values()), TARGETS, world.knows)
    for chain in behind:
        if called(chain.target):
            world.chains.append(chain)
            for holder, path in chain.holders():
                walk.visit(holder, path, 0, None)
            walk.visit(chain.target, chain.path, 0, None)
    for chain in behind:
        for holder, path in chain.holders():
            walk.visit(holder, path, _MAX_DEPTH, None)
    world.behind = {id(chain.target): chain for chain in behind if not world.knows(chain.target)}
    world.find = lambda value, path, slot: walk.visit(value, path, _MAX_DEPTH - 2, slot)
    return world


class _Walk:
    def __init__(self) -> None:
        self.world = World()
        self._seen: set[int] = set()
        self._walked_classes: set[int] = set()
        self._keep: list[Any] = []
        self._within: list[Any] = []
        """The objects whose contents are being visited."""
        self._codes: dict[tuple[int, ...], FunctionType] = {}
        self._variable_owners: dict[str, Any] = {}
        """The cell, or the globals, of the first variable of a name."""
        self._sources = SourceWalk(self.world.sources, self.world.variables, self.visit, self._methods)

    def visit(self, value: Any, path: str, depth: int, slot: Slot | None) -> None:
        if value.__class__ is not type(value):
            self._proxy(value, path, depth)
            return
        if value is None or (isinstance(value, _PLAIN) and not has_attributes(value)):
            return
        if isinstance(value, Tensor) and slot is not None:
            self.world.tensors.setdefault(id(value), (value, slot))  # an argument may lie in an attribute, too
            if value.requires_grad:
                self.world.other_slots.append((value, slot))
        if self._sources.stands_in(value, path, slot):
            return
        if isinstance(value, CONTAINERS):
            self.world.places.setdefault(id(value), []).append(slot)
        if isinstance(value, IMMUTABLE) and slot is not None and not isinstance(slot, FixedSlot):
            self._immutable(value, slot)
        if id(value) in self._seen:
            return
        if self._within and slot is not None and id(value) not in self.world.links:
            named = None if isinstance(self._within[-1], deque | set) else slot.get
            self.world.links[id(value)] = ObjectLink(self._within[-1], value, path, named)
        if depth > _MAX_DEPTH:
            self.world.frontier[id(value)] = (value, path)
            if isinstance(value, TARGETS) or not (self._within and isinstance(self._within[-1], _NESTS)):
                return  # containers are followed to any depth: the step may read them without a trace
        if isinstance(value, dict) and not _can_be_read(value):
            return
        if isinstance(value, CONTAINERS):
            self.world.containers.append((value, path))
        self._seen.add(id(value))
        self._keep.append(value)
        self._within.append(value)
        self._visit(value, path, depth, slot)
        self._within.pop()

    def _proxy(self, value: Any, path: str, depth: int) -> None:
        """Visit an object that reports another class as its own: a weak proxy, a mock, a proxy."""
        if isinstance(value, weakref.ProxyTypes):
            try:
                self.visit(value.__init__.__self__, path, depth, None)
            except ReferenceError:  # its referent is gone
                return
        elif id(value) not in self._seen and not is_foreign(type(value)):
            self._seen.add(id(value))
            self._keep.append(value)
            self._plain_object(value, path, depth)

    def _immutable(self, value: Any, slot: Slot) -> None:
        """A tuple, a `partial` or the like: rebuilt with fakes and stand-ins while the step is traced."""
        if isinstance(slot, DefaultsSlot):
            self._sources.stands_in(value, slot.path, slot)
        if with_parts(value, lambda part: None if isinstance(part, Tensor) else part) is not value:
            self.world.immutables.append((slot, value))

    def _visit(self, value: Any, path: str, depth: int, slot: Slot | None) -> None:
        world = self.world
        if isinstance(value, (*CONTAINERS, tuple, frozenset)) and not is_foreign(type(value)):
            self._plain_object(value, path, depth)  # a dict with attributes
        if isinstance(value, nn.Module):
            self._module(value, path, depth)
        elif isinstance(value, Optimizer):
            self._optimizer(value, path, depth)
        elif isinstance(value, LRScheduler):
            world.schedulers[value] = path
            self.visit(value.optimizer, f"{path}.optimizer", depth + 1, None)
        elif isinstance(value, torch.amp.GradScaler):
            world.scalers[value] = path
        elif isinstance(value, Tensor):
            if slot is not None:
                world.tensors[id(value)] = (value, slot)
        elif isinstance(value, torch.Generator):
            world.generators[generator_key(value)] = (value, path)
        elif isinstance(value, dict | UserDict):
            mapping = value.data if isinstance(value, UserDict) else value
            if mapping is not value:
                world.containers.append((mapping, path))
            for key, item in list(mapping.items()):
                where = f"{path}[{key!r}]"
                self.visit(item, where, depth + 1, MappingSlot(InputKind.CAPTURED, where, None, mapping, key))
        elif isinstance(value, list | deque):
            for i, item in enumerate(value):
                where = f"{path}[{i}]"
                self.visit(item, where, depth + 1, SequenceSlot(InputKind.CAPTURED, where, None, value, i))
        elif isinstance(value, tuple | set | frozenset):
            for i, item in enumerate(value):
                where = f"{path}[{i}]"
                self.visit(item, where, depth + 1, FixedSlot(InputKind.CAPTURED, where, None, item))
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            self.function(value, path, depth)
            if isinstance(value, FunctionType) and vars(value):
                world.frontier[id(value)] = (value, path)
        elif hasattr(type(value), "__wholestep_function__"):
            self.function(value.__wholestep_function__, path, depth)
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            if value.__self__ is not None and not isinstance(value.__self__, ModuleType | type):
                self.visit(value.__self__, path, depth, None)
        elif is_random_object(value):
            world.random_objects.append((value, path))
        elif isinstance(value, Enum):
            self._sources.class_(type(value), depth)
        elif self._sources.visit_source(value, path, depth):
            world.frontier[id(value)] = (value, path)
        elif _is_plain_object(value):
            self._plain_object(value, path, depth)
        else:
            world.frontier[id(value)] = (value, path)

    def _plain_object(self, value: Any, path: str, depth: int) -> None:
        self._sources.members(value, path, depth)
        if has_own_dict(value):
            self.world.holders[id(value)] = (value, path)
            self._attributes(value, path, depth)
        else:
            self.world.frontier[id(value)] = (value, path)
        self._sources.class_(type(value), depth)

    def function(self, fn: Any, path: str, depth: int) -> None:
        """Closure, globals named by the code, defaults, and the object a method is bound to."""
        if isinstance(fn, functools.partial):
            if id(fn.keywords) not in self._seen:
                self._seen.add(id(fn.keywords))
                self._keep.append(fn.keywords)
                self.world.containers.append((fn.keywords, f"{path}.keywords"))
            for i, arg in enumerate(fn.args):
                self.visit(arg, f"{path}.args[{i}]", depth + 1, None)
            for name, arg in fn.keywords.items():
                self.visit(arg, name, depth + 1, None)
            fn = fn.func
        if isinstance(fn, MethodType):
            self.visit(fn.__self__, "self", depth, None)
            fn = fn.__func__
        if hasattr(type(fn), "__wholestep_function__"):
            fn = fn.__wholestep_function__
        if not isinstance(fn, FunctionType) or is_foreign(fn) or _is_of_bar(fn):
            if not isinstance(fn, FunctionType | type) and callable(fn):
                self.visit(fn, path or type(fn).__name__, depth, None)
            return
        self._variables(fn, depth)
        self._attributes_and_defaults(fn, path or fn.__name__, depth)
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self.visit(wrapped, path, depth, None)

    def _attributes_and_defaults(self, fn: FunctionType, path: str, depth: int) -> None:
        self._sources.function(fn, path, depth)
        if fn.__defaults__:
            names = fn.__code__.co_varnames[: fn.__code__.co_argcount][-len(fn.__defaults__) :]
            self._immutable(fn.__defaults__, DefaultsSlot(InputKind.CAPTURED, ", ".join(names), None, fn))
            for name, default in zip(names, fn.__defaults__, strict=False):
                self.visit(default, name, depth + 1, FixedSlot(InputKind.CAPTURED, name, None, default))

    def library_classes(self) -> None:
        world = self.world
        self._sources.library_classes([*world.modules, *world.optimizers, *world.schedulers, *world.scalers])

    def hooks(self) -> None:
        """The code of hooks, which run in the step, and what they are bound to."""
        for hook in global_module_hooks():
            self._hook(hook, "every module")
        for module, path in list(self.world.modules.items()):
            for hook in module_hooks(module):
                self._hook(hook, path)
            for name, parameter in module._parameters.items():
                for hook in tensor_hooks(parameter) if parameter is not None else ():
                    self._hook(hook, f"{path}.{name}")
        for optimizer, path in list(self.world.optimizers.items()):
            for hook in optimizer_step_hooks(optimizer):
                self._hook(hook, path)

    def _hook(self, hook: Any, path: str) -> None:
        where = f"a hook of {path}"
        if isinstance(hook, MethodType):
            self.visit(hook.__self__, f"{where}: {type(hook.__self__).__name__}", 1, None)
        self.visit(hook, where, 1, None)

    def _methods(self, cls: type, depth: int) -> None:
        """Visit what the code of a user class's methods reads: closures, globals, default arguments."""
        if id(cls) in self._walked_classes or depth > _MAX_DEPTH:
            return
        self._walked_classes.add(id(cls))
        for base in cls.__mro__:
            if not is_foreign(base):
                self.world.frontier[id(base)] = (base, base.__name__)
            for member in list(vars(base).values()) if not is_foreign(base) else ():
                for found in self._sources.functions_in(member, base.__name__, max(depth, _MAX_DEPTH - 2)):
                    if id(found) not in self._seen:
                        self._seen.add(id(found))
                        self._variables(found, max(depth, _MAX_DEPTH - 2))
                        self._attributes_and_defaults(found, found.__qualname__, max(depth, _MAX_DEPTH - 2))

    def _variables(self, fn: FunctionType, depth: int) -> None:
        cells = fn.__closure__ or ()
        self.world.codes[id(fn)] = (fn, fn.__code__)
        known = (id(fn.__code__), id(fn.__globals__), *map(id, cells))  # one code may close over several variables
        if known in self._codes:
            return
        self._codes[known] = fn
        self.world.reads_param_groups |= "param_groups" in fn.__code__.co_names
        slots: list[tuple[str, Slot]] = []
        for name, cell in zip(fn.__code__.co_freevars, cells, strict=True):
            if name != "dispatch_cache" or fn.__code__.co_filename != functools.__file__:  # of singledispatch
                slots.append((name, CellSlot(InputKind.CAPTURED, name, None, cell)))
        named = _global_names(fn.__code__)
        if "type" in named and "type" not in fn.__globals__:
            self.world.asks_for_types[id(fn.__globals__)] = fn.__globals__
        if "id" in named and "id" not in fn.__globals__:
            self.world.asks_for_ids[id(fn.__globals__)] = fn.__globals__
        if _LOOKS_UP & {*named, *fn.__code__.co_names}:
            named = named | _spelled(fn.__code__, fn.__globals__)
        absent = self.world.builtin_names.setdefault(id(fn.__globals__), (fn.__globals__, set()))[1]
        for name in sorted(named):
            if name not in fn.__globals__:
                absent.add(name)
            else:
                slots.append((name, MappingSlot(InputKind.CAPTURED, name, None, fn.__globals__, name)))
        for name, slot in slots:
            place = slot.cell if isinstance(slot, CellSlot) else fn.__globals__
            if self._variable_owners.setdefault(name, place) is not place:
                name = f"{fn.__module__}.{fn.__qualname__}.{name}"  # another variable of that name
                slot = replace(slot, path=name)
            try:
                value = slot.get()
            except ValueError:  # an empty cell
                continue
            self._sources.named_value(value)
            if isinstance(value, ModuleType | type):
                self.world.frontier[id(value)] = (value, name)
            if isinstance(value, ModuleType | type) and is_foreign(value):
                self._sources.stands_in(value, name, slot)
                continue
            self.world.variables.append((name, slot, value))
            self.visit(value, name, depth + 1, slot)
        self._sources.module_attributes(fn, fn.__code__, depth)
        if _ASKS_FOR_DICTS & {*named, *fn.__code__.co_names}:
            self.world.class_dicts_of.add(str(fn.__module__) if is_installed(fn.__code__) else "")

    def _module(self, root: nn.Module, path: str, depth: int) -> None:
        for name, module in root.named_modules(remove_duplicate=True):
            _refuse_wrapper(module, f"{path}.{name}" if name else path)
            self._seen.add(id(module))
            where = f"{path}.{name}" if name else path
            self.world.modules.setdefault(module, where)
            if type(module).__name__ == "DistributedDataParallel" and is_foreign(type(module)):
                continue  # its own attributes belong to its reducer
            self._sources.class_(type(module), max(depth, _MAX_DEPTH - 2))
            for key, value in list(vars(module).items()):
                if key in MODULE_INTERNALS or isinstance(value, _PLAIN) or value is None:
                    continue
                attr = f"{where}.{key}"
                slot = MappingSlot(InputKind.CAPTURED, attr, None, vars(module), key)
                self.visit(value, attr, max(depth + 1, _MAX_DEPTH - 2), slot)

    def _optimizer(self, optimizer: Optimizer, path: str, depth: int) -> None:
        for key, value in list(vars(optimizer).items()):
            if key in OPTIMIZER_INTERNALS or isinstance(value, _PLAIN):
                continue
            slot = MappingSlot(InputKind.CAPTURED, f"{path}.{key}", None, vars(optimizer), key)
            self.visit(value, f"{path}.{key}", depth + 1, slot)
        if owns(optimizer, "param_groups") and owns(optimizer, "state"):
            self.world.optimizers[optimizer] = path
            if isinstance(vars(optimizer).get("defaults"), dict):
                self.world.containers.append((optimizer.defaults, f"{path}.defaults"))
        else:
            self.world.wrappers.append((optimizer, path))
            self.world.holders[id(optimizer)] = (optimizer, path)
        self._sources.class_(type(optimizer), max(depth, _MAX_DEPTH - 2))

    def _attributes(self, value: Any, path: str, depth: int) -> None:
        for key, item in list(own_dict(value).items()):
            where = f"{path}.{key}"
            self.visit(item, where, depth + 1, MappingSlot(InputKind.CAPTURED, where, None, own_dict(value), key))


def owns(optimizer: Optimizer, name: str) -> bool:
    """Whether an optimizer stores its param groups or its state itself; some read those of another one."""
    return name in vars(optimizer) and not isinstance(inspect.getattr_static(type(optimizer), name, None), property)


_WRAPPERS = {"FullyShardedDataParallel", "DataParallel"}


def _refuse_wrapper(module: nn.Module, path: str) -> None:
    """Wrappers communicate in hooks of the real parameters, which a trace on fakes would silently leave out; code of
    TorchScript runs past all dispatch modes."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{path} is a TorchScript module.",
            fix="use the module that it was made from; scripted functions are captured.",
        )
    kinds = {c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.")}
    found = kinds & _WRAPPERS
    if found:
        raise WrappedError(
            f"{path} is a {found.pop()}, whose communication happens outside of the step's own code.",
            fix="pass the plain module (wrapper.module), and parallel=ws.Replicate(mesh) or ws.FullyShard(mesh).",
        )


def _is_of_bar(function: FunctionType) -> bool:
    """Whether a function prints a bar of tqdm: the calls of a bar are replayed, and how wide it is reaches no step."""
    return (function.__module__ or "").startswith("tqdm.")


_OPEN_LIBRARIES = ("transformers", "torch.distributions")
"""Libraries whose objects hold values that a step reads."""


_OPEN_STANDARD = frozenset({"collections", "configparser", "contextlib", "functools", "statistics", "string"})
"""Modules of Python whose objects are written in Python and hold values."""


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, type | ModuleType | BuiltinFunctionType | Enum):
        return False
    if isinstance(value, SimpleNamespace | Namespace):
        return True
    place = str(type(value).__module__)
    return not is_foreign(type(value)) or place.startswith(_OPEN_LIBRARIES) or place.split(".")[0] in _OPEN_STANDARD


def is_random_object(value: Any) -> bool:
    """Whether an object is a random generator of Python or NumPy."""
    generators = numpy.random
    kinds = (random.Random, generators.Generator, generators.RandomState, generators.BitGenerator)
    return isinstance(value, kinds)


_ASKS_FOR_DICTS = frozenset({"vars", "__dict__", "getmembers", "getmembers_static", "getattr_static"})
_LOOKS_UP = frozenset({"globals", "eval", "exec", "__globals__", "f_globals"})
"""Names by which code reads and sets globals whose names it spells."""


def _spelled(code: CodeType, namespace: dict[str, Any]) -> frozenset[str]:
    """The names of globals that code may look up by text: `globals()["G"] += 1`, `eval("G * 2")`.

    Those that it spells; where it spells none, all plain values there are.
    """
    strings = [const for const in _constants(code) if isinstance(const, str)]
    spelled = {name for text in strings for name in re.findall(r"[^\W\d]\w*", text)}
    found = {name for name in spelled if name in namespace and not name.startswith("__")}
    if not found:
        found = {n for n, v in namespace.items() if not n.startswith("__") and isinstance(v, (*_PLAIN, *_NESTS))}
    return frozenset(found)


def _constants(code: CodeType) -> Iterator[Any]:
    for const in code.co_consts:
        yield const
        if isinstance(const, CodeType):
            yield from _constants(const)


@lru_cache(maxsize=8192)
def _global_names(code: CodeType) -> frozenset[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _global_names(const)
    return frozenset(names)


def _can_be_read(mapping: dict[Any, Any]) -> bool:
    """False for a dict that makes its values when they are asked for, and cannot make all of them: transformers' table
    of all configurations imports a module for each."""
    if type(mapping).__getitem__ is dict.__getitem__:
        return True
    try:
        for _ in mapping.items():
            pass
    except Exception:
        return False
    return True


def find_models(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Placing:
    """The models and optimizers of a step that are not yet in the form of a plan."""
    flat = flatten((args, kwargs))
    leaves = zip(name_leaves(fn, flat, len(args)), flat.leaves, strict=True)
    assert options.parallel is not None
    return Placing(options.parallel, discover(fn, leaves, lambda target: True))


def plan_of_models(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Plan | None:
    """What torch has made of the models of a step (`DistributedDataParallel`, `fully_shard`), as a plan."""
    if default_group() is None:
        return None
    flat = flatten((args, kwargs))
    leaves = zip(name_leaves(fn, flat, len(args)), flat.leaves, strict=True)
    world = discover(fn, leaves, lambda target: isinstance(target, nn.Module))
    return plan_of_wrappers(world, placed_by_plan(world).__contains__)
