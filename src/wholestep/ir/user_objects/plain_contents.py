"""Plain values and containers in the user's objects: compared at each call, copied, set again.

A replay does not run the user's Python, so plain values that it read are compared at each call. Same means: eager
could not tell them apart (`0.0` and `-0.0` differ, `nan` is itself, `1` and `True` and `1.0` differ).

Containers (`Contents`, `ArrayCopy`) under some roots are laid out flat, each with the objects that it held. Usually
nothing changed, and that is seen at C speed: lists by the identity of their elements, dicts by their version. Where an
object is another one, values are compared (an equal list in the place of a list is the same contents).

The leaves of containers in optimizer state are slots of their own:

    optimizer.state[w]["GG"] = [a, b]     optimizer.state[w].GG[0], optimizer.state[w].GG[1]
    optimizer.state["k"] = 3              a value of the whole optimizer: OwnerSlot
    param_groups[0]["buffer"][2][0] = s   NestedSlot(HyperSlot(..., "buffer"), (2, 0))

The step is traced on copies of the containers; `capture/results` binds what it changed. The structure is a guard.
"""

from __future__ import annotations

import abc
import copy
import functools
import gc
import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.errors import UnsupportedError
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.opaque_state import (
    bytes_of,
    is_memory,
    set_state,
    size_of,
    tells_state,
    told_state,
    write_bytes,
)
from wholestep.ir.user_objects.slots import ABSENT, MappingSlot, SequenceSlot, Slot, StoredItemSlot
from wholestep.ir.user_objects.wrapper_tensors import (
    InnerName,
    InnerTensorSlot,
    WrapperForm,
    inner_tensors,
    is_wrapper,
    made_of,
    plain_context,
)
from wholestep.torch_private.guard_checks import DictWatch

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
"""Types whose instances are values: immutable and compared by content."""

CONTAINERS = (list, dict, set, deque)
"""Types that a step might change in place."""

_DEEPEST_VALUE = 50


def own_dict(obj: Any) -> dict[str, Any]:
    """`vars(obj)`, also of an object that answers `__dict__` with that of another (a proxy)."""
    attributes: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    return attributes


_GRAPH_NUMBERS = (torch.SymInt, torch.SymFloat)
"""Symbolic scalars report int or float; comparing two of them would be a branch of the step."""


_WITHOUT_ATTRIBUTES = frozenset(PLAIN)


def has_attributes(value: Any) -> bool:
    """Whether a number or text is of a class that gives it attributes: `class Scale(float)`."""
    kind = type(value)
    return kind not in _WITHOUT_ATTRIBUTES and not issubclass(kind, Enum) and kind.__dictoffset__ != 0


def same_plain(now: Any, before: Any) -> bool:
    """Whether two values are the same plain value. Anything that is not plain is only the same as itself."""
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(before, PLAIN) or isinstance(before, _GRAPH_NUMBERS):
        return False
    if has_attributes(before) and (vars(before) or vars(now)):
        return False
    if isinstance(before, float):
        both_nan = now != now and before != before
        return both_nan or (now == before and math.copysign(1.0, now) == math.copysign(1.0, before))
    return bool(now == before)


def kind_of(value: Any) -> Any:
    """What a slot holds that the step itself rebinds: nothing, None, a tensor, a number, or this very object."""
    if value is ABSENT or value is None:
        return value
    if isinstance(value, Tensor):
        return Tensor
    return type(value) if isinstance(value, PLAIN) else id(value)


def skeleton(value: Any, depth: int = 0) -> Any:
    """A value that is equal for equal contents; objects count by identity."""
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, list | tuple | dict | deque):
        if depth > _DEEPEST_VALUE:
            return (id(value), len(value))
        if isinstance(value, dict):
            return (type(value), tuple((key, skeleton(item, depth + 1)) for key, item in value.items()))
        return (type(value), tuple(skeleton(item, depth + 1) for item in value))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(value))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return (str(value.dtype), value.shape, value.tobytes())
    return id(value)


def copy_of(container: Any) -> Any:
    """A shallow copy of a container, to put its contents back."""
    return dict(stored_items(container)) if isinstance(container, dict) else type(container)(container)


def stored_items(container: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """What a dict holds, also where its class makes another object at each `d[key]` (transformers' ACT2FN)."""
    return OrderedDict.items(container) if isinstance(container, OrderedDict) else dict.items(container)


def set_items(container: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> None:
    """Store items in a dict of any kind: a Counter would add up, and an OrderedDict keeps its order besides."""
    store: Any = OrderedDict.__setitem__ if isinstance(container, OrderedDict) else dict.__setitem__
    for key, value in items:
        store(container, key, value)


def same_contents(before: Any, now: Any) -> bool:
    """Whether a container holds what its copy holds: the same objects, or the same plain values."""
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        stored = dict(stored_items(now))
        return all(k in stored and same_plain(stored[k], v) for k, v in before.items())
    if isinstance(before, set):
        return bool(before == now)
    return all(same_plain(b, a) for a, b in zip(before, now, strict=True))


def assign_contents(container: Any, contents: Any) -> None:
    """Make a container hold the contents of a copy, in place."""
    if isinstance(container, list):
        container[:] = contents
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(contents)
    else:
        container.update(contents)


def registered(cls: type) -> frozenset[type]:
    """The classes that were registered with an abstract base class."""
    abc_module: Any = abc
    known = abc_module._get_dump(cls)[0]  # what `ABC._dump_registry` prints
    return frozenset(found for found in (reference() for reference in known) if found is not None)


def class_code(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and descriptors of a class."""
    for name, value in list(vars(cls).items()):
        if hasattr(type(value), "__get__") and name not in ("__getattribute__", "__dict__", "__weakref__"):
            yield name, value


LRU_CACHE = type(functools.lru_cache(len))


def entries_of(cache: Any) -> dict[Any, Any]:
    """The entries of a `functools.lru_cache`: its dict, which holds results, or links to them in the order of use."""
    own = vars(cache)
    return next((found for found in gc.get_referents(cache) if type(found) is dict and found is not own), {})


_MOST_BYTES = 64 << 20
"""Larger arrays are not compared: reading them in a step is refused."""
_DEEPEST_CONTAINER = 200
_NESTS = (list, dict, set, deque, tuple, frozenset)


def replaced(path: str) -> str:
    """The name of the fact that a tuple or list was replaced by another, among the paths of numbers that changed."""
    return f"{path}[]"


Inputs = Mapping[int, Set[Any]]
"""By identity of a container, the keys of numbers in it that are inputs of a graph."""


_OF_DICTS = ("__iter__", "__len__", "keys", "values")


def item_slot(container: Any, key: Any, kind: InputKind, path: str) -> Slot | None:
    """The place of an item in a list, deque or dict, past the methods of its class; None where the class decides what
    is in it."""
    cls: Any = type(container)
    if isinstance(container, dict):
        own = OrderedDict if issubclass(cls, OrderedDict) else dict
        if any(getattr(cls, name) is not getattr(own, name) for name in _OF_DICTS):
            return None
        stored = cls.__getitem__ is dict.__getitem__ and cls.__setitem__ is own.__setitem__ and cls.get is dict.get
        return (MappingSlot if stored else StoredItemSlot)(kind, path, None, container, key)
    return SequenceSlot(kind, path, None, container, key) if cls in (list, deque) else None


class _Held:
    """One container and what it held."""

    __slots__ = ("container", "inputs", "items", "keys", "length", "path", "weak")

    def __init__(self, container: Any, path: str, inputs: Set[Any]) -> None:
        self.container = container
        self.path = path
        self.length = len(container)
        self.keys = list(container) if isinstance(container, dict) else None
        items = list(container.values()) if isinstance(container, dict) else list(container)
        self.weak = any(isinstance(item, Tensor) and not isinstance(item, nn.Parameter) for item in items)
        # Strong references keep identities unique; tensors, which may be large, are not kept alive.
        self.items = [weakref.ref(item) if isinstance(item, Tensor) else item for item in items] if self.weak else items
        places = range(self.length) if self.keys is None else self.keys
        self.inputs = [i for i, key in enumerate(places) if key in inputs] if inputs else []
        """Where numbers lie that are inputs: they do not count."""

    def held(self) -> list[Any]:
        """What the container held; None in the place of a tensor that is gone."""
        if not self.weak:
            return self.items
        return [item() if type(item) is weakref.ref else item for item in self.items]

    def is_same(self) -> bool:
        """Whether it holds the very same objects."""
        container = self.container
        if len(container) != self.length:
            return False
        if self.keys is not None and not all(map(is_, container, self.keys)):
            return False
        return all(map(is_, self.now(), self.held()))

    def now(self) -> Iterable[Any]:
        """What the container holds now, with the former values of inputs."""
        values: Iterable[Any] = self.container if self.keys is None else self.container.values()
        if self.inputs:
            values = list(values)
            for i in self.inputs:
                values[i] = self.items[i]
        return values


_NO_INPUTS: Inputs = {}


class Contents:
    """The contents of some containers, and of all that lie in them."""

    def __init__(
        self, roots: Iterable[tuple[Any, str]], without: Set[int] = frozenset(), inputs: Inputs = _NO_INPUTS
    ) -> None:
        """`without`: identities of containers whose contents do not count. `inputs`: the numbers that do not count."""
        self._roots = list(roots)
        self._without = without
        self._inputs = inputs
        self._take()

    def _take(self) -> None:
        self._by_id: dict[int, _Held] = {}
        stack = [(container, path, 0) for container, path in reversed(self._roots)]
        while stack:
            container, path, depth = stack.pop()
            if id(container) in self._by_id or depth > _DEEPEST_CONTAINER or id(container) in self._without:
                continue
            inputs = self._inputs.get(id(container), frozenset())
            held = self._by_id[id(container)] = _Held(container, path, inputs)
            for key, item in zip(held.keys or range(held.length), held.held(), strict=True):
                if issubclass(type(item), _NESTS):
                    stack.append((item, f"{path}[{key!r}]", depth + 1))
        every = self._by_id.values()
        mutable = [h for h in every if not isinstance(h.container, tuple | frozenset)]
        self._listed = [h for h in mutable if type(h.container) is not dict or h.inputs]
        self._dicts = [h for h in mutable if type(h.container) is dict and not h.inputs]
        self._watch: DictWatch | None = None

    def is_needed(self) -> bool:
        return bool(self._roots)

    def are_same(self) -> bool:
        """Whether all containers hold what they held."""
        if not all(held.is_same() for held in self._listed):
            return self._equal_now()
        if self._watch is None or not self._watch.unchanged():
            if not all(held.is_same() for held in self._dicts):
                return self._equal_now()
            self._watch = DictWatch([held.container for held in self._dicts])
        return True

    def changed(self) -> Iterator[str]:
        """The paths of containers with other contents."""
        for held in self._by_id.values():
            if not held.is_same() and not self._equal(held.container, held, 0):
                yield held.path

    def changed_items(self) -> Iterator[tuple[str, Any, Any]]:
        """Items of lists and dicts that are other objects, where nothing was added or removed: path, before, now."""
        for held in self._by_id.values():
            container = held.container
            if isinstance(container, set | tuple | frozenset) or len(container) != held.length or held.is_same():
                continue
            keys = range(held.length) if held.keys is None else held.keys
            if held.keys is not None and not all(map(is_, container, keys)):
                continue
            for key, before, now in zip(keys, held.held(), held.now(), strict=True):
                if now is not before and not isinstance(key, Tensor):
                    yield f"{held.path}[{key!r}]", before, now

    def _equal_now(self) -> bool:
        """Whether the values are equal, though some objects are others: these are remembered from then on."""
        if next(self.changed(), None) is not None:
            return False
        self._take()
        return True

    def _equal(self, now: Any, held: _Held, depth: int) -> bool:
        if type(now) is not type(held.container) or len(now) != held.length or depth > _DEEPEST_CONTAINER:
            return False
        if held.inputs and now is not held.container:
            return False  # the graph reads them from the container that it was captured with
        if isinstance(now, set | frozenset):
            before = held.held()
            return now == set(before) and sorted(map(_type_name, now)) == sorted(map(_type_name, before))
        if held.keys is not None and not all(map(self._same, now, held.keys)):
            return False
        items = held.now() if held.inputs else now.values() if isinstance(now, dict) else now
        return all(self._same(item, before, depth + 1) for item, before in zip(items, held.held(), strict=True))

    def _same(self, now: Any, before: Any, depth: int = 0) -> bool:
        if same_plain(now, before):
            return True
        held = self._by_id.get(id(before))
        return held is not None and self._equal(now, held, depth)


def _type_name(value: Any) -> str:
    return type(value).__qualname__


def is_array(value: Any) -> bool:
    """Whether a value is compared as a whole: an array, other memory, a lock, an event."""
    return isinstance(value, numpy.ndarray) or is_memory(value) or tells_state(value)


def is_large(value: Any) -> bool:
    """Whether an array is too large to be compared at each call."""
    return (isinstance(value, numpy.ndarray) and value.nbytes > _MOST_BYTES) or (
        is_memory(value) and size_of(value) > _MOST_BYTES
    )


class ArrayCopy:
    """An array as it was."""

    def __init__(self, held: Any, path: str) -> None:
        self.array = held
        self.path = path
        self._form = _form(held)
        self._copy = _bytes(held)

    def is_same(self) -> bool:
        return _form(self.array) == self._form and _same_bytes(_bytes(self.array), self._copy)

    def restore(self) -> None:
        """Put the contents back."""
        if isinstance(self.array, numpy.ndarray):
            flat = self._copy if isinstance(self._copy, list) else self._copy.view(self.array.dtype)
            for i, value in enumerate(flat) if isinstance(flat, list) else ():
                self.array.flat[i] = value
            if not isinstance(flat, list):
                self.array[...] = flat.reshape(self.array.shape)
        elif is_memory(self.array):
            write_bytes(self.array, self._copy)
        else:
            set_state(self.array, self._copy)


def _form(held: Any) -> Any:
    return (held.shape, held.dtype) if isinstance(held, numpy.ndarray) else None


def _bytes(held: Any) -> Any:
    if not isinstance(held, numpy.ndarray):
        return bytes_of(held) if is_memory(held) else told_state(held)
    if held.dtype.hasobject:
        return held.ravel().tolist()
    return numpy.array(held, order="C", copy=True, subok=False).reshape(-1).view(numpy.uint8)


def _same_bytes(now: Any, before: Any) -> bool:
    if isinstance(before, list):
        return len(now) == len(before) and all(map(same_plain, now, before))
    return bool(numpy.array_equal(now, before)) if isinstance(before, numpy.ndarray) else bool(now == before)


NESTS = (list, tuple, dict, deque)
"""Containers whose leaves are slots."""


@dataclass(frozen=True, eq=False)
class OwnerSlot(Slot):
    """`optimizer.state[owner]` as a whole."""

    optimizer: Optimizer
    owner: Any

    def get(self) -> Any:
        return self.optimizer.state.get(self.owner, ABSENT)

    def set(self, value: Any) -> None:
        self.optimizer.state[self.owner] = value

    def remove(self) -> None:
        self.optimizer.state.pop(self.owner, None)


@dataclass(frozen=True, eq=False)
class NestedSlot(Slot):
    """A leaf of the containers in another slot."""

    root: Slot
    keys: tuple[Any, ...]

    def get(self) -> Any:
        value = self.root.get()
        for key in self.keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return ABSENT
        return value

    def set(self, value: Any) -> None:
        before = self.root.get()
        after = _with_leaf(before, self.keys, value)
        if after is not before:
            self.root.set(after)


@dataclass(frozen=True, eq=False)
class FreshContainersSlot(Slot):
    """A slot that is set to new containers at each replay; eager builds new ones, too."""

    root: Slot

    def get(self) -> Any:
        return self.root.get()

    def set(self, value: Any) -> None:
        self.root.set(map_leaves(value, lambda leaf, keys: leaf.build() if type(leaf) is WrapperForm else leaf))

    def remove(self) -> None:
        self.root.remove()


def is_nest(value: Any) -> bool:
    """Whether the leaves of a value are slots: a container, or a tensor made of other tensors."""
    return isinstance(value, NESTS) or is_wrapper(value)


def copy_nest(value: Any) -> Any:
    """The same leaves in new containers."""
    return map_leaves(value, lambda leaf, keys: leaf) if is_nest(value) else value


def map_leaves(
    value: Any,
    change: Callable[[Any, tuple[Any, ...]], Any],
    keys: tuple[Any, ...] = (),
    wrapper: Callable[[Tensor, dict[InnerName, Any]], Any] = made_of,
) -> Any:
    """Containers of the same types with other leaves. `change` takes a leaf and its keys, `wrapper` a tensor made of
    others and what its tensors became."""
    if isinstance(value, tuple):
        items = [map_leaves(item, change, (*keys, i), wrapper) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_wrapper(value):
        inner = inner_tensors(value)
        return wrapper(value, {name: map_leaves(inner[name], change, (*keys, name), wrapper) for name in inner})
    if not isinstance(value, NESTS):
        return change(value, keys)
    result: Any = copy.copy(value)
    for key in value if isinstance(value, dict) else range(len(value)):
        result[key] = map_leaves(value[key], change, (*keys, key), wrapper)
    return result


def leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf with its keys."""
    if is_wrapper(value):
        value = inner_tensors(value)
    if not isinstance(value, NESTS):
        yield keys, value
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield from leaves(value[key], (*keys, key))


def structure_of(value: Any, *, numbers: tuple[type, ...] = (int, float)) -> Any:
    """Equal where containers are nested alike and hold the same constants. Tensors and `numbers` count by type."""
    if is_wrapper(value):
        form = (value.dtype, tuple(value.shape), value.stride(), skeleton(plain_context(value)))
        inner = inner_tensors(value).items()
        return type(value), form, tuple((name, structure_of(each, numbers=numbers)) for name, each in inner)
    if isinstance(value, Tensor):
        return Tensor
    if type(value) in numbers:
        return type(value)
    if isinstance(value, dict):
        return type(value), tuple((key, structure_of(item, numbers=numbers)) for key, item in value.items())
    if isinstance(value, NESTS):
        return type(value), tuple(structure_of(item, numbers=numbers) for item in value)
    return skeleton(value)


def refuse_sets_of_tensors(value: Any, path: str) -> None:
    """A set has no order in which a graph could name its tensors."""
    for keys, leaf in leaves(value):
        if isinstance(leaf, set | frozenset) and any(isinstance(item, Tensor) for item in leaf):
            raise UnsupportedError(
                f"{_path(path, keys)} is a {type(leaf).__name__} of tensors.", fix="keep them in a list or a dict."
            )


def nested_slot(slot: Slot, keys: tuple[Any, ...]) -> Slot:
    """The slot of a leaf; the slot itself where there are no keys."""
    if keys and type(keys[-1]) is InnerName:
        wrapper = nested_slot(slot, keys[:-1])
        return InnerTensorSlot(slot.kind, f"{wrapper.path}.{keys[-1]}", slot.of, wrapper, str(keys[-1]))
    return NestedSlot(slot.kind, _path(slot.path, keys), slot.of, slot, keys) if keys else slot


def mutable_nests(value: Any) -> Iterator[Any]:
    """The containers in a value that can be changed in place."""
    if is_wrapper(value):
        yield value
    elif isinstance(value, NESTS):
        if not isinstance(value, tuple):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from mutable_nests(item)


def _path(path: str, keys: tuple[Any, ...]) -> str:
    return path + "".join(f".{key}" if type(key) is InnerName else f"[{key!r}]" for key in keys)


def _with_leaf(value: Any, keys: tuple[Any, ...], leaf: Any) -> Any:
    """The containers with another leaf: changed in place where they can be."""
    if not keys:
        return leaf
    key, rest = keys[0], keys[1:]
    item = _with_leaf(value[key] if rest else None, rest, leaf)
    if isinstance(value, tuple):
        items = [*value[:key], item, *value[key + 1 :]]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    value[key] = item
    return value
