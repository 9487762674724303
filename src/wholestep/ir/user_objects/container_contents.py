"""What containers and arrays held, compared again at each call however large and deep they are.

All containers under some roots are laid out flat, each with the objects that it held. Usually nothing changed, and
that is seen at C speed: lists by the identity of their elements, dicts by their version. Where an object is another
one, values are compared (`0.0` and `-0.0` differ; an equal list in the place of a list is the same contents).
"""

from __future__ import annotations

import array
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy
from torch import Tensor, nn

from wholestep.ir.user_objects.plain_values import same_plain
from wholestep.torch_private.guard_checks import DictWatch

_MOST_BYTES = 64 << 20
"""Larger arrays are not compared: reading them in a step is refused."""
_DEEPEST = 200
_NESTS = (list, dict, set, deque, tuple, frozenset)


class _Held:
    """One container and what it held."""

    __slots__ = ("container", "items", "keys", "length", "path", "weak")

    def __init__(self, container: Any, path: str) -> None:
        self.container = container
        self.path = path
        self.length = len(container)
        self.keys = list(container) if isinstance(container, dict) else None
        items = list(container.values()) if isinstance(container, dict) else list(container)
        self.weak = any(isinstance(item, Tensor) and not isinstance(item, nn.Parameter) for item in items)
        # Strong references keep identities unique; tensors, which may be large, are not kept alive.
        self.items = [weakref.ref(item) if isinstance(item, Tensor) else item for item in items] if self.weak else items

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
        if self.keys is None:
            return all(map(is_, container, self.held()))
        return all(map(is_, container, self.keys)) and all(map(is_, container.values(), self.held()))


class Contents:
    """The contents of some containers, and of all that lie in them."""

    def __init__(self, roots: Iterable[tuple[Any, str]]) -> None:
        self._roots = list(roots)
        self._take()

    def _take(self) -> None:
        self._by_id: dict[int, _Held] = {}
        stack = [(container, path, 0) for container, path in reversed(self._roots)]
        while stack:
            container, path, depth = stack.pop()
            if id(container) in self._by_id or depth > _DEEPEST:
                continue
            held = self._by_id[id(container)] = _Held(container, path)
            for key, item in zip(held.keys or range(held.length), held.held(), strict=True):
                if issubclass(type(item), _NESTS):
                    stack.append((item, f"{path}[{key!r}]", depth + 1))
        every = self._by_id.values()
        self._listed = [
            h for h in every if not isinstance(h.container, tuple | frozenset) and type(h.container) is not dict
        ]
        self._dicts = [h for h in every if type(h.container) is dict]
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

    def _equal_now(self) -> bool:
        """Whether the values are equal, though some objects are others: these are remembered from then on."""
        if next(self.changed(), None) is not None:
            return False
        self._take()
        return True

    def _equal(self, now: Any, held: _Held, depth: int) -> bool:
        if type(now) is not type(held.container) or len(now) != held.length or depth > _DEEPEST:
            return False
        if isinstance(now, set | frozenset):
            before = held.held()
            return now == set(before) and sorted(map(_type_name, now)) == sorted(map(_type_name, before))
        if held.keys is not None and not all(map(self._same, now, held.keys)):
            return False
        items = now.values() if isinstance(now, dict) else now
        return all(self._same(item, before, depth + 1) for item, before in zip(items, held.held(), strict=True))

    def _same(self, now: Any, before: Any, depth: int = 0) -> bool:
        if same_plain(now, before):
            return True
        held = self._by_id.get(id(before))
        return held is not None and self._equal(now, held, depth)


def _type_name(value: Any) -> str:
    return type(value).__qualname__


def is_array(value: Any) -> bool:
    """Whether a value is memory that Python code can read and write element by element."""
    return isinstance(value, numpy.ndarray | array.array | bytearray)


def is_large(value: Any) -> bool:
    """Whether an array is too large to be compared at each call."""
    return isinstance(value, numpy.ndarray) and value.nbytes > _MOST_BYTES


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
        elif isinstance(self.array, array.array):
            self.array[:] = array.array(self.array.typecode, self._copy)
        else:
            self.array[:] = self._copy


def _form(held: Any) -> Any:
    return (held.shape, held.dtype) if isinstance(held, numpy.ndarray) else len(held)


def _bytes(held: Any) -> Any:
    if not isinstance(held, numpy.ndarray):
        return bytes(held)
    if held.dtype.hasobject:
        return held.ravel().tolist()
    return numpy.array(held, order="C", copy=True, subok=False).reshape(-1).view(numpy.uint8)


def _same_bytes(now: Any, before: Any) -> bool:
    if isinstance(before, list):
        return len(now) == len(before) and all(map(same_plain, now, before))
    return bool(numpy.array_equal(now, before)) if isinstance(before, numpy.ndarray) else bool(now == before)
