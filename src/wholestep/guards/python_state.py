"""Guards on what the step's Python read: variables, attributes of plain objects and classes, lists and dicts; and on
state outside of instances: the code of classes, defaults of functions, thread locals, environment variables, files, and
modes of the process (`torch_private.modes`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any

from wholestep.guards.guard import (
    Call,
    Guard,
    PerItemGuard,
    change_text,
    inputs_in_containers,
    is_other_scalar,
    other_scalars,
)
from wholestep.ir.captured_step import GuardSpecs
from wholestep.ir.user_objects.plain_contents import (
    ArrayCopy,
    Contents,
    class_code,
    entries_of,
    is_large,
    kind_of,
    own_dict,
    same_contents,
    same_plain,
)
from wholestep.ir.user_objects.slots import ABSENT, SequenceSlot
from wholestep.torch_private.guard_checks import DictWatch
from wholestep.torch_private.modes import MODES, read_modes, same_mode


class SameVariables(PerItemGuard):
    """Closure variables and globals have the same values."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._variables = [
            (path, slot, value)
            for path, slot, value in specs.variables
            if path not in specs.rebound_variables and path not in specs.lifted
        ]
        super().__init__(self._variables)

    def reasons(self, call: Call) -> Iterator[str]:
        for path, slot, value in self._variables:
            now = slot.get()
            if now is not value and not same_plain(now, value):
                yield change_text(path, value, now)

    def changed_scalars(self, call: Call) -> Iterator[str]:
        return (found for path, slot, value in self._variables for found in other_scalars(path, slot.get(), value))


class SameReads(PerItemGuard):
    """Attributes of plain objects that the step read have the same values."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._reads = [(obj, path, list(values.items())) for obj, path, values in specs.reads]
        slots = (*specs.placeholder_slots.values(), *(slot for slot, _ in specs.scalar_types))
        read_from = {id(slot.sequence) for slot in slots if isinstance(slot, SequenceSlot)}
        values = (value for _, _, items in self._reads for _, value in items)
        self._lists = {id(v): list(v) for v in values if type(v) is list and id(v) not in read_from}
        """Contents of lists that may be replaced by another list with equal contents."""
        super().__init__(self._reads)

    def reasons(self, call: Call) -> Iterator[str]:
        for obj, path, values in self._reads:
            attributes = own_dict(obj)
            for name, value in values:
                now = attributes.get(name, ABSENT)
                if not same_plain(now, value) and not self._is_equal_list(now, value):
                    yield change_text(f"{path}.{name}", value, now)

    def _is_equal_list(self, now: Any, before: Any) -> bool:
        held = self._lists.get(id(before))
        return held is not None and type(now) is list and same_contents(held, now)

    def changed_scalars(self, call: Call) -> Iterator[str]:
        for obj, path, values in self._reads:
            for name, value in values:
                yield from other_scalars(f"{path}.{name}", own_dict(obj).get(name, ABSENT), value)


class SameClassReads(PerItemGuard):
    """Plain values that the step read from the classes of such objects are the same."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._reads = specs.class_reads
        super().__init__(self._reads)

    def reasons(self, call: Call) -> Iterator[str]:
        for obj, path, values in self._reads:
            for name, value in values.items():
                now = getattr(obj, name, ABSENT)
                if not same_plain(now, value):
                    yield change_text(f"{path}.{name}", value, now)


class SameKinds(PerItemGuard):
    """Variables and attributes that the step itself sets hold a value of the same kind (`kind_of`)."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._variables = [(path, slot, kind) for path, (slot, kind) in specs.rebound_variables.items()]
        self._attributes = specs.kinds
        super().__init__([*self._variables, *self._attributes])

    def reasons(self, call: Call) -> Iterator[str]:
        for path, slot, kind in self._variables:
            if kind_of(slot.get()) != kind:
                yield f"{path} holds a value of another kind"
        for attributes, key, path, kind in self._attributes:
            if kind_of(attributes.get(key, ABSENT)) != kind:
                yield f"{path} holds a value of another kind"


class SameContainers(PerItemGuard):
    """Lists and dicts that the step may have read have the same contents."""

    def __init__(self, specs: GuardSpecs) -> None:
        others = (*specs.optimizer_containers, *(written.container for written in specs.written))
        self._contents = Contents(specs.containers, set(map(id, others)), inputs_in_containers(specs))
        super().__init__(specs.containers)

    def holds(self, call: Call) -> bool:
        return self._contents.are_same()

    def reasons(self, call: Call) -> Iterator[str]:
        return (f"the contents of {path} changed" for path in self._contents.changed())

    def changed_scalars(self, call: Call) -> Iterator[str]:
        return (path for path, before, now in self._contents.changed_items() if is_other_scalar(now, before))


class SameWritten(PerItemGuard):
    """Lists and dicts that the step writes are the same objects; those whose contents it reads have the same keys.

    Elements that it reads are guarded as variables."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._written = specs.written
        super().__init__(self._written)

    def reasons(self, call: Call) -> Iterator[str]:
        for each in self._written:
            if any(slot.get() is not each.container for slot in each.places):
                yield f"{each.path} is another object"
            elif each.keys is not None and _keys_of(each.container, each.keys) != each.keys:
                yield f"the contents of {each.path} changed"


def _keys_of(container: Any, like: Any) -> Any:
    return len(container) if isinstance(like, int) else list(container)


class SameArrays(PerItemGuard):
    """NumPy arrays that the step may have read have the same contents."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._arrays = [ArrayCopy(held, path) for held, path in specs.arrays if not is_large(held)]
        super().__init__(self._arrays)

    def reasons(self, call: Call) -> Iterator[str]:
        return (f"the contents of {copy.path} changed" for copy in self._arrays if not copy.is_same())


class SameCaches(PerItemGuard):
    """Functions with `functools.lru_cache` that the step called would return the same results."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._caches = [(entries_of(cache), dict(entries_of(cache)), path) for cache, path in specs.lru_caches]
        self._watch: DictWatch | None = None
        super().__init__(self._caches)

    def holds(self, call: Call) -> bool:
        if self._watch is not None and self._watch.unchanged():
            return True
        if not super().holds(call):
            return False
        self._watch = DictWatch([entries for entries, _, _ in self._caches])
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for entries, before, path in self._caches:
            if any(entries.get(key, ABSENT) is not entry for key, entry in before.items()):
                yield f"the cache of {path} was emptied or has other results"


class SameChains(PerItemGuard):
    """Objects that the step calls are still reached by the same attributes from its arguments and variables."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._links = specs.links
        super().__init__(self._links)

    def reasons(self, call: Call) -> Iterator[str]:
        for link in self._links:
            if not link.holds():
                yield f"{link.path} is another object"


class SameTensors(PerItemGuard):
    """Parameters that lie outside of modules (in a list, in a param group) are the same objects."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._parameters = specs.loose_parameters
        super().__init__(self._parameters)

    def reasons(self, call: Call) -> Iterator[str]:
        for slot, real in self._parameters:
            if slot.get() is not real:
                yield f"{slot.path} is another tensor"


class SameClasses(Guard):
    """Classes of the user's code have the same names and methods. Values in them are guarded as variables."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._classes = [_Class(cls, path) for cls, path in specs.classes.items()]
        set_by_step = {id(cls) for cls in specs.classes_set_by_step}
        dicts = [(c, _dict_of(c.cls)) for c in self._classes]
        self._quiet = [d for c, d in dicts if d is not None and id(c.cls) not in set_by_step]
        """Dicts that a replay does not write: comparing their versions is enough."""
        self._always = [c for c, d in dicts if d is None or id(c.cls) in set_by_step]
        self._watch: DictWatch | None = None
        self._types = [c.cls for c in self._classes]
        self._bases = [cls.__bases__ for cls in self._types]

    def is_needed(self) -> bool:
        return bool(self._classes)

    def holds(self, call: Call) -> bool:
        if not all(map(is_, map(_bases_of, self._types), self._bases)):
            return False
        if self._watch is not None and self._watch.unchanged():
            return all(c.is_same() for c in self._always)
        if not all(c.is_same() for c in self._classes):
            return False
        self._watch = DictWatch(self._quiet)
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for each, bases in zip(self._classes, self._bases, strict=True):
            if each.cls.__bases__ is not bases:
                yield f"{each.path} has other bases"
            yield from each.differences()


_bases_of = attrgetter("__bases__")


class _Class:
    """The names in a class, and its methods and descriptors by identity."""

    def __init__(self, cls: type, path: str) -> None:
        self.cls = cls
        self.path = path
        self._names = _names(cls)
        code = dict(class_code(cls))
        self._keys, self._code = list(code), list(code.values())

    def is_same(self) -> bool:
        members = vars(self.cls)
        return all(map(is_, map(members.get, self._keys), self._code)) and _names(self.cls) == self._names

    def differences(self) -> Iterator[str]:
        members = vars(self.cls)
        for key, before in zip(self._keys, self._code, strict=True):
            if members.get(key) is not before:
                yield f"{self.path}.{key} is another function"
        for name in sorted(_names(self.cls) ^ self._names):
            yield f"{self.path}.{name} is {'new' if name in members else 'gone'}"


def _names(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("__")}


def _dict_of(cls: type) -> dict[Any, Any] | None:
    """The dict behind `vars(cls)`, which returns a read-only proxy."""
    behind = gc.get_referents(vars(cls))
    return behind[0] if len(behind) == 1 and type(behind[0]) is dict else None


class SameFunctions(PerItemGuard):
    """Functions of the user's code have the same defaults and attribute names. Values are guarded as variables."""

    def __init__(self, specs: GuardSpecs) -> None:
        functions = specs.functions
        self._defaults = [
            (fn, path, fn.__defaults__, fn.__kwdefaults__)
            for fn, path, _ in functions
            if fn.__defaults__ or fn.__kwdefaults__
        ]
        self._names = [(fn, path, names) for fn, path, names in functions if names]
        super().__init__([*self._defaults, *self._names])

    def reasons(self, call: Call) -> Iterator[str]:
        for fn, path, defaults, of_keywords in self._defaults:
            if fn.__defaults__ is not defaults or fn.__kwdefaults__ is not of_keywords:
                yield f"{path} has other defaults"
        for fn, path, names in self._names:
            if vars(fn).keys() != names:
                yield f"{path} has other attributes"


class SameReferents(PerItemGuard):
    """The referents of weak references are still alive."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._weak = specs.weak
        super().__init__(self._weak)

    def reasons(self, call: Call) -> Iterator[str]:
        for reference, path in self._weak:
            if reference() is None:
                yield f"the object that {path} refers to is gone"


class SameCallResults(PerItemGuard):
    """Functions that read process state return what they returned at capture."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._results = specs.call_results
        super().__init__(self._results)

    def reasons(self, call: Call) -> Iterator[str]:
        for each in self._results:
            now = each.call()
            if now != each.result or type(now) is not type(each.result):
                yield f"{each.name} was {each.result!r} and is {now!r}"


class SameWholeReads(PerItemGuard):
    """Objects that the step read as a whole have attributes of the same names."""

    def __init__(self, specs: GuardSpecs) -> None:
        set_by_step = specs.volatile
        self._objects = [(obj, path, names) for obj, path, names in specs.whole_reads if id(obj) not in set_by_step]
        super().__init__(self._objects)

    def reasons(self, call: Call) -> Iterator[str]:
        for obj, path, names in self._objects:
            for name in sorted(own_dict(obj).keys() ^ names):
                yield f"{path}.{name} is {'gone' if name in names else 'new'}"


class SameThreadLocals(PerItemGuard):
    """Thread locals have, in the calling thread, the same attribute names. Their values are guarded as variables."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._locals = [(local, path, set(vars(local))) for local, path in specs.thread_locals]
        super().__init__(self._locals)

    def reasons(self, call: Call) -> Iterator[str]:
        for local, path, names in self._locals:
            for name in sorted(vars(local).keys() ^ names):
                yield f"{path}.{name} is {'gone' if name in names else 'new'}"


class SameEnvironment(Guard):
    """Environment variables that the step read have the same values."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._values = specs.environment
        self._whole = specs.whole_environment
        self._data: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        self._watch: DictWatch | None = None

    def is_needed(self) -> bool:
        return bool(self._values) or self._whole is not None

    def holds(self, call: Call) -> bool:
        if self._watch is not None and self._watch.unchanged():
            return True
        if next(self.reasons(call), None) is not None:
            return False
        self._watch = DictWatch([self._data])
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for name, value in self._values.items():
            if os.environ.get(name) != value:
                yield f"the environment variable {name} was {value!r} and is {os.environ.get(name)!r}"
        if self._whole is not None and self._data != self._whole:
            yield "the environment variables changed"


class SameFiles(PerItemGuard):
    """Files that the step read have not been written since."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._files = specs.files
        super().__init__(self._files)

    def reasons(self, call: Call) -> Iterator[str]:
        for file in self._files:
            if not file.is_same():
                yield f"the file {file.path} changed"


class SameModes(Guard):
    """The modes of the process are those of the capture."""

    def __init__(self) -> None:
        self._before = read_modes()

    def holds(self, call: Call) -> bool:
        now = read_modes()
        if now == self._before:
            return True
        if not all(map(same_mode, self._before, now)):
            return False
        self._before = now  # different values with the same meaning
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        for mode, before, now in zip(MODES, self._before, read_modes(), strict=True):
            if not same_mode(before, now):
                yield f"{mode.name} is {now}, and was {before} at the capture"
