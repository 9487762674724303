"""Objects of unusual classes that a step can reach do not disturb its capture, and values in them are still seen."""

from __future__ import annotations

import ctypes
import enum
import io
import logging
import random
import re
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cached_property, lru_cache, partial, singledispatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from capture.followed import assert_follows
from cases.parts import mlp


class RaisesOnAnyAttribute:
    """`__getattr__` that fails with something else than AttributeError."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class RaisingProperty:
    @property
    def value(self) -> Any:
        raise KeyError("value")


class EqualsArray:
    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


class RaisesOnEqual:
    def __eq__(self, other: object) -> Any:
        raise TypeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class NoBool:
    def __bool__(self) -> bool:
        raise ValueError("no truth")

    def __len__(self) -> int:
        raise ValueError("no length")


class Proxy:
    """Gives itself out as another object."""

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    @property
    def __class__(self) -> Any:
        return type(object.__getattribute__(self, "_target"))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_target"), name)


class Mode(enum.Enum):
    A = 1
    B = 2

    @property
    def factor(self) -> float:
        return 1.0 * self.value


class Flags(enum.IntFlag):
    ONE = 1
    TWO = 2


class Registered:
    """A class that counts its subclasses."""

    known: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls)


class WithCache:
    @cached_property
    def value(self) -> float:
        return 2.0

    @lru_cache  # noqa: B019
    def computed(self) -> float:
        return 2.0


@singledispatch
def dispatched(value: Any) -> float:
    return 2.0


def _closed() -> Any:
    file = io.StringIO("x")
    file.close()
    return file


def _dead() -> Any:
    return weakref.ref(_Weak())


def _self_holding() -> Any:
    node = SimpleNamespace()
    node.me = node
    node.parts = [node, {"node": node}]
    return node


ODD: dict[str, Callable[[], Any]] = {
    "raising __getattr__": RaisesOnAnyAttribute,
    "raising property": RaisingProperty,
    "__eq__ of arrays": EqualsArray,
    "raising __eq__": RaisesOnEqual,
    "raising __bool__ and __len__": NoBool,
    "proxy": lambda: Proxy(SimpleNamespace(scale=2.0)),
    "proxy of a module": lambda: Proxy(nn.Linear(2, 2)),
    "weak proxy": lambda: weakref.proxy(_KEPT),
    "weak reference": lambda: weakref.ref(_KEPT),
    "dead reference": _dead,
    "Mock": mock.Mock,
    "MagicMock": mock.MagicMock,
    "Mock of a module": lambda: mock.Mock(spec=nn.Linear(2, 2)),
    "enum member": lambda: Mode.A,
    "enum class": lambda: Mode,
    "flag": lambda: Flags.ONE | Flags.TWO,
    "lock": threading.Lock,
    "event": threading.Event,
    "thread": lambda: threading.current_thread(),
    "logger": lambda: logging.getLogger("odd"),
    "closed file": _closed,
    "buffer": lambda: io.BytesIO(b"abc"),
    "stdout": lambda: sys.stdout,
    "pattern": lambda: re.compile("a"),
    "path": lambda: Path("."),
    "random": lambda: random.Random(3),
    "partial": lambda: partial(max, 1),
    "dispatched function": lambda: dispatched,
    "cached property": WithCache,
    "registered class": lambda: Registered,
    "object that holds itself": _self_holding,
    "code": lambda: _self_holding.__code__,
    "range": lambda: range(3),
    "slice": lambda: slice(1, 2),
    "ellipsis": lambda: ...,
    "memory": lambda: memoryview(b"abc"),
    "array scalar": lambda: np.float32(1.5),
    "structured array": lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "module of Python": lambda: sys,
    "traceback": lambda: ValueError("x").with_traceback(None),
    "stream": lambda: torch.device("cpu"),
}

_KEPT = mlp(torch.device("cpu"))


PLACES = ("attribute", "variable", "list", "module", "class")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
@pytest.mark.parametrize("place", PLACES)
def test_odd_objects_in_reach_do_not_disturb_a_step(place: str, every: bool) -> None:
    """`some`: each object in one of the places, and each place with some of the objects."""
    for number, (kind, make) in enumerate(ODD.items()):
        if not every and PLACES[number % len(PLACES)] != place:
            continue
        try:
            _step_beside(make(), place)
        except Exception as error:
            error.add_note(f"with: {kind}")
            raise


def _step_beside(odd: Any, place: str) -> None:

    class Holder:
        held = odd if place == "class" else None

        def __init__(self) -> None:
            self.scale = 2.0
            self.items = [odd] if place == "list" else []
            self.odd = odd if place == "attribute" else None

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "odd", odd if place == "module" else None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1.5

    holder, scale = Holder(), Scale()

    def step(x: torch.Tensor) -> torch.Tensor:
        found = (holder.odd, holder.items, holder.held)
        if place == "variable":
            found = (odd, None, None)
        assert found is not None
        return scale(x) * holder.scale

    compiled = ws.compile(step)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    holder.scale = 4.0
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 6.0))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 6.0))


def test_a_capture_registers_no_class_of_its_own() -> None:
    class Plugin(Registered):
        scale = 2.0

    plugin = Plugin()
    before = list(Registered.known)
    step = ws.compile(lambda x: x * plugin.scale)
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert Registered.known == before
    assert type(plugin) is Plugin


def enum_in_an_attribute() -> Any:
    holder = SimpleNamespace(mode=Mode.A)
    return lambda: holder.mode.factor, lambda i: setattr(holder, "mode", Mode.B if i % 2 else Mode.A)


def enum_in_a_dict() -> Any:
    factors = {Mode.A: 1.0, Mode.B: 2.0}
    holder = SimpleNamespace(mode=Mode.A)

    def change(i: int) -> None:
        holder.mode = Mode.B if i % 2 else Mode.A
        factors[Mode.B] += 1.0

    return lambda: factors[holder.mode], change


def flag_in_a_class() -> Any:
    class Config:
        flags = Flags.ONE

    return lambda: 2.0 if Flags.TWO in Config.flags else 1.0, lambda i: setattr(
        Config, "flags", Flags.TWO if i % 2 else Flags.ONE
    )


def behind_a_weak_reference() -> Any:
    holder = _Weak()
    reference = weakref.ref(holder)
    keep = [holder]
    return lambda: reference().scale, lambda i: setattr(keep[0], "scale", i + 2.0)  # type: ignore[union-attr]


def behind_a_proxy() -> Any:
    target = SimpleNamespace(scale=1.0)
    proxy = Proxy(target)
    return lambda: proxy.scale, lambda i: setattr(target, "scale", i + 2.0)


def function_attribute() -> Any:
    def scale() -> float:
        return scale.factor  # type: ignore[attr-defined]

    scale.factor = 1.0  # type: ignore[attr-defined]
    return scale, lambda i: setattr(scale, "factor", i + 2.0)


def function_counter() -> Any:
    def scale() -> int:
        scale.calls = getattr(scale, "calls", 0) + 1  # type: ignore[attr-defined]
        return scale.calls  # type: ignore[attr-defined,no-any-return]

    return scale, lambda i: None, lambda: vars(scale)


def default_of_a_function() -> Any:
    def scale(factor: float = 1.0) -> float:
        return factor

    return lambda: scale(), lambda i: setattr(scale, "__defaults__", (i + 2.0,))


def partial_argument() -> Any:
    factors = [1.0]
    scale = partial(lambda values, k: values[k], factors, 0)
    return lambda: scale(), lambda i: factors.__setitem__(0, i + 2.0)


class _Weak:
    def __init__(self) -> None:
        self.scale = 1.0


FOLLOWED = [
    enum_in_an_attribute,
    enum_in_a_dict,
    flag_in_a_class,
    behind_a_weak_reference,
    behind_a_proxy,
    function_counter,
    function_attribute,
    default_of_a_function,
    partial_argument,
]


@pytest.mark.parametrize("make", FOLLOWED, ids=lambda make: make.__name__)
def test_a_value_behind_an_odd_object_is_used_as_it_is_at_each_call(make: Callable[[], Any]) -> None:
    assert_follows(make)


class _Point(ctypes.Structure):
    _fields_: ClassVar = [("x", ctypes.c_int)]
    scale = 1.0


def value_of_a_class_made_in_c() -> Any:
    _Point.scale = 1.0
    return lambda: _Point.scale, lambda i: setattr(_Point, "scale", i + 2.0)


def beside_a_generator_of_the_system() -> Any:
    system, factors = random.SystemRandom(), [1.0]
    return lambda: factors[0] if factors else system.random(), lambda i: factors.__setitem__(0, i + 2.0)


def beside_a_bound_method_of_numpy() -> Any:
    draw, factors = np.random.default_rng(0).normal, [1.0]
    return lambda: factors[0] if factors else draw(), lambda i: factors.__setitem__(0, i + 2.0)


IN_C = [value_of_a_class_made_in_c, beside_a_generator_of_the_system, beside_a_bound_method_of_numpy]


@pytest.mark.parametrize("make", IN_C, ids=lambda make: make.__name__)
def test_objects_made_in_c_in_reach_of_a_step_do_not_disturb_it(make: Callable[[], Any]) -> None:
    assert_follows(make)


def test_a_cpu_with_an_index_is_the_cpu() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.full((2,), 3.0, device="cpu:0")
        copied = x.to("cpu:0")  # another tensor, as in eager
        copied.add_(1)
        return x + y, copied, torch.cat([x, torch.arange(2, device=torch.device("cpu", 0))])

    x = torch.ones(2)
    expected, compiled = step(x), ws.compile(step)
    for want, got in zip(expected, compiled(x), strict=True):
        assert torch.equal(want, got)
        assert want.device == got.device
    assert torch.equal(x, torch.ones(2))


class HasProxy:
    """Reaches its owner by a weak proxy, as Lightning's optimizers do."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.proxy(owner)


def test_a_method_called_through_a_weak_proxy_is_part_of_the_step() -> None:
    class Owner:
        scale = 2.0

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    owner = Owner()
    holder = HasProxy(owner)
    step = ws.compile(lambda x: holder.owner.scaled(x))
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    owner.scale = 3.0
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 3.0))
