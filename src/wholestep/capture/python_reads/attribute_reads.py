"""Which attributes the step reads, of plain objects, of classes and of Python modules, while it is traced.

    object    its class gets a `__getattribute__` that records the name          self.scale, cfg.lr
              (and a `__setattr__`: what is set first is not read)
    class     each value in its dict is replaced by a descriptor recording it Config.scale, self.scale
    module    its `__class__` becomes a subclass of ModuleType recording it   config.scale

A replay does not run this Python: what was read becomes a guard. The result of a read that discovery has not seen is
passed to `found`, so that values deep in a tree of objects are followed as far as the step reads them.

`Attributes` is a snapshot of plain attributes: what the step *changes* is repeated after each replay where that is
possible (a number, a tensor) and refused where it is not (appending to a list).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import (
    CONTAINERS,
    PLAIN,
    assign_contents,
    copy_of,
    own_dict,
    same_contents,
    same_plain,
    skeleton,
)
from wholestep.ir.user_objects.slots import ABSENT, ClassSlot, MappingSlot, Slot

_HEAP_TYPE = 1 << 9
_READ_ALL = frozenset({"__dict__", "__reduce__", "__reduce_ex__", "__getstate__"})
"""Who asks for one of these reads all attributes: `vars(h)`, `copy.copy(h)`, `pickle`."""

Found = Callable[[Any, str, Slot | None], Any]
"""Takes the result of a read, its path and the slot that holds it; returns what the step gets instead."""


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("wholestep.")


class ReadTracker:
    """What the step read of one object."""

    def __init__(self, obj: Any, path: str) -> None:
        self.obj = obj
        self.path = path
        self.names: dict[str, None] = {}
        """Attributes in `vars(obj)`, and names that the object did not have."""
        self.class_values: dict[str, Any] = {}
        """Plain values that came from a property or from `__getattr__`."""
        self.attributes = own_dict(obj)
        self.before = dict(self.attributes)
        """Attributes that existed when the step began."""
        self.written: set[str] = set()
        """Attributes that the step has set: reading one of them returns what the step made."""
        self.sees_reads = True
        self.read_whole = False
        """Whether something read all attributes there are."""


class AttributeReads:
    """All trackers of one capture. Reads of other threads are not recorded."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._thread = threading.get_ident()
        self._objects: dict[type, dict[int, ReadTracker]] = {}
        self._own: dict[type, dict[str, Any]] = {}
        self._written: dict[int, set[str]] = {}
        """By identity of a dict of attributes: several objects may share one."""
        self._reads_of_written = 0
        self._modules: dict[ModuleType, tuple[type, dict[str, None]]] = {}
        self._recorders: list[_ClassValue] = []
        self._places: dict[type, frozenset[str]] = {}

    def track(self, obj: Any, path: str) -> ReadTracker:
        """Record reads of an object's attributes from now on."""
        tracker = ReadTracker(obj, path)
        tracker.written = self._written.setdefault(id(tracker.attributes), tracker.written)
        cls = type(obj)
        if cls not in self._objects and not self._hook(cls):
            tracker.sees_reads = False
            tracker.read_whole = True
            self.note_all(tracker)
            return tracker
        self._objects[cls][id(obj)] = tracker
        return tracker

    def note_all(self, tracker: ReadTracker) -> None:
        """Count all attributes of an object as read."""
        for name, value in tracker.before.items():
            self._note(tracker, name, value)

    def _hook(self, cls: type) -> bool:
        """Give a class written in Python a `__getattribute__` and a `__setattr__` that record the name."""
        if not cls.__flags__ & _HEAP_TYPE:
            return False
        trackers: dict[int, ReadTracker] = {}
        read: Any = cls.__getattribute__
        write: Any = cls.__setattr__
        fallback: Any = getattr(cls, "__getattr__", None)
        note = self._note

        def __getattribute__(this: Any, name: str) -> Any:  # noqa: N807
            tracker = trackers.get(id(this))
            if tracker is None:
                return read(this, name)
            before = self._reads_of_written
            try:
                value = read(this, name)
            except AttributeError:
                if name.startswith("__"):
                    raise
                tracker.names[name] = None
                if fallback is None:
                    raise
                value = fallback(this, name)
            return note(tracker, name, value, self._reads_of_written == before)

        def __setattr__(this: Any, name: str, value: Any) -> None:  # noqa: N807
            write(this, name, value)
            tracker = trackers.get(id(this))
            if tracker is not None and threading.get_ident() == self._thread:
                tracker.written.add(name)

        hooks = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
        before = {name: vars(cls).get(name, ABSENT) for name in hooks}
        try:
            for name, hook in hooks.items():
                type.__setattr__(cls, name, hook)
        except TypeError:  # a class that may not be changed
            return False
        self._own[cls] = before
        self._objects[cls] = trackers
        return True

    def _note(self, tracker: ReadTracker, name: str, value: Any, was_there: bool = True) -> Any:
        """`was_there`: False where a property gave the value and read for it what the step itself had set."""
        scalar = scalar_of(value)
        if scalar is not None and scalar.is_deferred:
            return value  # known only after the step ran: nothing that a guard could compare before
        if threading.get_ident() != self._thread:
            return value
        if name in _READ_ALL and not _is_ours(sys._getframe(2)):
            tracker.read_whole = True
            self.note_all(tracker)
            return value
        if name in tracker.attributes:
            if name in tracker.written:
                self._reads_of_written += 1
                return value
            tracker.names[name] = None
            if not isinstance(value, PLAIN) and tracker.before.get(name) is value:
                where = f"{tracker.path}.{name}"
                slot = MappingSlot(InputKind.CAPTURED, where, None, tracker.attributes, name)
                return self._found(value, where, slot)
        elif name.startswith("__"):
            return value
        elif self._is_class_value(type(tracker.obj), name):
            tracker.names[name] = None  # absent from the instance: one that shadows the class's later is a change
            return value
        elif was_there and isinstance(value, PLAIN) and scalar_of(value) is None:
            tracker.class_values[name] = value
        return value

    def _is_class_value(self, cls: type, name: str) -> bool:
        """Whether a name is a value in the dict of a class, which has a guard of its own."""
        return any(name in self._places.get(base, ()) for base in cls.__mro__)

    def record_class(self, cls: type, names: frozenset[str], path: str, read: dict[str, None]) -> None:
        """Replace values in the dict of a class by descriptors that record when they are read."""
        for name in names:
            recorder = _ClassValue(self, vars(cls)[name], f"{path}.{name}", read, name, cls)
            try:
                type.__setattr__(cls, name, recorder)
            except TypeError:  # a class made in C (ctypes.Structure) refuses it: not followed
                read.update(dict.fromkeys(names))
                return
            self._recorders.append(recorder)
        self._places[cls] = names

    def found_in_class(self, recorder: _ClassValue) -> Any:
        """Record that a value of a class is read. Returns what the step gets."""
        value = recorder.value
        if threading.get_ident() == self._thread:
            recorder.read[recorder.name] = None
            if not isinstance(value, PLAIN):
                slot = ClassSlot(InputKind.CAPTURED, recorder.path, None, recorder.owner, recorder.name)
                return self._found(value, recorder.path, slot)
        return value

    def record_module(self, module: ModuleType, path: str, read: dict[str, None]) -> None:
        """Record reads of a module's attributes from now on."""
        kind = type(module)
        if module in self._modules or not issubclass(kind, ModuleType):
            return
        get: Any = kind.__getattribute__
        thread, found, before = self._thread, self._found, dict(vars(module))

        def __getattribute__(this: Any, name: str) -> Any:  # noqa: N807
            if name == "__dict__" and threading.get_ident() == thread:
                read.update((each, None) for each in get(this, name) if not each.startswith("__"))
            if name.startswith("__") or threading.get_ident() != thread:
                return get(this, name)
            read[name] = None
            value = get(this, name)
            if not isinstance(value, PLAIN) and before.get(name) is value:
                where = f"{path}.{name}"
                return found(value, where, MappingSlot(InputKind.CAPTURED, where, None, vars(this), name))
            return value

        try:
            module.__class__ = type.__new__(type, kind.__name__, (kind,), {"__getattribute__": __getattribute__})
        except TypeError:  # a stand-in for a module, with a layout of its own
            read.update(dict.fromkeys(vars(module)))
            return
        self._modules[module] = (kind, read)

    def stop(self) -> None:
        """Restore the classes and modules; the records stay."""
        while self._own:
            cls, before = self._own.popitem()
            for name, hook in before.items():
                if hook is ABSENT:
                    type.__delattr__(cls, name)
                else:
                    type.__setattr__(cls, name, hook)
        self._objects.clear()
        while self._recorders:
            self._recorders.pop().remove()
        while self._modules:
            module, (kind, _) = self._modules.popitem()
            module.__class__ = kind


class _ClassValue:
    """Descriptor in the place of a value in the dict of a class: returns the value and records the read."""

    def __init__(
        self, reads: AttributeReads, value: Any, path: str, read: dict[str, None], name: str, owner: type
    ) -> None:
        self._reads = reads
        self.value = value
        self.path = path
        self.read = read
        self.name = name
        self.owner = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._reads.found_in_class(self)

    def remove(self) -> None:
        if vars(self.owner).get(self.name) is self:
            type.__setattr__(self.owner, self.name, self.value)


def class_values(cls: type) -> Iterator[tuple[str, Any]]:
    """The values in the dict of a class that are neither methods, descriptors nor Python's own."""
    members: MappingProxyType[str, Any] = vars(cls)
    for name, value in list(members.items()):
        if not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__"):
            yield name, value


class Attributes:
    """A snapshot of `vars(obj)` and of the containers directly in it."""

    def __init__(self, obj: Any, path: str, skip: frozenset[str] = frozenset()) -> None:
        self.obj = obj
        self.path = path
        self._skip = skip
        self.now = own_dict(obj)
        self.before = dict(self.now)
        self._contents = {
            key: copy_of(value)
            for key, value in self.before.items()
            if issubclass(type(value), CONTAINERS) and key not in skip
        }

    def rebound(self) -> Iterator[tuple[str, Any, Any]]:
        """Attributes that were set, replaced or deleted: name, before, after."""
        now = self.now
        for key in {**self.before, **now}:
            before, after = self.before.get(key, ABSENT), now.get(key, ABSENT)
            if key in self._skip or same_value(before, after):
                continue
            yield key, before, after

    def mutated(self) -> Iterator[tuple[str, Any, Any]]:
        """Containers whose contents changed: name, contents before, the container."""
        now = self.now
        for key, contents in self._contents.items():
            container = self.before[key]
            if now.get(key) is container and not same_contents(contents, container):
                yield key, contents, container

    def restore(self) -> None:
        """Put back attributes and contents."""
        now = self.now
        for key in list(now):
            if key not in self.before:
                del now[key]
        for key, value in self.before.items():
            if now.get(key, ABSENT) is not value:
                now[key] = value
        for key, contents in self._contents.items():
            container = self.before[key]
            if not same_contents(contents, container):
                assign_contents(container, contents)


def holds_tensor(value: Any) -> bool:
    """Whether a tensor lies directly in a value or in a container of it."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(holds_tensor(v) for v in value.values())
    if isinstance(value, list | tuple | set):
        return any(holds_tensor(v) for v in value)
    return False


def same_value(before: Any, after: Any) -> bool:
    """Whether two values are the same plain value, or equal containers without tensors (a cache filled again)."""
    if same_plain(after, before):
        return True
    if type(before) is not type(after) or not isinstance(before, (*CONTAINERS, tuple)):
        return False
    return not holds_tensor(before) and not holds_tensor(after) and skeleton(before) == skeleton(after)
