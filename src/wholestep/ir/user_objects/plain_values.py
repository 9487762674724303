"""Plain Python values: what counts as one, when two are the same, and the plain contents of containers.

A replay does not run the user's Python, so plain values that it read are compared at each call. Same means: eager
could not tell them apart (`0.0` and `-0.0` differ, `nan` is itself, `1` and `True` and `1.0` differ).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ir.user_objects.slots import ABSENT

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
"""Types whose instances are values: immutable and compared by content."""

CONTAINERS = (list, dict, set, deque)
"""Types that a step might change in place."""

_DEEPEST = 50


def own_dict(obj: Any) -> dict[str, Any]:
    """`vars(obj)`, also of an object that answers `__dict__` with that of another (a proxy)."""
    attributes: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    return attributes


_GRAPH_NUMBERS = (torch.SymInt, torch.SymFloat)
"""Numbers of the graph say that they are an int or a float; comparing two of them would be a branch of the step."""


def same_plain(now: Any, before: Any) -> bool:
    """Whether two values are the same plain value. Anything that is not plain is only the same as itself."""
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(before, PLAIN) or isinstance(before, _GRAPH_NUMBERS):
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
        if depth > _DEEPEST:
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
    return dict(container) if isinstance(container, dict) else type(container)(container)


def same_contents(before: Any, now: Any) -> bool:
    """Whether a container holds what its copy holds: the same objects, or the same plain values."""
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        return all(k in now and same_plain(now[k], v) for k, v in before.items())
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


def class_code(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and descriptors of a class."""
    for name, value in list(vars(cls).items()):
        if hasattr(type(value), "__get__") and name not in ("__getattribute__", "__dict__", "__weakref__"):
            yield name, value
