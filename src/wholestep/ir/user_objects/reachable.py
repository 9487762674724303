"""Everything that a step can reach and change, each with the path by which a person would write it.

    train_step(model, optimizer, batch)      model.fc.weight            parameters
                                             model.fc.weight.grad       gradients
                                             optimizer.state[model.fc.weight].exp_avg
                                             torch.default_generator    RNG
                                             self.seen, counts['loss']  Python attributes

The walk starts at the arguments and the function (its closure, the globals it names, `self`) and goes through
containers, attributes, slots, closures and the user's classes, to any depth. What cannot be saved or must not be
copied (a logger, a lock, a data set, a process group) is not entered; `shared` names it.
"""

from __future__ import annotations

import functools
import inspect
import io
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from wholestep.ir.user_objects.object_contents import (
    children_of,
    global_names,
    has_contents,
    is_foreign,
    is_optimizer,
    is_random_object,
    named_by,
)
from wholestep.ir.user_objects.plain_contents import PLAIN
from wholestep.ir.user_objects.wrapper_tensors import inner_tensors, is_wrapper
from wholestep.torch_private.modules_and_optimizers import MODULE_INTERNALS


class Part(StrEnum):
    """What a value is to the user: one row of a report."""

    RESULT = "result"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer state"
    SCHEDULE = "schedulers, scalers"
    BATCH = "batch"
    RNG = "RNG"
    PYTHON = "Python attributes"


_INHERITED = frozenset({Part.RESULT, Part.OPTIMIZER, Part.SCHEDULE, Part.BATCH})
_BOOKKEEPING = frozenset({"._opt_called"})
"""Attributes that torch sets for its own warnings."""
_CLOSED = (
    "logging",
    "threading",
    "_thread",
    "io",
    "_io",
    "socket",
    "ssl",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "queue",
    "_queue",
    "subprocess",
    "selectors",
    "ctypes",
    "_ctypes",
    "mmap",
    "sqlite3",
    "tqdm",
    "rich",
    "wandb",
    "tensorboard",
    "tensorboardX",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "torch.distributed",
    "torch.profiler",
    "torch.cuda",
)
"""Packages whose objects do I/O, or synchronise: both runs share them."""
_TABLES = ("torch._ops", "torch._library", "typing")
"""Modules whose objects are tables of functions and types, filled as they are used."""
_WITHOUT_STATE = (
    BuiltinFunctionType,
    ModuleType,
    CodeType,
    Enum,
    PurePath,
    property,
    types.GenericAlias,
    types.MappingProxyType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
    range,
    slice,
    type(...),
    type(NotImplemented),
    weakref.ReferenceType,
    torch.memory_format,
)


@dataclass(frozen=True)
class Seen:
    """One object, where it was found first."""

    path: str
    part: Part
    obj: Any
    observed: bool = True
    """True if the user can see a difference in it; torch's own bookkeeping is saved and not compared."""


@dataclass
class Reached:
    """What a walk found."""

    tensors: list[Seen] = field(default_factory=list)
    holders: list[Seen] = field(default_factory=list)
    """Objects whose contents can change: containers, attributes, slots, classes, generators, arrays."""
    variables: list[tuple[Any, str]] = field(default_factory=list)
    """Cells and dicts of globals, with the names that the user's code may bind in them."""
    values: dict[str, tuple[Part, Any]] = field(default_factory=dict)
    """Plain values by path."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further paths of tensors to the first one."""
    iterators: list[Seen] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    """Path to type of what was not entered."""


def roots_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments by the names of their parameters, modules first so that their names win; then the function."""
    try:
        bound = dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        bound = {**{f"args[{i}]": value for i, value in enumerate(args)}, **kwargs}
    found = sorted(bound.items(), key=lambda item: not isinstance(item[1], nn.Module))
    return [*found, ("", fn)]


def reach(roots: list[tuple[str, Any]], part: Part | None = None) -> Reached:
    """Walk from the roots. `part`: what tensors right at a root, or in containers there, are."""
    walk = _StateWalk()
    for path, value in roots:
        function = callable(value) and not isinstance(value, nn.Module | Tensor)
        walk.run(value, path, Part.PYTHON if function else part or Part.BATCH)
    return walk.found


class _StateWalk:
    def __init__(self) -> None:
        self.found = Reached()
        self._paths: dict[int, str] = {}
        self._alive: list[Any] = []
        self._stack: list[tuple[Any, str, Part, bool]] = []

    def run(self, value: Any, path: str, part: Part) -> None:
        self._stack.append((value, path, part, True))
        while self._stack:
            self._visit(*self._stack.pop())

    def _visit(self, obj: Any, path: str, part: Part, observed: bool) -> None:
        if isinstance(obj, PLAIN) or obj is None:
            if observed:
                self.found.values.setdefault(path, (part, obj))
            return
        if id(obj) in self._paths:
            if observed and isinstance(obj, Tensor):
                self.found.aliases[path] = self._paths[id(obj)]
            return
        if isinstance(obj, _WITHOUT_STATE) or _is_of(obj, _TABLES):
            return
        self._paths[id(obj)] = path
        self._alive.append(obj)  # alive, so that no other object gets its id
        if isinstance(obj, type):
            if not is_foreign(obj.__module__) and not issubclass(obj, Enum):
                self._holder(Seen(path, Part.PYTHON, obj, observed=False))
            return
        part = self._part(obj, part)
        if isinstance(obj, Tensor):
            self._tensor(obj, path, part, observed)
        elif self._is_closed(obj):
            self.found.shared[path] = type(obj).__qualname__
        elif isinstance(obj, FunctionType | MethodType | functools.partial):
            self._code(obj, path, part)
        elif hasattr(type(obj), "__wholestep_function__"):
            self._push([("", obj.__wholestep_function__)], path, part, observed)
        elif isinstance(obj, Iterator) and not has_contents(obj):
            self.found.iterators.append(Seen(path, part, obj))
        elif not has_contents(obj):
            if not is_foreign(type(obj).__module__):
                self.found.shared[path] = type(obj).__qualname__  # of a compiled extension
        else:
            self._holder(Seen(path, part, obj, observed and not _is_bookkeeping(obj, part)))

    def _part(self, obj: Any, inherited: Part) -> Part:
        if isinstance(obj, nn.Parameter):
            return Part.PARAMETERS
        if is_random_object(obj):
            return Part.RNG
        if is_optimizer(obj):
            return Part.OPTIMIZER
        if isinstance(obj, LRScheduler | torch.amp.GradScaler):
            return Part.SCHEDULE
        if isinstance(obj, Tensor):
            trained = obj.requires_grad and obj.is_leaf and inherited is Part.PYTHON
            return Part.PARAMETERS if trained else inherited
        if inherited is Part.BATCH and not isinstance(obj, list | tuple | dict | set | deque):
            return Part.PYTHON
        return inherited if inherited in _INHERITED else Part.PYTHON

    def _tensor(self, tensor: Tensor, path: str, part: Part, observed: bool) -> None:
        if is_wrapper(tensor):
            self.found.holders.append(Seen(path, part, tensor, observed))
            if observed:
                self._observe(path, part, f"<{type(tensor).__qualname__}>")
            self._push([(f".{name}", each) for name, each in inner_tensors(tensor).items()], path, part, observed)
            self._push(children_of(tensor), path, part, observed)
            return
        self.found.tensors.append(Seen(path, part, tensor, observed))
        if tensor.__dict__:
            self.found.holders.append(Seen(path, part, tensor, observed))
            self._push(children_of(tensor), path, part, observed)
        if observed and tensor.is_leaf:
            self._observe(f"{path}.requires_grad", part, tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            self._stack.append((tensor.grad, f"{path}.grad", Part.GRADIENTS, observed))

    def _code(self, fn: Any, path: str, part: Part) -> None:
        if isinstance(fn, FunctionType):
            self.found.variables += [(place, name) for name, place in global_names(fn)]
            self.found.variables += [(place, name.split(".")[-1]) for name, place, _ in named_by(fn)]
            if vars(fn):
                self.found.holders.append(Seen(path, part, fn, observed=False))
        self._push(children_of(fn), path, part, True)

    def _holder(self, seen: Seen) -> None:
        obj, path, part, observed = seen.obj, seen.path, seen.part, seen.observed
        self.found.holders.append(seen)
        if isinstance(obj, type):
            self._push(children_of(obj), path, part, observed)
            return
        self._push([("", type(obj))], type(obj).__qualname__, Part.PYTHON, False)
        if isinstance(obj, np.ndarray):
            if observed:
                self._observe(path, part, obj.copy())
            return
        if isinstance(obj, list | tuple | set | frozenset | deque) and all(isinstance(item, PLAIN) for item in obj):
            kept = frozenset(obj) if isinstance(obj, set | frozenset) else tuple(obj)
            if observed:
                self._observe(path, part, kept)
            return
        if observed and not is_random_object(obj):
            size = f" of {len(obj)}" if isinstance(obj, list | tuple | set | dict | deque) else ""
            self._observe(path, part, f"<{type(obj).__qualname__}{size}>")
        if isinstance(obj, dict):
            self._mapping(obj, path, part, observed)
        elif isinstance(obj, nn.Module):
            self._module(obj, path, observed)
        elif not is_random_object(obj):
            self._push(children_of(obj), path, part, observed)

    def _module(self, module: nn.Module, path: str, observed: bool) -> None:
        buffers = {id(value) for value in module._buffers.values()}
        later = []
        for label, child in children_of(module):
            part = Part.BUFFERS if id(child) in buffers else Part.PYTHON
            later.append((child, path + label, part, observed and label[1:] not in MODULE_INTERNALS))
        self._stack += reversed(later)

    def _mapping(self, mapping: dict[Any, Any], path: str, part: Part, observed: bool) -> None:
        later: list[tuple[Any, str, Part, bool]] = []
        for i, (key, value) in enumerate(list(dict.items(mapping))):
            label = f".keys[{i}]"
            if isinstance(key, Tensor) and id(key) not in self._paths:
                self._visit(key, path + label, part, observed)
            elif not isinstance(key, (*PLAIN, tuple, type)):
                later.append((key, path + label, part, observed))
            later.append((value, path + self._label(key, i, part), part, observed))
        self._stack += reversed(later)

    def _label(self, key: Any, place: int, part: Part) -> str:
        if isinstance(key, str) and part is Part.OPTIMIZER:
            return f".{key}"
        if isinstance(key, (*PLAIN, tuple)):
            return f"[{key!r}]"
        return f"[{self._paths.get(id(key), f'#{place}')}]"

    def _push(self, children: list[tuple[str, Any]], path: str, part: Part, observed: bool) -> None:
        later = []
        for label, child in children:
            where = path + label if not label or label[0] in ".[" else label
            hidden = label.startswith("._") and ("hook" in label or label in _BOOKKEEPING)
            later.append((child, where, part, observed and not hidden))
        self._stack += reversed(later)

    def _observe(self, path: str, part: Part, value: Any) -> None:
        self.found.values.setdefault(path, (part, value))

    def _is_closed(self, obj: Any) -> bool:
        if isinstance(obj, Dataset | io.IOBase):
            return True
        name = type(obj).__module__ or ""
        if name == "_thread" and type(obj).__name__ == "_local":
            return False
        return _is_of(obj, _CLOSED)


def _is_of(obj: Any, modules: tuple[str, ...]) -> bool:
    name = type(obj).__module__ or ""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def _is_bookkeeping(obj: Any, part: Part) -> bool:
    """True if an object is torch's own and not training state: an entered `torch.autocast` stores the previous mode."""
    is_torchs = type(obj).__module__.split(".")[0] == "torch" and not isinstance(obj, nn.Module | dict)
    return is_torchs and part not in (Part.OPTIMIZER, Part.SCHEDULE, Part.RNG)
