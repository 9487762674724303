"""Guards on what the user's code is made of: classes of objects, code of functions, builtins, registries of ABCs.

obj.__class__ = Other            SameTypes
f.__code__ = g.__code__          SameCode
abs = my_abs (a new global)      SameBuiltins
Protocol.register(Mine)          SameRegistries
"""

from __future__ import annotations

import abc
import builtins
import gc
from collections.abc import Iterator
from operator import attrgetter, is_
from types import FunctionType, ModuleType
from typing import Any

from wholestep.guards.guard import Call, Guard
from wholestep.ir.captured_step import GuardSpecs, NamesReplaced
from wholestep.ir.user_objects.plain_contents import registered, same_plain
from wholestep.ir.user_objects.slots import ABSENT
from wholestep.torch_private.aot import behind_dynamo
from wholestep.torch_private.guard_checks import DictWatch

_HEAP_TYPE = 1 << 9
"""Classes that are written in Python: objects of others cannot be given another class."""
_code_of = attrgetter("__code__")


class SameTypes(Guard):
    """User objects have the class that they had at capture."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._types = [(obj, path, kind) for obj, path, kind in specs.types if kind.__flags__ & _HEAP_TYPE]
        self._objects = [obj for obj, _, _ in self._types]
        self._kinds = [kind for _, _, kind in self._types]

    def is_needed(self) -> bool:
        return bool(self._types)

    def holds(self, call: Call) -> bool:
        return all(map(is_, map(type, self._objects), self._kinds))

    def reasons(self, call: Call) -> Iterator[str]:
        for obj, path, kind in self._types:
            if type(obj) is not kind:
                yield f"{path} was a {kind.__name__} and is a {type(obj).__name__}"


class SameCode(Guard):
    """Functions of the user's code have the same code."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._functions = [fn for fn, _ in specs.codes]
        self._codes = [code for _, code in specs.codes]

    def is_needed(self) -> bool:
        return bool(self._functions)

    def holds(self, call: Call) -> bool:
        return all(map(is_, map(_code_of, self._functions), self._codes))

    def reasons(self, call: Call) -> Iterator[str]:
        for fn, code in zip(self._functions, self._codes, strict=True):
            if fn.__code__ is not code:
                yield f"{fn.__qualname__} has other code"


class SameBuiltins(Guard):
    """Names in user code that were those of builtins (or of nothing) still are, and the builtins are the same."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._names = [(namespace.keys(), names) for namespace, names in specs.builtin_names if names]
        named = sorted({name for _, names in self._names for name in names})
        self._before = {name: vars(builtins).get(name, ABSENT) for name in named}
        self._watch: DictWatch | None = None

    def is_needed(self) -> bool:
        return bool(self._names)

    def holds(self, call: Call) -> bool:
        if not NamesReplaced.now and (self._watch is None or not self._watch.unchanged()):
            if any(vars(builtins).get(name, ABSENT) is not value for name, value in self._before.items()):
                return False
            self._watch = DictWatch([vars(builtins)])
        return all(keys.isdisjoint(names) for keys, names in self._names)

    def reasons(self, call: Call) -> Iterator[str]:
        for name, value in self._before.items():
            if vars(builtins).get(name, ABSENT) is not value:
                yield f"the builtin {name} is another one"
        for keys, names in self._names:
            for name in sorted(names & keys):
                yield f"{name} is a global now"


def _dict_of(owner: ModuleType | type) -> dict[str, Any]:
    """The dict of a module, or the one behind the read-only proxy that `vars(cls)` returns."""
    if isinstance(owner, ModuleType):
        return vars(owner)
    return next(found for found in gc.get_referents(vars(owner)) if type(found) is dict)


class SameLibraries(Guard):
    """What user code names of Python's and other libraries' modules, and the methods of their classes, are the same:
    `F.gelu` and `nn.Linear.forward` were not replaced."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._modules = [(_dict_of(owner), owner.__name__, dict(named)) for owner, named in specs.libraries]
        self._watch: DictWatch | None = None

    def is_needed(self) -> bool:
        return bool(self._modules)

    def holds(self, call: Call) -> bool:
        if NamesReplaced.now or (self._watch is not None and self._watch.unchanged()):
            return True
        if next(self.reasons(call), None) is not None:
            return False
        self._watch = DictWatch([attributes for attributes, _, _ in self._modules])
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for attributes, path, named in self._modules:
            for name, before in named.items():
                now = attributes.get(name, ABSENT)
                if now is not before and not same_plain(now, before) and not _differ_by_dynamo(now, before):
                    yield f"{path}.{name} is another object"


def _differ_by_dynamo(now: Any, before: Any) -> bool:
    """Whether Dynamo wrapped a function of torch since: `nn.Module.__init__` at the first use of `torch.compile`."""
    both = isinstance(now, FunctionType) and isinstance(before, FunctionType)
    return both and behind_dynamo(now) is behind_dynamo(before)


class SameRegistries(Guard):
    """No class was registered with an abstract base class that user code names: `isinstance` answers as before."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._before = [(cls, registered(cls)) for cls in specs.abstract_classes]
        self._token: Any = abc.get_cache_token()

    def is_needed(self) -> bool:
        return bool(self._before)

    def holds(self, call: Call) -> bool:
        token = abc.get_cache_token()
        if token == self._token:
            return True
        if next(self.reasons(call), None) is not None:
            return False
        self._token = token
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for cls, before in self._before:
            for new in registered(cls) - before:
                yield f"{new.__name__} was registered with {cls.__name__}"
