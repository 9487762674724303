from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from wholestep.errors import GraphFormatError
from wholestep.ir.io.tensor_file import (
    check_constant_name,
    constant_bytes,
    find_constant,
    read_constant,
    write_constant,
)

CPU = torch.device("cpu")


def round_trip(tensor: Tensor) -> Tensor:
    return read_constant(json.loads(json.dumps(write_constant(tensor, CPU))), "c")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.tensor(float("nan")),
        torch.randn(3, 4, dtype=torch.float64).t(),
        torch.randn(4).to(torch.bfloat16),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.randn(4, dtype=torch.complex64),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.int16),
        torch.arange(24).reshape(2, 3, 4)[:, 1:, ::2],
        torch.arange(3).expand(4, 3),
        torch.empty(0, 3),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_every_bit_of_a_constant_comes_back(tensor: Tensor) -> None:
    again = round_trip(tensor)
    assert (again.dtype, again.shape, again.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert constant_bytes(again) == constant_bytes(tensor)


def test_a_constant_of_a_device_that_is_not_here_stays_on_the_cpu() -> None:
    data = write_constant(torch.ones(2), torch.device("xpu:7"))
    assert data["device"] == "xpu:7"
    assert read_constant(data, "c").device == CPU


GOOD = write_constant(torch.ones(2), CPU)


@pytest.mark.parametrize(
    "data",
    [
        3,
        {},
        GOOD | {"shape": [3]},
        GOOD | {"shape": [10**12]},
        GOOD | {"shape": [2**39], "stride": [0], "base64": "AACAPw=="},
        GOOD | {"shape": [-2]},
        GOOD | {"shape": [2, 2]},
        GOOD | {"shape": "ab"},
        GOOD | {"stride": [10**9]},
        GOOD | {"dtype": "float64"},
        GOOD | {"dtype": "load"},
        GOOD | {"device": "nowhere"},
        GOOD | {"base64": "!!!!!!!!!!!!"},
        GOOD | {"base64": "AACAPw==" + "===="},
        GOOD | {"base64": None},
        GOOD | {"base64": ""},
    ],
)
def test_a_damaged_constant_is_refused(data: Any) -> None:
    with pytest.raises(GraphFormatError):
        read_constant(data, "c")


@pytest.mark.parametrize("name", ["_tensor_constant0", "a.b.c", "lr_table"])
def test_plain_attribute_paths_can_name_a_constant(name: str) -> None:
    assert check_constant_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "forward", "graph", "training", "a.forward", "__class__", "a..b", 'x"); import os #', "class", 3, None]
)
def test_names_that_torch_or_python_uses_cannot(name: Any) -> None:
    with pytest.raises(GraphFormatError):
        check_constant_name(name)


def test_an_attribute_that_is_not_a_tensor_is_refused() -> None:
    gm = fx.GraphModule({"inner": torch.nn.Linear(1, 1)}, fx.Graph())
    with pytest.raises(GraphFormatError, match="not a tensor"):
        find_constant(gm, "inner")
