"""Stand-ins for lists, dicts, sets and deques of the user's that a step writes: each write is recorded.

A first trace notices that a container which outlives the call was changed, and ends. In the next one a stand-in lies in
every place that holds the container:

    losses.append(loss)        recorded, and done: the real container is put back after the trace
    logs["loss"] = value       likewise
    logs["n"] += 1             the value is read: an input, if it is a number or tensor; otherwise a guard
    len(losses), losses[-1]    the contents are read: a guard; refused where the step also makes them longer each time

A container that the step has emptied before (`features.clear()`) may be read: all its contents are the step's own.
C code that takes a list apart past these methods finds a single element that refuses every use.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from wholestep.capture.objects.called import EarlierTraces, TraceAgain
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import Location, SideEffectError
from wholestep.ir.meta import user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import copy_of, same_contents
from wholestep.ir.user_objects.slots import ABSENT, MappingSlot, SequenceSlot, Slot

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

RECORDED_TYPES = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


class NeedsRecorders(TraceAgain):
    """Ends a trace: the step changed containers that outlive it."""

    def __init__(self, containers: list[Any], refusal: SideEffectError) -> None:
        super().__init__("containers are written")
        self.containers = containers
        self.refusal = refusal

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        earlier.written += self.containers
        return lambda: None


class Unread(Tensor):
    """The only element that C code finds in a stand-in. A tensor, so that `torch.stack(values)` comes as far as the
    mode that puts the contents in its place."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise SideEffectError(
            "C code reads a list or dict that the step also writes, past the methods of the list.",
            fix="give it a copy: list(values), dict(values).",
            location=user_location(),
        )


_UNREAD: Any = torch.empty(0).as_subclass(Unread)


class ContainerRecorder:
    """What one trace does to one container."""

    def __init__(self, capture: Capture, real: Any, path: str) -> None:
        self._capture = capture
        self.real = real
        self.path = path
        self.before = copy_of(real) if not isinstance(real, deque) else deque(real, real.maxlen)
        self.is_structured = False
        """The step adds or removes elements."""
        self.is_known = False
        """All contents are the step's own."""
        self.read_at: Location | None = None
        """Where the contents as a whole were read first."""
        self.reads: dict[Any, Any] = {}
        """Keys or indices whose value from before the step was read, with what was there."""
        self.written: set[Any] = set()
        self._served: dict[Any, Any] = {}
        self._shadow = copy_of(real) if not isinstance(real, deque) else deque(real, real.maxlen)

    # Reading.

    def read_all(self) -> Any:
        """The contents are read; gives the real container."""
        if not self.is_known and self.read_at is None:
            self.read_at = user_location() or Location("", 0)
        return self.real

    def items(self) -> list[Any]:
        """All values, as the step gets them."""
        self.read_all()
        if isinstance(self.real, dict):
            return [self.value(key) for key in list(self.real)]
        if isinstance(self.real, list):
            return [self.value(i) for i in range(len(self.real))]
        return [self._stand_in(item, i) for i, item in enumerate(self.real)]

    def value(self, key: Any) -> Any:
        """The value of one key or index that exists, as the step gets it."""
        held = self.real[key]
        own = self.is_known or key in self.written or (isinstance(self.real, list) and self.is_structured)
        if own:
            return self._stand_in(held, key)
        if key in self._served:
            return self._served[key]
        self.reads[key] = held
        where = self._where(key)
        if type(held) in (int, float) and self._capture.numbers.lifts(where):
            held = self._capture.scalars.lift(replace(self.slot(key), kind=InputKind.HYPER_PARAMETER), held)
        self._served[key] = held = self._stand_in(held, key)
        return held

    def note_absent(self, key: Any) -> None:
        """The step asked for a key that is not there."""
        if not self.is_known and key not in self.written:
            self.reads.setdefault(key, ABSENT)

    def _stand_in(self, value: Any, key: Any) -> Any:
        return self._capture.sources.stand_ins.of(value, self._where(key))

    def _where(self, key: Any) -> str:
        """The path of an element; a tensor among the keys is named by its own path."""
        if not isinstance(key, Tensor):
            return f"{self.path}[{key!r}]"
        tracked = self._capture.table.by_fake.get(id(key))
        return f"{self.path}[{tracked.slot.path if tracked is not None else id(key)}]"

    def slot(self, key: Any) -> Slot:
        """The place of an element in the real container."""
        where = self._where(key)
        if isinstance(self.real, dict):  # after the trace its keys are the user's tensors again
            return MappingSlot(InputKind.CAPTURED, where, None, self.real, self._capture.table.real_of(key))
        return SequenceSlot(InputKind.CAPTURED, where, None, self.real, key)

    # Writing.

    def do(self, name: str, *args: Any, keys: Iterable[Any] = (), structured: bool = True) -> Any:
        """Call a method of the real container, and record it."""
        self.written.update(keys)
        self.is_structured = self.is_structured or structured
        label = {"__setitem__": "", "__delitem__": "", "__iadd__": ".extend"}.get(name, f".{name}")
        self._capture.effects.store(f"{self.path}{label}", getattr(self.real, name), *args)
        getattr(self._shadow, name)(*args)
        return getattr(self.real, name)(*args)

    def empty(self) -> None:
        """`clear()`."""
        self.is_known = True
        self.do("clear")

    # After the trace.

    @property
    def is_changed(self) -> bool:
        """Whether the step wrote to it."""
        return self.is_structured or bool(self.written)

    def check(self) -> None:
        """Raise where the container was changed past the stand-in, or is read and grows."""
        if not same_contents(self._shadow, self.real):
            raise SideEffectError(
                f"the step changes the contents of {self.path} in a way that a replay would not repeat.",
                fix="call its methods by its name in the step, or return the value and store it outside.",
            )
        if self.read_at is not None and self.is_structured and len(self.before) and not self._same_structure():
            raise SideEffectError(
                f"the step reads {self.path} and makes it longer or shorter: each call would need another graph.",
                fix="read it outside of the step; or keep what the step needs of it in a number or tensor.",
                location=self.read_at if self.read_at.file else None,
            )

    def _same_structure(self) -> bool:
        if isinstance(self.real, dict):
            return list(self.real) == list(self.before)
        return isinstance(self.real, list) and len(self.real) == len(self.before)

    def is_written(self, slot: Slot) -> bool:
        """Whether the step writes the element that lies in a slot."""
        if isinstance(slot, MappingSlot):
            return any(self._capture.table.real_of(key) is slot.key or _equal(key, slot.key) for key in self.written)
        return getattr(slot, "index", None) in self.written

    def read_values(self) -> Iterator[tuple[str, Slot, Any]]:
        """Elements that the step read: path, place and value before the step."""
        for key, held in self.reads.items():
            if scalar_of(self._served.get(key)) is None:
                slot = self.slot(key)
                yield slot.path, slot, held


def _equal(key: Any, other: Any) -> bool:
    return not isinstance(key, Tensor) and not isinstance(other, Tensor) and bool(key == other)


class Recorders:
    """The stand-ins of one trace."""

    def __init__(self, capture: Capture, containers: list[Any]) -> None:
        self._capture = capture
        self._wanted = {id(container): container for container in containers}
        self._made: dict[int, tuple[ContainerRecorder, Any]] = {}

    def holds(self, container: Any) -> bool:
        """Whether writes to a container are recorded."""
        return id(container) in self._made

    def stand_in(self, real: Any, path: str) -> Any | None:
        """What lies in the place of a container; None where nothing does."""
        if id(real) not in self._wanted:
            return None
        if id(real) not in self._made:
            recorder = ContainerRecorder(self._capture, real, path)
            self._made[id(real)] = recorder, _stand_in_of(recorder)
        return self._made[id(real)][1]

    def made(self) -> list[ContainerRecorder]:
        """All that were in use."""
        return [recorder for recorder, _ in self._made.values()]

    def places(self) -> Iterator[tuple[Slot, Any]]:
        """Where stand-ins go: each place of each container that is written."""
        for identity, container in self._wanted.items():
            for slot in self._capture.world.places.get(identity, ()):
                holder = getattr(slot, "mapping", None) or getattr(slot, "sequence", None)
                if slot is not None and id(holder) not in self._wanted and slot.get() is container:
                    yield slot, container


def can_record(container: Any, places: list[Slot | None]) -> bool:
    """Whether a stand-in can lie in every place that holds a container."""
    settable = all(slot is not None and type(slot).set is not Slot.set for slot in places)
    return type(container) in RECORDED_TYPES and bool(places) and settable


# The stand-ins. Each is of the type of what it stands for, and keeps nothing in its own storage.


class StandInContainer:
    """Common to all: where the recorder is."""

    wholestep_recorder: ContainerRecorder

    @property
    def wholestep_real(self) -> Any:
        return self.wholestep_recorder.real

    def __len__(self) -> int:
        return len(self.wholestep_recorder.read_all())

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[Any]:
        recorder = self.wholestep_recorder
        if isinstance(recorder.real, dict):
            return iter(list(recorder.read_all()))
        return iter(recorder.items())

    def __contains__(self, item: Any) -> bool:
        recorder = self.wholestep_recorder
        if isinstance(recorder.real, dict):
            if item not in recorder.real:
                recorder.note_absent(item)
                return False
            recorder.value(item)
            return True
        return item in recorder.items()

    def __eq__(self, other: object) -> bool:
        return self is other or _plain(self) == _plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(_plain(self))

    __str__ = __repr__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.wholestep_real), (_plain(self),)

    def __copy__(self) -> Any:
        return _plain(self)

    def __deepcopy__(self, memo: Any) -> Any:
        import copy

        return copy.deepcopy(_plain(self), memo)

    def copy(self) -> Any:
        return _plain(self)

    def __add__(self, other: Any) -> Any:
        return _plain(self) + _plain(other)

    def __radd__(self, other: Any) -> Any:
        return other + _plain(self)

    def __or__(self, other: Any) -> Any:
        return _plain(self) | _plain(other)

    def __ror__(self, other: Any) -> Any:
        return other | _plain(self)

    def clear(self) -> None:
        self.wholestep_recorder.empty()


def _plain(value: Any) -> Any:
    """A copy of what a stand-in stands for; anything else as it is."""
    if not isinstance(value, StandInContainer):
        return value
    recorder = value.wholestep_recorder
    real = recorder.real
    if isinstance(real, dict):
        items = recorder.items()
        made = copy_of_type(real)
        dict.update(made, zip(real, items, strict=True))
        return made
    made = copy_of_type(real)
    (made.update if isinstance(made, set) else made.extend)(recorder.items())
    return made


def copy_of_type(real: Any) -> Any:
    """An empty container of the same type."""
    import copy

    made = copy.copy(real)
    made.clear()
    return made


def _writes(*names: str) -> dict[str, Any]:
    """Methods that write and need to read nothing."""

    def method(name: str) -> Any:
        return lambda self, *args: self.wholestep_recorder.do(name, *args)

    return {name: method(name) for name in names}


def _reads_and_writes(*names: str) -> dict[str, Any]:
    """Methods whose effect or result depends on the contents."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs:
                raise SideEffectError(
                    f"the step calls {self.wholestep_recorder.path}.{name}() with arguments by name, which a replay "
                    "does not repeat.",
                    fix="do it outside of the step.",
                    location=user_location(),
                )
            self.wholestep_recorder.read_all()
            return self.wholestep_recorder.do(name, *args)

        return call

    return {name: method(name) for name in names}


def _reads(*names: str) -> dict[str, Any]:
    """Methods that only read: those of a copy."""

    def method(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(_plain(self), name)(*args, **kwargs)

    return {name: method(name) for name in names}


def _added(self: Any, other: Any) -> Any:
    """`values += [..]`."""
    self.extend(other)
    return self


def _element(self: Any, index: Any) -> Any:
    recorder: ContainerRecorder = self.wholestep_recorder
    if type(index) is not int:
        return _plain(self)[index]
    size = len(recorder.real)
    if index < 0 or recorder.is_structured or index >= size:
        recorder.read_all()
    if not -size <= index < size:
        raise IndexError(f"{type(recorder.real).__name__} index out of range")
    return recorder.value(index % size)


def _set_element(self: Any, index: Any, value: Any) -> None:
    recorder: ContainerRecorder = self.wholestep_recorder
    size = len(recorder.real)
    if type(index) is int and 0 <= index < size:
        recorder.do("__setitem__", index, value, keys=(index,), structured=False)
        return
    recorder.read_all()
    recorder.do("__setitem__", index, value, keys=(index,) if type(index) is int else ())


def _fresh_values(self: Any, values: Any) -> None:
    """`extend`: what an iterator gives now is what is added at each replay."""
    self.wholestep_recorder.do("extend", list(values))


_SEQUENCE = {"__getitem__": _element, "__setitem__": _set_element, "__iadd__": _added, "extend": _fresh_values}
_SEQUENCE |= _writes("append") | _reads("index", "count", "__lt__", "__le__", "__gt__", "__ge__", "__mul__", "__rmul__")
_SEQUENCE |= _reads_and_writes("pop", "remove", "reverse", "__delitem__", "__imul__")
_SEQUENCE["__reversed__"] = lambda self: reversed(self.wholestep_recorder.items())
_LIST = _SEQUENCE | _writes("insert") | _reads_and_writes("sort")
_DEQUE = _SEQUENCE | _writes("appendleft") | _reads_and_writes("insert", "popleft", "rotate")
_DEQUE["extendleft"] = lambda self, values: self.wholestep_recorder.do("extendleft", list(values))
_DEQUE["maxlen"] = property(lambda self: self.wholestep_recorder.real.maxlen)
_READS_OF_SETS = "__and__ __rand__ __sub__ __rsub__ __xor__ __rxor__ __lt__ __le__ __gt__ __ge__ union intersection "
_READS_OF_SETS += "difference symmetric_difference issubset issuperset isdisjoint"
_SET = _writes("add", "discard") | _reads(*_READS_OF_SETS.split()) | _reads_and_writes("pop", "remove")
_SET |= {"update": lambda self, *others: self.wholestep_recorder.do("update", *map(set, others))}
_SET["__ior__"] = lambda self, other: (self.update(other), self)[1]


def _get_item(self: Any, key: Any) -> Any:
    recorder: ContainerRecorder = self.wholestep_recorder
    real = recorder.real
    if key in real:
        return recorder.value(key)
    recorder.note_absent(key)
    if isinstance(real, Counter):
        return 0
    if isinstance(real, defaultdict) and real.default_factory is not None:
        value = real.default_factory()
        _set_item(self, key, value)
        return value
    raise KeyError(key)


def _get(self: Any, key: Any, default: Any = None) -> Any:
    recorder: ContainerRecorder = self.wholestep_recorder
    if key in recorder.real:
        return recorder.value(key)
    recorder.note_absent(key)
    return default


def _set_item(self: Any, key: Any, value: Any) -> None:
    recorder: ContainerRecorder = self.wholestep_recorder
    recorder.do("__setitem__", key, value, keys=(key,), structured=key not in recorder.real)


def _delete_item(self: Any, key: Any) -> None:
    _get_item(self, key)
    self.wholestep_recorder.do("__delitem__", key, keys=(key,))


def _pop(self: Any, key: Any, *default: Any) -> Any:
    if key not in self.wholestep_recorder.real:
        self.wholestep_recorder.note_absent(key)
        if default:
            return default[0]
        raise KeyError(key)
    value = _get_item(self, key)
    self.wholestep_recorder.do("__delitem__", key, keys=(key,))
    return value


def _set_default(self: Any, key: Any, default: Any = None) -> Any:
    if key in self.wholestep_recorder.real:
        return self.wholestep_recorder.value(key)
    self.wholestep_recorder.note_absent(key)
    _set_item(self, key, default)
    return default


def _update(self: Any, *others: Any, **named: Any) -> None:
    counts = isinstance(self.wholestep_recorder.real, Counter)
    given: Any = (Counter if counts else dict)(*others, **named)
    for key, value in given.items():
        self[key] = _get(self, key, 0) + value if counts else value


def _updated(self: Any, other: Any) -> Any:
    _update(self, other)
    return self


_DICT: dict[str, Any] = {
    "__getitem__": _get_item,
    "get": _get,
    "__setitem__": _set_item,
    "__delitem__": _delete_item,
    "pop": _pop,
    "setdefault": _set_default,
    "update": _update,
    "__ior__": _updated,
    "keys": lambda self: _plain(self).keys(),
    "values": lambda self: dict(_plain(self)).values(),
    "items": lambda self: dict(_plain(self)).items(),
    "__reversed__": lambda self: reversed(_plain(self)),
} | _reads_and_writes("popitem")
_COUNTS = _reads("most_common", "elements", "total", "__and__", "__sub__", "__add__")
_METHODS: dict[type, dict[str, Any]] = {
    list: _LIST,
    deque: _DEQUE,
    set: _SET,
    dict: _DICT,
    defaultdict: _DICT | {"default_factory": property(lambda self: self.wholestep_recorder.real.default_factory)},
    OrderedDict: _DICT | _reads_and_writes("move_to_end"),
    Counter: _DICT | _COUNTS,
}
_made: dict[type, type] = {}


def _stand_in_of(recorder: ContainerRecorder) -> Any:
    kind = type(recorder.real)
    if kind not in _made:
        common = {k: v for k, v in vars(StandInContainer).items() if k not in ("__dict__", "__weakref__", "__doc__")}
        refused = {name: _not_known(name) for name in _public_methods(kind) - common.keys() - _METHODS[kind].keys()}
        _made[kind] = type(kind.__name__, (StandInContainer, kind), {**refused, **common, **_METHODS[kind]})
    new: Any = kind.__new__
    made = new(_made[kind])
    if kind is list or kind is deque:
        kind.append(made, _UNREAD)
    elif kind is set:
        set.add(made, _UNREAD)
    else:
        dict.__setitem__(made, "an element of a stand-in", _UNREAD)
    made.wholestep_recorder = recorder
    return made


def _public_methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if callable(getattr(kind, name)) and not hasattr(object, name)}


def _not_known(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise SideEffectError(
            f"the step calls {name}() of {self.wholestep_recorder.path}, which it also writes.",
            fix="call it on a copy, or outside of the step.",
            location=user_location(),
        )

    return method
