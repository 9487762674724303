"""Tensor files hold every bit and stride, other readers understand them, and damaged ones are refused."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from wholestep.errors import GraphFormatError
from wholestep.ir.io.tensor_file import can_write, read_tensors, write_tensors

TENSORS = {
    "float": torch.randn(3, 4),
    "transposed": torch.randn(3, 4, dtype=torch.float64).t(),
    "half": torch.randn(5).to(torch.bfloat16),
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(float("nan")),
    "empty": torch.empty(0, 3),
    "expanded": torch.arange(3).expand(2, 3),
    "long": torch.tensor([-(2**62), 2**62]),
}


def test_what_is_written_is_read_with_its_strides(tmp_path):
    write_tensors(tmp_path / "x", TENSORS)
    found = read_tensors(tmp_path / "x")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert tensor.numel() == 0 or found[name].stride() == tensor.stride()
        wide = [each.to(torch.float64) for each in (found[name], tensor)]
        assert torch.equal(*(each.nan_to_num(7) for each in wide))


def test_other_readers_of_safetensors_see_contiguous_tensors(tmp_path):
    write_tensors(tmp_path / "x", TENSORS)
    found = load_file(tmp_path / "x")
    assert torch.equal(found["float"], TENSORS["float"])
    assert torch.equal(found["transposed"], TENSORS["transposed"])


def test_a_file_of_the_first_writer_is_still_read(tmp_path):
    # wholestep wrote the format by hand before it used the package: in the order of the caller, padded with spaces.
    header = (
        b'{"b": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}, '
        b'"a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [3, 11]}, "__metadata__": {"a.stride": "1,2"}}'
    )
    header += b" " * (-len(header) % 8)
    data = b"\x01\x02\xff" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + data)
    found = read_tensors(tmp_path / "x")
    assert found["b"].tolist() == [1, 2, -1]
    assert found["a"].tolist() == [[1.5], [-2.0]]
    assert found["a"].stride() == (1, 2)


def test_each_of_several_aliases_is_written(tmp_path):
    base = torch.arange(6.0)
    write_tensors(tmp_path / "x", {"all": base, "part": base[2:], "again": base})
    found = read_tensors(tmp_path / "x")
    assert found["part"].tolist() == [2, 3, 4, 5]
    assert torch.equal(found["all"], found["again"])


def test_a_tensor_without_a_form_is_refused():
    assert not can_write(3)
    assert not can_write(torch.empty(2, device="meta"))
    with pytest.raises(GraphFormatError):
        write_tensors("/tmp/never", {"x": torch.eye(2).to_sparse()})


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x"

    def refused(raw: bytes) -> None:
        path.write_bytes(raw)
        with pytest.raises(GraphFormatError):
            read_tensors(path)

    def document(header: object, data: bytes = b"") -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    refused(b"")
    refused(b"\xff" * 16)
    refused(document([1]))
    refused(document({"x": good}, b"\0" * 4))
    refused(document({"x": {**good, "shape": [1 << 47, 1 << 47]}}, b"\0" * 8))
    refused(document({"x": {**good, "dtype": "PICKLE"}}, b"\0" * 8))
    refused(document({"x": good, "y": good}, b"\0" * 8))  # two names for the same bytes
    refused(document({"x": {**good, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}))
    refused(document({"x": {**good, "data_offsets": [-8, 0]}}, b"\0" * 8))
    refused(document({"x": good, "__metadata__": {"x.stride": "1000000000000"}}, b"\0" * 8))
    refused(document({"x": good, "__metadata__": {"x.stride": "a"}}, b"\0" * 8))
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    refused(document({"x": one, "__metadata__": {"x.stride": "9" * 21}}, b"\0" * 4))


@given(st.binary(max_size=64), st.integers(0, 200))
def test_bytes_that_were_changed_are_read_or_refused(tmp_path_factory, noise, at):
    path = tmp_path_factory.mktemp("fuzz") / "x"
    write_tensors(path, {"x": torch.ones(3, 2).t()})
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + noise + raw[at + len(noise) :])
    with contextlib.suppress(GraphFormatError):
        assert all(isinstance(tensor, torch.Tensor) for tensor in read_tensors(path).values())
