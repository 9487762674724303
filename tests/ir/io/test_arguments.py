from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import ArgumentReader, ArgumentWriter, TargetReader

GRAPH = fx.Graph()
NODE = GRAPH.placeholder("x")


def round_trip(value: Any) -> Any:
    text = json.dumps(ArgumentWriter().write(value), allow_nan=False)
    return ArgumentReader({"x": NODE}, TargetReader()).read(json.loads(text))


@pytest.mark.parametrize(
    "value",
    [
        *[None, True, False, 0, 1, -(2**63), 10**30, "sum", "", "'\"\n\\", "é"],
        *[0.5, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308],
        *[1 + 2j, complex(-0.0, math.inf)],
        *[[], (), (1,), [1, (2, [3])], {"a": 1, "b": [NODE]}],
        *[slice(None), slice(1, NODE, -1), range(1, 9, 2), Ellipsis],
        *[torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool],
        *[torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
        *[torch.strided, torch.sparse_coo, torch.contiguous_format, torch.channels_last],
        *[NODE, [NODE, (NODE, 1)], torch.ops.aten.add_.Tensor],
    ],
    ids=repr,
)
def test_an_argument_comes_back_as_it_was(value: Any) -> None:
    again = round_trip(value)
    assert type(again) is type(value)
    assert again == value
    assert repr(again) == repr(value)


def test_nan_round_trips() -> None:
    assert math.isnan(round_trip(math.nan))


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(NODE)
nested = st.recursive(
    plain,
    lambda item: st.lists(item) | st.lists(item).map(tuple) | st.dictionaries(st.text(), item),
    max_leaves=20,
)


@given(nested)
def test_any_nesting_of_plain_arguments_comes_back(value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)


@pytest.mark.parametrize("value", [object(), torch.zeros(1), lambda: 0, {1, 2}, b"bytes"])
def test_other_objects_are_not_written(value: Any) -> None:
    with pytest.raises(GraphFormatError):
        ArgumentWriter().write(value)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"node": "y"},
        {"node": ["x"]},
        {"node": "x", "float": "0x1p0"},
        {"float": "os.system"},
        {"float": "1" * 1000},
        {"float": "0x1p99999"},
        {"float": 1},
        {"tuple": 3},
        {"tuple": "abc"},
        {"slice": [1, 2]},
        {"slice": ["a", None, None]},
        {"range": [0, 1, 0]},
        {"range": [0, 1, "1"]},
        {"complex": ["0x1p0"]},
        {"dict": [["a"]]},
        {"dict": [[{"tuple": []}, 1]]},
        {"dtype": "load"},
        {"dtype": "__class__"},
        {"dtype": ["float32"]},
        {"device": "cpu; import os"},
        {"device": "nosuchdevice"},
        {"device": "cpu\n"},
        {"device": None},
        {"layout": "float32"},
        {"memory_format": "strided"},
        {"op": "os.system"},
        {"op": "operator.add"},
        {"op": 3},
        {"unknown": 1},
        1.5,
    ],
)
def test_a_damaged_argument_is_refused(data: Any) -> None:
    with pytest.raises(GraphFormatError):
        ArgumentReader({"x": NODE}, TargetReader()).read(data)


def test_endless_nesting_is_refused() -> None:
    data: Any = 1
    for _ in range(500):
        data = [data]
    with pytest.raises(GraphFormatError, match="deeply"):
        ArgumentReader({}, TargetReader()).read(data)


@pytest.mark.parametrize("name", ["a b", "class", "a=1, b", "", "1a", "é", "a\n"])
def test_keyword_arguments_have_plain_names(name: str) -> None:
    with pytest.raises(GraphFormatError, match="identifier"):
        ArgumentReader({}, TargetReader()).read_kwargs({name: 1})
