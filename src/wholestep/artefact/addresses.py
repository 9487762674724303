"""Where an object of the user's lies, as data: the links by which it is reached from the step and its arguments.

    train_step(model, optimizer, batch)      arg 0                                       the model
    model.fc.weight                          arg 0, vars, _modules, fc, vars, _parameters, weight
    a variable of an enclosing function      step, cell scale, contents
    a global of the step's Python module     step, globals, "scale"
    a class, a function of a library         by the names of its module and itself

`Walk` finds the addresses of what is reachable now; `Addresses` follows them in another process. Following a link reads
dicts, cells and tuples and calls nothing of the user's: no property, no `__getattr__`, no import.
"""

from __future__ import annotations

import dis
import itertools
import sys
from argparse import Namespace
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.objects.user_code import is_foreign
from wholestep.errors import ArtefactError
from wholestep.ir.user_objects.plain_contents import own_dict
from wholestep.torch_private.autograd import HOOK_ATTRIBUTES
from wholestep.torch_private.distributed import STATE_OF_FULLY_SHARD

_MOST_OBJECTS = 1 << 20
_PLAIN_KEYS = (str, int, bool, type(None))
_ENTERED = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, SimpleNamespace, Namespace, UserDict)
"""Classes of libraries whose objects hold what a step reads."""
_NAMED = (type, BuiltinFunctionType, MethodDescriptorType)
_NEVER_ENTERED = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)

Link = tuple[str, int, Any, str]
"""Kind, the address before it (-1: a root), its key, and the class of what is there."""


@lru_cache(maxsize=1 << 16)  # a step in a framework reaches fifteen thousand functions
def global_names(code: CodeType) -> frozenset[str]:
    """The names of globals that code, and code inside of it, reads or sets."""
    names = names_used(code, _GLOBALS)
    return frozenset(names).union(*(global_names(each) for each in code.co_consts if isinstance(each, CodeType)))


_LOAD_GLOBAL, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.EXTENDED_ARG
_GLOBALS = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"))


def names_used(code: CodeType, opcodes: frozenset[int]) -> set[str]:
    """The names in instructions with these opcodes, read off the bytes: `dis` takes fifty times as long, which would be
    most of a capture where a step reaches ten thousand functions of other packages."""
    text, found, extended = code.co_code, set[str](), 0
    if not opcodes & set(text[::2]):
        return found
    for opcode, low in zip(text[::2], text[1::2], strict=True):
        argument = extended << 8 | low
        extended = argument if opcode == _EXTENDED else 0
        if opcode in opcodes:  # the lowest bit of LOAD_GLOBAL says whether a call follows
            found.add(code.co_names[argument >> 1 if opcode == _LOAD_GLOBAL else argument])
    return found


def class_name(value: Any) -> str:
    """The name of the class of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def name_of(value: Any) -> str | None:
    """`module:qualname` of a class or function that is found by it; None if it is not found there."""
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None and isinstance(value, MethodDescriptorType):
        module = value.__objclass__.__module__
    if not isinstance(module, str) or not isinstance(qualname, str):
        return None
    name = f"{module}:{qualname}"
    return name if named(name) is value else None


def named(name: str) -> Any:
    """What has a name of the form `module:qualname` in a Python module that is loaded; None if there is none."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def follow(value: Any, kind: str, key: Any) -> Any:
    """What a link leads to; raises LookupError if it leads nowhere."""
    if kind == "vars":
        return own_dict(value)
    if kind == "item":
        if isinstance(value, dict):
            return dict.__getitem__(value, key)
        if type(key) is not int or not isinstance(value, list | tuple | deque) or not 0 <= key < len(value):
            raise LookupError(key)
        return list.__getitem__(value, key) if isinstance(value, list) else value[key]
    if kind == "cell" and isinstance(value, FunctionType):
        return dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))[key]
    if kind == "contents" and isinstance(value, CellType):
        return value.cell_contents
    if kind == "globals" and isinstance(value, FunctionType):
        return value.__globals__
    if kind == "default" and isinstance(value, FunctionType):
        return (value.__defaults__ or ())[key]
    if kind == "keywords" and isinstance(value, FunctionType):
        return value.__kwdefaults__
    if kind == "bound" and isinstance(value, MethodType | partial):
        if key not in ("__self__", "__func__", "func", "args", "keywords"):
            raise LookupError(key)
        return object.__getattribute__(value, key)
    if kind == "slot":
        return _member(type(value), key).__get__(value, type(value))
    if kind == "member" and isinstance(value, type):
        found = vars(value)[key]
        return found.__func__ if isinstance(found, staticmethod | classmethod) else found
    if kind == "class":
        return type(value)
    if kind == "nth" and isinstance(value, OrderedDict) and type(key) is int and 0 <= key < len(value):
        return next(itertools.islice(value.values(), key, None))
    if kind == "hooks" and isinstance(value, Tensor):
        return HOOK_ATTRIBUTES[key](value)
    if kind == "base" and isinstance(value, type):
        return value.__mro__[key]
    if kind == "getter" and isinstance(value, property):
        return value.fget
    if kind == "step" and hasattr(type(value), "__wholestep_function__"):
        return value.__wholestep_function__
    raise LookupError(kind)


def _member(cls: type, name: Any) -> MemberDescriptorType:
    for base in cls.__mro__:
        found = vars(base).get(name)
        if isinstance(found, MemberDescriptorType):
            return found
    raise LookupError(name)


def links_from(value: Any) -> Iterator[tuple[str, Any]]:
    """The links that lead on from a value: kind and key."""
    if isinstance(value, _NEVER_ENTERED):
        return
    if isinstance(value, FunctionType):
        if not is_foreign(value):
            yield from (("cell", name) for name in value.__code__.co_freevars)
            yield from (("default", i) for i in range(len(value.__defaults__ or ())))
            yield from [("keywords", None)] if value.__kwdefaults__ else []
            yield "globals", None
        if vars(value):
            yield "vars", None
    elif isinstance(value, CellType):
        yield "contents", None
    elif isinstance(value, MethodType):
        yield from (("bound", "__self__"), ("bound", "__func__"))
    elif isinstance(value, partial):
        yield from (("bound", "func"), ("bound", "args"), ("bound", "keywords"))
    elif isinstance(value, property):
        yield "getter", None
    elif hasattr(type(value), "__wholestep_function__"):
        yield "step", None
    elif isinstance(value, type):
        if not is_foreign(value):
            yield from (("member", name) for name, member in list(vars(value).items()) if _is_member(name, member))
            yield from (("base", i) for i, base in enumerate(value.__mro__) if i and not is_foreign(base))
    elif isinstance(value, ModuleType):
        if not is_foreign(value):
            yield "vars", None
    elif isinstance(value, list | tuple | deque):
        yield from (("item", i) for i in range(len(value)))
    else:
        if isinstance(value, Tensor):
            yield from (("hooks", i) for i, get in enumerate(HOOK_ATTRIBUTES) if get(value))
        if _are_hooks(value):
            yield from (("nth", i) for i in range(len(value)))
        elif isinstance(value, dict):
            yield from (("item", key) for key in list(dict.keys(value)) if _is_key(key))
        if _is_entered(value):
            yield "vars", None
        if not is_foreign(type(value)):
            yield "class", None
        for base in type(value).__mro__:
            if "__slots__" in vars(base) and not is_foreign(base):
                names = [name for name, member in vars(base).items() if isinstance(member, MemberDescriptorType)]
                yield from (("slot", name) for name in names)


def _is_key(key: Any) -> bool:
    return type(key) in _PLAIN_KEYS and not (isinstance(key, str) and key.startswith(STATE_OF_FULLY_SHARD))


def _are_hooks(value: Any) -> bool:
    """Whether keys are ids that torch assigns in each process."""
    return type(value) is OrderedDict and bool(value) and all(type(key) is int for key in value)


def _is_member(name: str, member: Any) -> bool:
    return not name.startswith("__") or isinstance(member, FunctionType | staticmethod | classmethod)


def _is_entered(value: Any) -> bool:
    try:
        attributes = own_dict(value)
    except AttributeError:
        return False
    if not attributes:
        return False
    return isinstance(value, (*_ENTERED, Tensor)) or not is_foreign(type(value)) or _is_open(type(value))


def _is_open(cls: type) -> bool:
    return cls.__module__.startswith(("transformers", "torch.distributions"))


class Walk:
    """The addresses of all objects that are reachable from the roots, the shortest first."""

    def __init__(self, fn: Callable[..., Any] | None, arguments: Mapping[int, Any]) -> None:
        """`arguments`: non-data leaves of the arguments of a call, by index."""
        self.links: list[Link] = []
        self.objects: list[Any] = []
        """What lies at each address; held, so that identities stay unique."""
        self._by_id: dict[int, int] = {}
        self._globals: dict[int, tuple[int, set[str]]] = {}
        for i, leaf in arguments.items():
            self._add("arg", -1, i, leaf)
        if fn is not None:
            self._add("fn", -1, None, fn)
        at = 0
        while at < len(self.objects) < _MOST_OBJECTS:
            self._expand(at)
            at += 1

    def _add(self, kind: str, parent: int, key: Any, value: Any) -> int:
        if (known := self._by_id.get(id(value))) is not None:
            return known
        if isinstance(value, _NEVER_ENTERED):
            return -1
        if isinstance(value, _NAMED) and (name := name_of(value)) is not None:
            kind, parent, key = "named", -1, name
        elif isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
            kind, parent, key = "module", -1, value.__name__
        number = self._by_id[id(value)] = len(self.objects)
        self.objects.append(value)
        self.links.append((kind, parent, key, class_name(value)))
        return number

    def _expand(self, at: int) -> None:
        value = self.objects[at]
        if self.links[at][0] == "globals":  # entered by the names that code reads
            return
        for kind, key in links_from(value):
            try:
                child = follow(value, kind, key)
            except (LookupError, ValueError, AttributeError):  # an empty cell or slot
                continue
            number = self._add(kind, at, key, child)
            if kind == "globals":
                self._expand_globals(number, value)

    def _expand_globals(self, at: int, fn: FunctionType) -> None:
        for name in sorted(global_names(fn.__code__)):
            if name in fn.__globals__:
                self._add("item", at, name, fn.__globals__[name])

    def find(self, value: Any) -> int | None:
        """The address of an object."""
        number = self._by_id.get(id(value))
        if number is None and isinstance(value, (*_NAMED, ModuleType, FunctionType)):
            name = value.__name__ if isinstance(value, ModuleType) else name_of(value)
            if name is not None:
                kind = "module" if isinstance(value, ModuleType) else "named"
                number = self._by_id[id(value)] = len(self.objects)
                self.objects.append(value)
                self.links.append((kind, -1, name, class_name(value)))
        return number


class AddressWriter:
    """Writes the addresses that a record needs, each once, with those that lead there."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.is_unknown: Callable[[Any], bool] = lambda value: walk.find(value) is None
        """Whether an object has no address."""
        self.table: list[list[Any]] = []
        self._number: dict[int, int] = {}

    def write(self, value: Any, what: str) -> int:
        """The number of an object in the table; `what` names it in the refusal of one that has no address."""
        found = self._walk.find(value)
        if found is None:
            raise ArtefactError(
                f"{what} ({class_name(value)}) cannot be saved: it is not reached by name from the step or its "
                "arguments.",
                fix="pass it to the step, or keep it in an attribute of something that is passed.",
            )
        chain = []
        while found >= 0 and found not in self._number:
            chain.append(found)
            found = self._walk.links[found][1]
        for each in reversed(chain):
            kind, parent, key, cls = self._walk.links[each]
            self._number[each] = len(self.table)
            self.table.append([kind, self._number.get(parent, -1), key, cls])
        return self._number[self._walk.find(value)]  # type: ignore[index]


class Given:
    """Stands for the function of a step that is loaded without it: its variables, as far as they were given."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.variables = dict(variables)
        self.cells = {name: CellType(value) for name, value in variables.items()}


class Addresses:
    """Follows the addresses of a file from the roots of this process."""

    def __init__(self, table: Sequence[Link], fn: Callable[..., Any] | Given, arguments: Mapping[int, Any]) -> None:
        self._table = table
        self._fn = fn
        self._arguments = arguments
        self._found: dict[int, Any] = {}

    def find(self, number: int) -> Any:
        """The object at an address; raises ArtefactError if there is none, or one of another class."""
        chain = []
        while number >= 0 and number not in self._found:
            chain.append(number)
            number = self._table[number][1]
        for each in reversed(chain):
            kind, parent, key, cls = self._table[each]
            value = self._step(each, kind, parent, key)
            if class_name(value) != cls and not isinstance(value, Given):
                raise ArtefactError(f"{self.text(each)} is of the class {class_name(value)} and was of {cls}.")
            self._found[each] = value
        return self._found[chain[0] if chain else number]

    def _step(self, number: int, kind: str, parent: int, key: Any) -> Any:
        try:
            if kind == "arg":
                return self._arguments[key]
            if kind == "fn":
                return self._fn
            if kind == "module":
                return sys.modules[key]
            if kind == "named":
                found = named(key)
                if found is None:
                    raise LookupError(key)
                return found
            before = self._found[parent]
            if isinstance(before, Given):
                return before.cells[key] if kind == "cell" else {"globals": before.variables}[kind]
            if isinstance(before, type | ModuleType | FunctionType) and is_foreign(before) and kind != "vars":
                raise LookupError(key)  # a file leads through no library
            if isinstance(before, ModuleType) and is_foreign(before):
                raise LookupError(key)
            return follow(before, kind, key)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ArtefactError(f"{self.text(number)} does not exist here.") from error

    def reader(self, number: int) -> Callable[[], Any]:
        """Follows the links to an object at each call, from the object that it was reached from."""
        self.find(number)
        links: list[tuple[str, Any]] = []
        while self._table[number][1] >= 0:
            kind, parent, key, _ = self._table[number]
            links.append((kind, key))
            number = parent
        root = self._found[number]

        def read() -> Any:
            value = root
            for kind, key in reversed(links):
                value = follow(value, kind, key)
            return value

        return read

    def is_not_given(self, number: int) -> bool:
        """Whether an object is reached only from the function of the step, which was not given, or a part of it."""
        if not isinstance(self._fn, Given):
            return False
        try:
            return isinstance(self.find(number), Given)
        except ArtefactError:
            while number >= 0:
                kind, number, _, _ = self._table[number]
            return kind == "fn"

    def has_given(self, number: int) -> bool:
        """Whether an address is that of the variables that were given in the place of a function's."""
        return isinstance(self._fn, Given) and self.find(number) is self._fn.variables

    def text(self, number: int) -> str:
        """An address for people."""
        parts: list[str] = []
        while number >= 0:
            kind, number, key, _ = self._table[number]
            parts.append(
                {"vars": "", "contents": "", "globals": "global ", "bound": f".{key}"}.get(kind, _shown(kind, key))
            )
        return "".join(reversed(parts)).replace("].[", "][") or "the step"


def _shown(kind: str, key: Any) -> str:
    if kind == "fn":
        return "step: "
    if kind == "arg":
        return f"argument {key}"
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" if kind == "item" else f"{key}"
