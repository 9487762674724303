from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.errors import GraphFormatError
from wholestep.ir.io.node_values import ValueReader, ValueWriter, hint_of, kind_of, tensor_spec
from wholestep.torch_private.fake_tensors import FakeTensor


def round_trip(value: Any) -> tuple[Any, ValueReader]:
    writer = ValueWriter()
    index = writer.write(value)
    table, symbols = json.loads(json.dumps([writer.table, list(writer.symbols.symbols.values())], allow_nan=False))
    reader = ValueReader(table, symbols)
    return reader.read(index), reader


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, 3),
        torch.empty(()),
        torch.empty(0, 3),
        torch.empty(2, 3).t(),
        torch.empty(4, 4)[1:, ::2],
        torch.empty(1, 3).expand(5, 3),
        torch.empty(3, dtype=torch.bfloat16, requires_grad=True),
        torch.empty(3, dtype=torch.float8_e5m2),
        torch.empty(3, dtype=torch.complex64),
        torch.empty(2, device="meta"),
    ],
)
def test_a_tensor_comes_back_as_a_fake_tensor_of_the_same_layout(tensor: Tensor) -> None:
    fake, reader = round_trip(tensor)
    assert isinstance(fake, FakeTensor)
    assert fake.fake_mode is reader.mode
    assert (fake.shape, fake.stride(), fake.storage_offset()) == (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )
    assert (fake.dtype, fake.device, fake.requires_grad) == (tensor.dtype, tensor.device, tensor.requires_grad)


def test_a_tensor_of_a_device_that_is_not_here_comes_back() -> None:
    reader = ValueReader([{"tensor": [2], "stride": [1], "dtype": "float32", "device": "cuda:3"}], [])
    assert reader.read(0).device == torch.device("cuda:3")


def test_two_nodes_of_the_same_layout_get_two_tensors() -> None:
    reader = ValueReader([{"tensor": [2], "stride": [1], "dtype": "float32", "device": "cpu"}], [])
    assert reader.read(0) is not reader.read(0)


def test_numbers_none_and_lists_come_back() -> None:
    value, _ = round_trip([1, 0.5, True, None, (torch.empty(2),)])
    assert value[:4] == [1, 0.5, True, None]
    assert [type(item) for item in value] == [int, float, bool, type(None), tuple]


def test_equal_values_share_one_entry() -> None:
    writer = ValueWriter()
    assert writer.write(torch.empty(2)) == writer.write(torch.ones(2)) != writer.write(torch.empty(3))
    assert writer.write(0.5) == writer.write(0.5)
    assert len(writer.table) == 3


def symbolic(env: ShapeEnv) -> tuple[Any, Any]:
    rows = env.create_unbacked_symint()
    return rows, env.create_unbacked_symfloat()


def test_unbacked_scalars_stay_unbacked() -> None:
    rows, scale = symbolic(ShapeEnv())
    (again_rows, again_scale, flag), _ = round_trip((rows, scale, rows > 3))
    assert (str(again_rows), str(again_scale)) == (str(rows), str(scale))
    assert isinstance(flag, torch.SymBool)
    assert hint_of(again_rows) is None


def test_a_symbolic_scalar_of_capture_is_written_by_kind_and_hint() -> None:
    class Node:
        hint = 0.25

        def is_float(self) -> bool:
            return True

    value = torch.SymFloat(Node())
    writer = ValueWriter()
    assert writer.table[writer.write(value)] == {"number": "float", "hint": {"float": (0.25).hex()}}
    assert round_trip(value)[0] == 0.25
    Node.hint = None  # type: ignore[assignment]
    assert isinstance(round_trip(value)[0], torch.SymFloat)


def test_kinds_are_those_of_python() -> None:
    assert [kind_of(v) for v in (True, 1, 1.0)] == ["bool", "int", "float"]


def test_tensor_spec_describes_a_tensor_for_a_signature() -> None:
    spec = tensor_spec(torch.empty(2, 3, dtype=torch.float16, requires_grad=True))
    assert (spec.shape, spec.stride, spec.dtype, spec.device, spec.requires_grad) == (
        (2, 3),
        (3, 1),
        "float16",
        "cpu",
        True,
    )


GOOD = {"tensor": [2], "stride": [1], "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize(
    "entry",
    [
        3,
        [],
        {},
        {"tensor": [2]},
        GOOD | {"stride": [1, 1]},
        GOOD | {"tensor": [-1]},
        GOOD | {"tensor": [2**70]},
        GOOD | {"tensor": [2**40, 2**40], "stride": [2**40, 1]},
        GOOD | {"tensor": [True]},
        GOOD | {"tensor": ["s0"]},
        GOOD | {"tensor": [{"sym": "int", "expr": "s0"}]},
        GOOD | {"tensor": [{"sym": "float", "expr": 1}]},
        GOOD | {"tensor": [{"sym": "int", "expr": ["__import__", 1]}]},
        GOOD | {"stride": [-1]},
        GOOD | {"dtype": "load"},
        GOOD | {"device": "os"},
        GOOD | {"offset": -1},
        GOOD | {"offset": 2**63},
        GOOD | {"requires_grad": 1},
        GOOD | {"requires_grad": True, "dtype": "int64"},
        {"tensor": [1] * 65, "stride": [1] * 65, "dtype": "float32", "device": "cpu"},
        {"number": "str", "hint": None},
        {"number": "int", "hint": True},
        {"number": ["int"], "hint": 1},
        {"sym": "int", "expr": 1, "hint": 2},
        {"sym": [], "expr": 1},
        {"tuple": 3},
    ],
)
def test_a_damaged_value_is_refused(entry: Any) -> None:
    with pytest.raises(GraphFormatError):
        ValueReader([entry], []).read(0)


@pytest.mark.parametrize("index", [-1, 1, True, "0", None])
def test_an_index_outside_of_the_table_is_refused(index: Any) -> None:
    with pytest.raises(GraphFormatError):
        ValueReader([GOOD], []).read(index)
