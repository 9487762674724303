"""The code that a step can run, as hashes by name: an artefact is for this code and no other.

    train_step                 hash of its code object and of what its names stand for: functions, classes, modules
    helpers.clip               a function that it names, and so on
    Net                        the code of all methods, and of the classes below
    torch.nn.Linear            functions of torch in its dict: as installed, or replaced
    torch.nn.functional        the same for the modules that all steps use: `F.relu = mine` is seen

What is reached by name is followed, in the code of the user's; library code counts by its own hash. Values (numbers,
lists, configuration) are not code: guards cover them, and `assumed_objects.py` compares them.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from wholestep.artefact.addresses import class_name, global_names, names_used
from wholestep.capture.objects.user_code import is_foreign, kind_of_code
from wholestep.torch_private.aot import behind_dynamo
from wholestep.torch_private.modules_and_optimizers import step_behind_hooks

_TORCH = os.path.dirname(torch.__file__) + os.sep
_IN_NO_STEP = frozenset({("torch", "compile")})
"""Functions of torch that frameworks replace (Lightning) and that code of torch does not call in a step."""
_MODULES_OF_TORCH = (
    "torch",
    "torch._tensor",
    "torch.functional",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.utils.clip_grad",
    "torch.nn.utils.convert_parameters",
    "torch.nn.utils.rnn",
    "torch.nn.utils.stateless",
    "torch.autograd",
    "torch.autograd.function",
    "torch.utils.checkpoint",
    "torch.optim.optimizer",
)
"""Where steps find functions of torch without naming them: in code of torch."""
FUNCTIONS = (FunctionType, MethodType, partial, functools._lru_cache_wrapper)
"""Types of what holds Python code and is called."""
_CODE = (*FUNCTIONS, BuiltinFunctionType, type)
"""What counts in modules of libraries: their tables (`warnings.filters`) differ between processes."""
_DEEPEST = 3
"""How deep functions are searched in lists and dicts."""


def digest(*parts: str) -> str:
    """A short hash of texts."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:24]


@lru_cache(maxsize=65536)
def code_digest(code: CodeType) -> str:
    """A hash of what a code object does; its file and its lines do not count."""
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = ",".join(map(_constant, code.co_consts))
    return digest(code.co_code.hex(), code.co_exceptiontable.hex(), repr(signature), repr(names), constants)


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_constant, value))})"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    return f"{type(value).__name__} {value.hex() if isinstance(value, float) else repr(value)}"


def is_users(function: FunctionType) -> bool:
    """Whether a function is the user's: it is followed by name."""
    return kind_of_code(function.__code__) == "user"


def function_digest(function: FunctionType) -> str:
    """A hash of one function. Code of torch counts by its place: the version is compared, too."""
    function = behind_dynamo(function)
    code = function.__code__
    if code.co_filename.startswith(_TORCH):
        return f"{code.co_filename.removeprefix(_TORCH)}:{code.co_firstlineno}"
    return code_digest(code)


def code_of(roots: Iterable[Any], *, torch_too: bool = True) -> dict[str, str]:
    """All code that can be reached from functions, classes and objects, by name."""
    table = _CodeTable()
    table.add(roots)
    return table.finish(torch_too)


class _CodeTable:
    def __init__(self) -> None:
        self._digests: dict[str, set[str]] = {}
        self._seen: set[int] = set()
        self._queue: deque[Any] = deque()

    def add(self, roots: Iterable[Any]) -> None:
        for root in roots:
            self._refer(root)
        while self._queue:
            found = self._queue.popleft()
            if isinstance(found, type):
                self._class(found)
            else:
                self._function(found)

    def finish(self, torch_too: bool) -> dict[str, str]:
        for name in _MODULES_OF_TORCH if torch_too else ():
            module = sys.modules.get(name)
            if module is not None:
                self._note(name, _namespace(module))
        if torch_too:
            self._note("torch.Tensor", _namespace(torch.Tensor))
        return {name: digest(*sorted(found)) for name, found in sorted(self._digests.items())}

    def _note(self, name: str, found: str) -> None:
        self._digests.setdefault(name, set()).add(found)

    def _later(self, value: Any) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._queue.append(value)

    def _refer(self, value: Any, depth: int = 0) -> str:
        """What a name stands for, as text; code of the user's behind it is followed."""
        if isinstance(value, partial):
            return f"partial {self._refer(value.func)} {[self._refer(each, depth + 1) for each in value.args]}"
        if isinstance(value, MethodType):
            return f"method {self._refer(value.__func__)} {self._refer(value.__self__, depth + 1)}"
        if isinstance(value, staticmethod | classmethod):
            return self._refer(value.__func__, depth)
        if isinstance(value, property):
            return f"property {[self._refer(each) for each in (value.fget, value.fset) if each is not None]}"
        if hasattr(type(value), "__wholestep_function__"):
            return self._refer(value.__wholestep_function__, depth)
        if isinstance(value, FunctionType):
            value = behind_dynamo(value)
            if is_users(value):
                self._later(value)
            wrapped = vars(value).get("__wrapped__")
            behind = "" if wrapped is None else f" of {self._refer(wrapped, depth)}"
            return f"function {value.__module__}.{value.__qualname__} {function_digest(value)}{behind}"
        if isinstance(value, type):
            self._later(value)
            return f"class {value.__module__}.{value.__qualname__}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, BuiltinFunctionType):
            return f"builtin {value.__module__}.{value.__qualname__}"
        if isinstance(value, functools._lru_cache_wrapper):
            return f"cache of {self._refer(value.__wrapped__, depth)}"
        if isinstance(value, list | tuple | set | frozenset | dict) and depth < _DEEPEST:
            items = dict.values(value) if isinstance(value, dict) else value
            inside = {self._refer(item, depth + 1) for item in items if _may_be_called(item)} - {""}
            return f"{type(value).__name__} {sorted(inside)}" if inside else ""
        if isinstance(value, Enum):
            return f"{class_name(value)}.{value.name} {value.value!r}"
        if not is_foreign(type(value)):
            self._later(type(value))
        return class_name(value)

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        names = []
        for name in sorted(global_names(code)):
            value = function.__globals__.get(name, _MISSING)
            if value is not _MISSING:
                names.append(f"{name} {self._refer(value)}")
                if isinstance(value, ModuleType):
                    names += self._attributes(value, code)
        for name in _imported(code):
            module = sys.modules.get(name)
            if module is not None:
                names += self._attributes(module, code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                names.append(f"{name} {self._refer(cell.cell_contents)}")
            except ValueError:  # empty
                continue
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        names += [self._refer(value) if _holds_code(value) else _constant(value) for value in defaults]
        self._note(f"{function.__module__}.{function.__qualname__}", digest(function_digest(function), *names))

    def _attributes(self, module: ModuleType, code: CodeType) -> Iterator[str]:
        """What the attributes stand for that code may read of a module: all of its names that are attributes there."""
        seen: set[int] = set()
        stack = [module]
        while stack:
            each = stack.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            for name in sorted(_all_names(code)):
                value = vars(each).get(name, _MISSING)
                if isinstance(value, ModuleType):
                    stack.append(value)
                elif value is not _MISSING and (not is_foreign(each) or isinstance(value, _CODE)):
                    yield f"{each.__name__}.{name} {self._refer(value)}"

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base is object or not _counts(base):
                continue
            if is_foreign(base):
                self._note(f"{base.__module__}.{base.__qualname__}", _namespace(base))
                if base.__module__ in sys.modules and base.__module__ not in self._digests:
                    self._note(base.__module__, _namespace(sys.modules[base.__module__]))
                continue
            found = [f"{name} {self._refer(value)}" for name, value in sorted(_members(base)) if _holds_code(value)]
            self._note(f"{base.__module__}.{base.__qualname__}", digest(*found))
            self._seen.add(id(base))


_MISSING = object()


def _counts(cls: type) -> bool:
    """Classes of Python itself and of NumPy are the same where the versions are."""
    return not is_foreign(cls) or cls.__module__.split(".")[0] in ("torch", "transformers", "wholestep")


def _may_be_called(item: Any) -> bool:
    """Whether an element of a list or dict may hold code: others come and go as the step runs, and are no code."""
    return isinstance(item, (*_CODE, list, tuple, set, frozenset, dict)) or not is_foreign(type(item))


def _holds_code(value: Any) -> bool:
    plain = (str, bytes, int, float, complex, type(None))
    return not isinstance(value, plain)


def _members(holder: Any) -> Iterator[tuple[str, Any]]:
    """What a module or class holds, but for what torch and frameworks put there in some processes."""
    for name, value in list(vars(holder).items()):
        if (holder.__name__, name) in _IN_NO_STEP:
            continue
        # The first optimizer of a class wraps `step`, the first use of torch.compile other methods, inherited ones too.
        if type(value) is FunctionType and (own := step_behind_hooks(behind_dynamo(value))) is not value:
            value = own
            if isinstance(holder, type) and not value.__qualname__.startswith(f"{holder.__qualname__}."):
                continue
        yield name, value


def _namespace(holder: Any) -> str:
    """A hash of all functions in a module or class of a library: one that was replaced is another."""
    found = []
    for name, value in _members(holder):
        # By type: objects that torch has deprecated warn where they are asked for their class.
        function = value.__func__ if issubclass(type(value), staticmethod | classmethod) else value
        function = function.fget if issubclass(type(function), property) else function
        if type(function) is FunctionType:
            found.append(f"{name} {function.__qualname__} {function_digest(function)}")
    return digest(*sorted(found))


@lru_cache(maxsize=8192)
def _all_names(code: CodeType) -> frozenset[str]:
    """All names in code, and in code inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _all_names(constant)
    return frozenset(names)


_IMPORT = frozenset({dis.opmap["IMPORT_NAME"]})


@lru_cache(maxsize=8192)
def _imported(code: CodeType) -> frozenset[str]:
    """Names of modules that code imports when it runs."""
    names = names_used(code, _IMPORT)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _imported(constant)
    return frozenset(names)


def differences(before: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    """What differs between two tables, as text."""
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            how = "is not there" if name not in now else "is new" if name not in before else "is different"
            yield f"the code of {name} {how}"
