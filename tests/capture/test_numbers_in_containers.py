"""Numbers in lists and dicts of the user's that change between calls: one graph for all values."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import wholestep as ws
from capture.followed import assert_follows
from harness import device
from selection import each_now


class AttributeDict(dict[str, Any]):
    """The common one: attributes are items."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class BothDict(dict[str, Any]):
    """Keeps each value twice: as item and as attribute."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    __setitem__ = __setattr__


class SelfDict(dict[str, Any]):
    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


def _item(key: Any) -> tuple[Callable[[Any], Any], Callable[[Any, float], None]]:
    return (lambda held: held[key]), lambda held, value: held.__setitem__(key, value)


def _attribute(held: Any, value: float) -> None:
    held.w = value


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, float], None]]] = {
    "dict": (lambda: {"w": 1.0, "name": "text"}, *_item("w")),
    "list": (lambda: [1.0, 2.0], *_item(0)),
    "deque": (lambda: deque([1.0, 2.0], maxlen=2), *_item(1)),
    "ordered": (lambda: OrderedDict(a=3, w=1.0), *_item("w")),
    "default": (lambda: defaultdict(float, w=1.0), *_item("w")),
    "get": (lambda: {"w": 1.0}, lambda held: held.get("w", 3.0), _item("w")[1]),
    "sum": (lambda: [1.0, 2.0], sum, _item(0)[1]),
    "items": (lambda: {"w": 1.0, "ab": 2}, lambda held: sum(v * len(k) for k, v in held.items()), _item("w")[1]),
    "attribute": (lambda: AttributeDict(w=1.0), lambda held: held.w, _attribute),
    "both": (lambda: BothDict(w=1.0), lambda held: held.w + held["w"], _attribute),
    "self": (lambda: SelfDict(w=1.0), lambda held: held.w * held["w"], _attribute),
    "whole": (lambda: {"w": 1}, lambda held: held["w"] / 2, lambda held, value: held.__setitem__("w", int(8 * value))),
}


@pytest.mark.parametrize("place", ["itself", "in a dict", "in an attribute"])
@pytest.mark.parametrize("kind", each_now(KINDS, "deque", "both", "self"))
def test_a_number_in_a_container_that_changes_becomes_an_input(kind: str, place: str) -> None:
    make, read, write = KINDS[kind]

    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        held = make()
        if place == "in a dict":
            outer = {"a": [held]}
            return lambda: read(outer["a"][0]), lambda i: write(held, 0.5 ** (i + 1))
        if place == "in an attribute":
            config = SimpleNamespace(loss=held)
            return lambda: read(config.loss), lambda i: write(held, 0.5 ** (i + 1))
        return lambda: read(held), lambda i: write(held, 0.5 ** (i + 1))

    assert_follows(case, graphs=2)


def test_numbers_in_containers_of_a_module_become_inputs() -> None:
    module = torch.nn.Linear(1, 1)

    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        held: Any = module
        held.weights, held.config = [1.0], {"w": 2.0}

        def change(i: int) -> None:
            held.weights[0] = 0.1 * i
            held.config["w"] *= 0.5

        return lambda: held.weights[0] + held.config["w"], change

    assert_follows(case, graphs=2)


TUPLES: dict[str, Callable[[], tuple[Callable[[], Any], Callable[[Any], None]]]] = {}


def _tuple_place(make: Callable[[], Any]) -> None:
    TUPLES[make.__name__] = make


@_tuple_place
def of_an_object() -> Any:
    config = SimpleNamespace(w=(1.0, 0, "text"))
    return lambda: config.w, lambda new: setattr(config, "w", new)


@_tuple_place
def of_a_module() -> Any:
    module: Any = torch.nn.Linear(1, 1)
    module.w = (1.0, 0, "text")
    return lambda: module.w, lambda new: setattr(module, "w", new)


@_tuple_place
def as_a_list() -> Any:
    config = SimpleNamespace(w=[1.0, 0, "text"])
    return lambda: config.w, lambda new: setattr(config, "w", list(new))


class Weights(NamedTuple):
    w: float
    n: int
    text: str


@_tuple_place
def with_names() -> Any:
    config = SimpleNamespace(w=Weights(1.0, 0, "text"))
    return lambda: config.w, lambda new: setattr(config, "w", Weights(*new))


@_tuple_place
def of_a_closure() -> Any:
    w: Any = (1.0, 0, "text")

    def write(new: Any) -> None:
        nonlocal w
        w = new

    return lambda: w, write


@pytest.mark.parametrize("place", each_now(TUPLES, "with_names", "of_a_module", "as_a_list"))
def test_numbers_in_a_tuple_that_is_replaced_become_inputs(place: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        read, write = TUPLES[place]()

        def change(i: int) -> None:
            write((0.5 ** (i + 1), i + 1, "text" if i < 5 else "other"))

        def value() -> Any:
            w, n, text = read()
            return w * n + len(text) + (1.0 if isinstance(read(), tuple | list) else 2.0)

        return value, change

    assert_follows(case, graphs=3, steps=8)


def test_a_list_that_is_replaced_and_that_the_step_writes_does_as_eager() -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None], Callable[[], Any]]:
        config = SimpleNamespace(w=[1.0, 0.0])
        old = [config.w]

        def value() -> Any:
            config.w[1] += config.w[0]
            return config.w[1]

        def between(i: int) -> None:
            config.w = [0.5**i, 0.25]
            old.append(config.w)

        return value, between, lambda: old

    assert_follows(case)


def test_a_list_in_two_places_of_which_one_gets_another_list() -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        config, other = SimpleNamespace(w=[1.0, 0.5]), SimpleNamespace(w=[0.0])
        other.w = config.w

        def between(i: int) -> None:
            config.w = [0.5**i, 0.25]
            other.w[0] = 0.125 * i
            if i == 4:
                other.w = config.w

        return lambda: config.w[0] + other.w[0] + (config.w is other.w), between

    assert_follows(case, steps=8)


OTHERS: dict[str, Any] = {
    "longer": (0.5, 0.25, 2.0),
    "list": [0.5, 0.25],
    "types": ("a", 0.25),
    "type of a number": (1, 0.25),
    "tensor": (torch.tensor(0.5), 0.25),
    "none": None,
}


@pytest.mark.parametrize("change", each_now(OTHERS, "longer", "type of a number", "none"))
def test_a_tuple_that_is_replaced_by_something_else_is_seen(change: str) -> None:

    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        config = SimpleNamespace(w=(1.0, 0.5))

        def value() -> Any:
            w = config.w
            if w is None:
                return 3.0
            return (w[0] if type(w[0]) is not str else 5.0) * w[1] * len(w) + (type(w[0]) is int) + (type(w) is list)

        def between(i: int) -> None:
            config.w = OTHERS[change] if i in (3, 5) else (0.5**i, 0.25 * i)

        return value, between

    assert_follows(case, steps=8)


USES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "branch": lambda held: 2.0 if held["w"] > 0.2 else held["w"],
    "text": lambda held: len(f"{held['w']:.5g}"),
    "key": lambda held: {0.5: 3.0}.get(held["w"], 2.0),
    "copy": lambda held: dict(held)["w"] * next(iter(held.values())),
    "unused": lambda held: len(held),
    "type": lambda held: held["w"] if type(held["w"]) is float else 7.0,
    "equality": lambda held: 2.0 if held == {"w": 0.25} else held["w"],
}


@pytest.mark.parametrize("use", each_now(USES, "branch", "text", "copy", "equality"))
def test_what_a_step_does_with_such_a_number_is_what_it_does_in_eager(use: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        held: dict[str, Any] = {"w": 1.0}
        return lambda: USES[use](held), lambda i: held.__setitem__("w", 0.5 ** (i % 4))

    assert_follows(case)


def _reordered(held: dict[str, Any]) -> None:
    held["w"] = held.pop("w")


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "a new key": lambda held, i: held["c"].__setitem__(f"k{i}", 3.0),
    "a key less": lambda held, i: held["c"].pop("other", None),
    "another order": lambda held, i: _reordered(held["c"]),
    "another type": lambda held, i: held["c"].__setitem__("w", 3),
    "a bool": lambda held, i: held["c"].__setitem__("w", True),
    "another container": lambda held, i: held.__setitem__("c", {"w": 0.125, "other": 2.0}),
    "an equal container": lambda held, i: held.__setitem__("c", dict(held["c"])),
    "another text": lambda held, i: held["c"].__setitem__("name", "t" * i),
}


@pytest.mark.parametrize("change", each_now(CHANGES, "a key less", "another type", "another container"))
def test_another_change_of_the_container_is_seen_after_its_number_became_an_input(change: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        held = {"c": {"w": 1.0, "other": 2.0, "name": "text"}}

        def read() -> Any:
            c: Any = held["c"]
            return c["w"] * (2 if type(c["w"]) is float else 3) + len(c) + len(c.get("name", "")) + list(c).index("w")

        def between(i: int) -> None:
            held["c"]["w"] = 0.75**i
            if i in (2, 4):
                CHANGES[change](held, i)

        return read, between

    assert_follows(case, steps=7)


@pytest.mark.parametrize("uses", ["value", "branch"])
def test_a_list_in_an_attribute_that_is_replaced_by_an_equal_one_is_seen(uses: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        config = SimpleNamespace(weights=[1.0, 2.0])
        first = config.weights

        def between(i: int) -> None:
            config.weights[0] = 0.5**i
            if i == 3:
                config.weights = list(config.weights)
            if i > 3:
                first[0] = 5.0  # nothing reads this list any more

        def read() -> Any:
            return config.weights[0] if uses == "value" else (3.0 if config.weights[0] > 0.2 else 2.0)

        return read, between

    assert_follows(case, steps=7)


def test_the_sign_of_zero_decides_after_it_passed_a_guard_with_the_other_sign() -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        config = SimpleNamespace(w=0.0)
        return lambda: math.copysign(1.0, config.w), lambda i: setattr(config, "w", 0.0 if i % 2 else -0.0)

    assert_follows(case, steps=8)


def test_a_number_beside_one_that_the_step_writes_becomes_an_input() -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None], Callable[[], Any]]:
        held = {"w": 1.0, "calls": 0, "swapped": 3.0}

        def read() -> Any:
            held["calls"] += 1
            held["swapped"], value = held["w"], held["swapped"]
            return held["w"] * held["calls"] + value

        return read, lambda i: held.__setitem__("w", 0.5**i), lambda: dict(held)

    assert_follows(case)


def test_numbers_in_containers_are_plain_again_after_a_capture_and_after_a_refusal() -> None:
    held: dict[str, Any] = {"w": 1.0, "n": [2, 3.0]}

    @ws.compile
    def step(x: torch.Tensor, check: bool) -> torch.Tensor:
        y = x * held["w"] * held["n"][0]
        if check:
            y.numpy()
        return y

    x = torch.ones(2, device=device())
    for i in range(3):
        held["w"], held["n"][0] = 0.5**i, i
        assert torch.equal(step(x, False), x * 0.5**i * i)
        assert [type(held["w"]), *map(type, held["n"])] == [float, int, float]
    with pytest.raises(ws.errors.ItemError):
        step(x, True)
    assert (held, type(held["w"])) == ({"w": 0.25, "n": [2, 3.0]}, float)
