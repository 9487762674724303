from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from ir.step_graphs import with_everything
from wholestep.errors import GraphFormatError, Location
from wholestep.ir import InputKind, InputSpec, NodeMeta, Signature, TensorSpec
from wholestep.ir.io.arguments import TargetReader
from wholestep.ir.io.serialize import RecordReader, write_record

LINE = Location("a.py", 3, "f", "x = 1")
FULL = NodeMeta("model.fc", LINE, "optimizer", torch.ops.aten.add_.Tensor, True, "fc.w", 2, 3, True, True)


def round_trip(value: Any) -> Any:
    data = json.loads(json.dumps(write_record(value), allow_nan=False))
    return RecordReader(TargetReader()).read(type(value), data, "here")


def test_node_metadata_comes_back_whole() -> None:
    assert round_trip(FULL) == FULL
    assert round_trip(NodeMeta()) == NodeMeta()
    for field in dataclasses.fields(NodeMeta):
        assert getattr(FULL, field.name) != getattr(NodeMeta(), field.name), f"FULL must set the new field {field.name}"


def test_a_signature_comes_back_whole() -> None:
    signature = with_everything().signature
    assert round_trip(signature) == signature
    for field in dataclasses.fields(Signature):
        assert getattr(signature, field.name), f"with_everything() must set the new field {field.name}"


def test_numbers_keep_their_type() -> None:
    again = round_trip(Signature(result={"dict": [["a", {"value": 1.0}], ["b", {"value": 1}], ["c", {"value": True}]]}))
    assert [type(pair[1]["value"]) for pair in again.result["dict"]] == [float, int, bool]
    assert math.isnan(round_trip(Signature(result={"value": math.nan})).result["value"])


def test_fields_that_have_their_default_are_left_out() -> None:
    assert write_record(InputSpec("x", InputKind.BATCH, "batch")) == {"name": "x", "kind": "batch", "path": "batch"}


GOOD = {"name": "x", "kind": "batch", "path": "batch"}
TENSOR = {"shape": [2, "s0"], "stride": [1, 1], "dtype": "float32", "device": "cpu"}


def test_a_union_takes_each_of_its_kinds() -> None:
    spec = RecordReader(TargetReader()).read(InputSpec, GOOD | {"tensor": TENSOR}, "here")
    assert spec.tensor == TensorSpec((2, "s0"), (1, 1), "float32", "cpu")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected an object"),
        ({"name": "x"}, "missing"),
        (GOOD | {"more": 1}, "unknown key"),
        (GOOD | {"kind": "nonsense"}, "here.kind"),
        (GOOD | {"kind": []}, "here.kind"),
        (GOOD | {"name": 3}, "here.name"),
        (GOOD | {"tensor": 3}, "here.tensor"),
        (GOOD | {"tensor": TENSOR | {"shape": [True]}}, "here.tensor.shape"),
        (GOOD | {"tensor": TENSOR | {"shape": {}}}, "here.tensor.shape"),
        (GOOD | {"tensor": TENSOR | {"requires_grad": 1}}, "here.tensor.requires_grad"),
    ],
)
def test_damage_is_refused_with_the_place(data: Any, message: str) -> None:
    with pytest.raises(GraphFormatError, match=message):
        RecordReader(TargetReader()).read(InputSpec, data, "here")


def test_operators_in_records_go_through_the_allow_list() -> None:
    with pytest.raises(GraphFormatError):
        RecordReader(TargetReader()).read(NodeMeta, {"in_place": {"op": "mylib::evil_"}}, "here")


def test_a_value_without_a_json_form_is_refused() -> None:
    with pytest.raises(GraphFormatError):
        write_record(Signature(result=object()))
