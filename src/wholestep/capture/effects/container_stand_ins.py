"""Stand-ins for recorded containers: proxies of list, dict, set and deque that pass each call to a recorder.

Each is a subclass of the real type. Its own storage has one element, which raises at every use: C code that reads the
storage without calling a method finds only that.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from wholestep.errors import SideEffectError
from wholestep.ir.meta import user_location
from wholestep.ir.user_objects.plain_contents import set_items

if TYPE_CHECKING:
    from wholestep.capture.effects.containers import ContainerRecorder


class Unread(Tensor):
    """The only element in the storage of a stand-in. A tensor, so that `torch.stack(values)` reaches the mode that
    replaces it by the contents."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise SideEffectError(
            "C code reads the storage of a list or dict that the step also writes, without calling its methods.",
            fix="give it a copy: list(values), dict(values).",
            location=user_location(),
        )


_UNREAD: Any = torch.empty(0).as_subclass(Unread)


class StandInContainer:
    """The base class: holds the recorder."""

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
    """A copy of the container behind a stand-in; any other value unchanged."""
    if not isinstance(value, StandInContainer):
        return value
    recorder = value.wholestep_recorder
    real = recorder.real
    if isinstance(real, dict):
        items = recorder.items()
        made = copy_of_type(real)
        set_items(made, zip(real, items, strict=True))
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
            _refuse_named(self, name, kwargs)
            self.wholestep_recorder.read_all()
            return self.wholestep_recorder.do(name, *args)

        return call

    return {name: method(name) for name in names}


def _refuse_named(self: Any, name: str, kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise SideEffectError(
            f"the step calls {self.wholestep_recorder.path}.{name}() with arguments by name, which a replay does not "
            "repeat.",
            fix="do it outside of the step.",
            location=user_location(),
        )


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
    if isinstance(index, slice):
        value = list(value)
    recorder.do("__setitem__", index, value, keys=(index,) if type(index) is int else ())


def _fresh_values(self: Any, values: Any) -> None:
    """`extend`: the items that an iterator returns now are added at each replay."""
    self.wholestep_recorder.do("extend", list(values))


def _taken(name: str) -> Any:
    """`pop`, `popleft`."""

    def method(self: Any, *args: Any) -> Any:
        self.wholestep_recorder.read_all()
        return self.wholestep_recorder.take(name, *args)

    return method


def _sort(self: Any, **kwargs: Any) -> None:
    _refuse_named(self, "sort", kwargs)
    recorder: ContainerRecorder = self.wholestep_recorder
    values = recorder.items()
    recorder.do("sort", order=sorted(range(len(values)), key=values.__getitem__))


def _remove(self: Any, value: Any) -> None:
    recorder: ContainerRecorder = self.wholestep_recorder
    values = recorder.items()
    place = values.index(value)
    recorder.do("remove", value, order=[i for i in range(len(values)) if i != place])


_SEQUENCE = {"__getitem__": _element, "__setitem__": _set_element, "__iadd__": _added, "extend": _fresh_values}
_SEQUENCE |= _writes("append") | _reads("index", "count", "__lt__", "__le__", "__gt__", "__ge__", "__mul__", "__rmul__")
_SEQUENCE |= _reads_and_writes("reverse", "__delitem__", "__imul__") | {"pop": _taken("pop"), "remove": _remove}
_SEQUENCE["__reversed__"] = lambda self: reversed(self.wholestep_recorder.items())
_LIST = _SEQUENCE | _writes("insert") | {"sort": _sort}
_DEQUE = _SEQUENCE | _writes("appendleft") | _reads_and_writes("insert", "rotate") | {"popleft": _taken("popleft")}
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


def _pop_item(self: Any, last: bool = True) -> tuple[Any, Any]:
    keys = list(self.wholestep_recorder.read_all())
    if not keys:
        raise KeyError("popitem(): dictionary is empty")
    key = keys[-1 if last else 0]
    return key, _pop(self, key)


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
    "popitem": _pop_item,
}
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


def stand_in_of(recorder: ContainerRecorder) -> Any:
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
