"""Values in containers and arrays are seen, however large and deep: the next call uses what changed."""

from __future__ import annotations

import array
import math
import sys
import warnings
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from capture.followed import assert_follows, assert_refused
from wholestep.capture.objects.object_search import links_of
from wholestep.ir.user_objects.plain_contents import ArrayCopy, Contents


def large_list() -> Any:
    values = [1.0] * 5000
    return lambda: values[4321], lambda i: values.__setitem__(4321, i + 2.0)


def large_dict() -> Any:
    values = {f"k{i}": 1.0 for i in range(3000)}
    return lambda: values["k2900"], lambda i: values.update(k2900=i + 2.0)


def large_set() -> Any:
    values = set(range(1000))
    return lambda: 2.0 if 5 in values else 1.0, lambda i: values.discard(5) if i == 2 else None


def large_deque() -> Any:
    values = deque([1.0] * 1000)
    return lambda: values[700], lambda i: values.__setitem__(700, i + 2.0)


def deep_list() -> Any:
    leaf = [1.0]
    root: list[Any] = leaf
    for _ in range(30):
        root = [root]

    def read() -> float:
        found: Any = root
        while isinstance(found, list):
            found = found[0]
        return found

    return read, lambda i: leaf.__setitem__(0, i + 2.0)


def deep_dict() -> Any:
    leaf = {"next": 1.0}
    root: dict[str, Any] = leaf
    for _ in range(30):
        root = {"next": root}

    def read() -> float:
        found: Any = root
        while isinstance(found, dict):
            found = found["next"]
        return found

    return read, lambda i: leaf.update(next=i + 2.0)


def list_in_a_tuple() -> Any:
    values = (1, [2, ([1.0], 3)])
    return lambda: values[1][1][0][0], lambda i: values[1][1][0].__setitem__(0, i + 2.0)


def object_in_a_deep_list() -> Any:
    class Config:
        scale = 1.0

    config = Config()
    root: list[Any] = [config]
    for _ in range(12):
        root = [root]

    def read() -> float:
        found: Any = root
        while isinstance(found, list):
            found = found[0]
        return found.scale

    return read, lambda i: setattr(config, "scale", i + 2.0)


def large_list_in_a_module() -> Any:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = [1.0] * 1000

        def forward(self) -> Any:
            return self.values[900]

    scale = Scale()
    return lambda: scale(), lambda i: scale.values.__setitem__(900, i + 2.0)


def default_dict() -> Any:
    values: defaultdict[str, float] = defaultdict(lambda: 1.0)
    values["scale"] = 1.0
    return lambda: values["scale"], lambda i: values.update(scale=i + 2.0)


def ordered_dict() -> Any:
    values = OrderedDict(a=1.0, b=2.0)
    return lambda: next(iter(values.values())), lambda i: values.move_to_end(next(iter(values)))


def counter() -> Any:
    values = Counter("aab")
    return lambda: values["a"], lambda i: values.update("a")


def user_dict() -> Any:
    values: UserDict[str, float] = UserDict(scale=1.0)
    return lambda: values["scale"], lambda i: values.update(scale=i + 2.0)


def user_list() -> Any:
    values = UserList([1.0])
    return lambda: values[0], lambda i: values.__setitem__(0, i + 2.0)


def chain_map() -> Any:
    values = ChainMap({"a": 1.0}, {"scale": 1.0})
    return lambda: values["scale"], lambda i: values.maps[1].update(scale=i + 2.0)


def mapping_proxy() -> Any:
    values = {"scale": 1.0}
    seen = MappingProxyType(values)
    holder = SimpleNamespace(seen=seen)
    return lambda: holder.seen["scale"], lambda i: values.update(scale=i + 2.0)


def order_of_a_dict() -> Any:
    values = {"a": 1.0, "b": 2.0}

    def change(i: int) -> None:
        values["a"] = values.pop("a")
        values["b"] = values.pop("b") if i % 2 else values["b"]

    return lambda: next(iter(values.values())), change


def true_for_one() -> Any:
    values = [1, 2.0]
    return lambda: 3.0 if values[0] is True else values[0], lambda i: values.__setitem__(0, True if i % 2 else 1)


def negative_zero() -> Any:
    values = [0.0]
    return lambda: math.copysign(1.0, values[0]), lambda i: values.__setitem__(0, -0.0 if i % 2 else 0.0)


CONTAINERS = [
    large_list,
    large_dict,
    large_set,
    large_deque,
    deep_list,
    deep_dict,
    list_in_a_tuple,
    object_in_a_deep_list,
    large_list_in_a_module,
    default_dict,
    ordered_dict,
    counter,
    user_dict,
    user_list,
    chain_map,
    mapping_proxy,
    order_of_a_dict,
    true_for_one,
    negative_zero,
]


@pytest.mark.parametrize("make", CONTAINERS, ids=lambda make: make.__name__)
def test_an_element_of_a_container_is_used_as_it_is_at_each_call(make: Callable[[], Any]) -> None:
    assert_follows(make)


def numpy_array() -> Any:
    values = np.ones(4)
    return lambda: float(values[2]), lambda i: values.__setitem__(2, i + 2.0)


def large_numpy_array() -> Any:
    values = np.ones(1 << 18)
    return lambda: float(values[-1]), lambda i: values.__setitem__(-1, i + 2.0)


def numpy_view() -> Any:
    values = np.ones((4, 6))
    part = values[::2, 1::3]
    return lambda: float(part.sum()), lambda i: values.__setitem__((2, 4), i + 2.0)


def numpy_objects() -> Any:
    values = np.array([1.0, "a"], dtype=object)
    return lambda: values[0], lambda i: values.__setitem__(0, i + 2.0)


def numpy_in_an_object() -> Any:
    holder = SimpleNamespace(values=np.ones(3, dtype=np.float32))
    return lambda: holder.values.mean().item(), lambda i: holder.values.fill(i + 2.0)


def numpy_as_a_tensor() -> Any:
    values = np.ones(3, dtype=np.float32)
    return lambda: torch.tensor(values).sum(), lambda i: values.fill(i + 2.0)


def numpy_in_a_class() -> Any:
    class Config:
        values = np.ones(2)

    return lambda: float(Config.values[0]), lambda i: Config.values.fill(i + 2.0)


def numpy_nan() -> Any:
    values = np.array([math.nan, 1.0])
    return lambda: float(values[1]), lambda i: values.__setitem__(1, i + 2.0)


def array_of_python() -> Any:
    values = array.array("d", [1.0, 2.0])
    return lambda: values[0], lambda i: values.__setitem__(0, i + 2.0)


def bytes_array() -> Any:
    values = bytearray(b"\x01\x02")
    return lambda: values[0], lambda i: values.__setitem__(0, i + 2)


ARRAYS = [
    numpy_array,
    large_numpy_array,
    numpy_view,
    numpy_objects,
    numpy_in_an_object,
    numpy_as_a_tensor,
    numpy_in_a_class,
    numpy_nan,
    array_of_python,
    bytes_array,
]


@pytest.mark.parametrize("make", ARRAYS, ids=lambda make: make.__name__)
def test_an_array_written_between_calls_is_read_again(make: Callable[[], Any]) -> None:
    assert_follows(make)


@pytest.mark.parametrize(
    "values", [np.ones(3), array.array("d", [1.0] * 3), bytearray(3)], ids=["numpy", "array", "bytes"]
)
def test_an_array_that_the_step_writes_is_refused_and_left_as_it_was(values: Any) -> None:
    before = bytes(values)

    def step(x: torch.Tensor) -> torch.Tensor:
        values[0] = 7
        return x * 2

    assert_refused(step, ws.errors.SideEffectError, "contents of values")
    assert bytes(values) == before


def test_an_array_too_large_to_compare_is_refused_where_it_is_read() -> None:
    values = np.zeros((1 << 23) + 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(values[0])  # <- here

    assert_refused(step, ws.errors.CapturedTensorError, "too large", step)
    assert torch.equal(ws.compile(lambda x: x * values.ndim)(torch.ones(2)), torch.ones(2))


def test_equal_contents_in_other_objects_need_no_new_graph() -> None:
    holder = SimpleNamespace(values=[[1.5, 2.5], {"a": [3.5]}])
    values = holder.values
    step = ws.compile(lambda x: x * holder.values[0][0] + holder.values[1]["a"][0])
    for _ in range(3):
        values[0] = [float("1.5"), float("2.5")]
        values[1] = {"a": [float("3.5")]}
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 5.0))
    assert len(step.graphs) == 1
    values[1]["a"][0] = 4.5
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 6.0))


def test_contents_see_a_change_behind_an_object_that_was_exchanged() -> None:
    root: list[Any] = [[1, 2], "x"]
    contents = Contents([(root, "root")])
    assert contents.are_same()
    root[0] = [1, 2]
    assert contents.are_same()
    root[0].append(3)
    assert not contents.are_same()
    assert list(contents.changed())


def test_contents_of_a_list_that_holds_itself_are_compared() -> None:
    root: list[Any] = [1.0]
    root.append(root)
    contents = Contents([(root, "root")])
    assert contents.are_same()
    root[0] = 2.0
    assert not contents.are_same()


def test_a_copy_of_an_array_tells_nan_and_signed_zero_apart() -> None:
    values = np.array([math.nan, 0.0])
    copy = ArrayCopy(values, "values")
    assert copy.is_same()
    values[1] = -0.0
    assert not copy.is_same()
    copy.restore()
    assert copy.is_same()
    assert math.copysign(1.0, values[1]) == 1.0


class MadeOnReading(OrderedDict[str, Any]):
    """As transformers' ACT2FN: another object at each reading of a key."""

    def __getitem__(self, key: str) -> nn.Module:
        made: nn.Module = super().__getitem__(key)()
        return made


ACTIVATIONS = MadeOnReading(relu=nn.ReLU, gelu=nn.GELU)


def test_a_dict_that_makes_an_object_at_each_reading_holds_what_it_held() -> None:
    @ws.compile(lower="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS["relu"](x)

    for _ in range(2):
        assert torch.equal(step(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert dict.__getitem__(ACTIVATIONS, "relu") is nn.ReLU
    assert {link.child for link in links_of(ACTIVATIONS, "")} >= {nn.ReLU, nn.GELU}


def helper_that_may_warn(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 100:
        warnings.warn("large", stacklevel=1)
    return x * 2


def test_a_function_that_is_only_found_while_a_step_is_traced_is_guarded_by_what_it_named_before() -> None:
    def found_late(x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = getattr(sys.modules[__name__], "helper_that_" + "may_warn")(x)
        return doubled

    step = ws.compile(found_late, lower="eager")
    for _ in range(3):
        step(torch.ones(3))
    assert len(step.graphs) == 1, step.recompiles
