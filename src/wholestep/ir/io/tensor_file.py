"""Tensors in a file of the safetensors format, written and read without pickle and without another package.

8 bytes        length of the header, little-endian
header         JSON: {"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
                      "__metadata__": {"x.stride": "1,2"}}
the rest       elements, in logical order

The format knows contiguous tensors only: strides go into its `__metadata__`, which other readers ignore. What a file
says is checked before anything is allocated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import shown
from wholestep.ir.io.constants import constant_bytes

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER = 100_000_000
_MOST_DIMENSIONS = 64
_MOST_STRIDE = 1 << 48
_STRIDE = ".stride"


def can_write(value: object) -> bool:
    """Whether a value is a tensor that a file can hold."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return value.dtype in _NAMES and not value.is_quantized and not value.is_nested


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors; a file that is there is replaced only by a whole one."""
    part = Path(f"{path}.part")
    part.write_bytes(to_bytes(tensors))
    os.replace(part, path)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The contents of a file of tensors."""
    header: dict[str, Any] = {}
    notes: dict[str, str] = {}
    pieces: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        if not can_write(tensor):
            raise GraphFormatError(f"{shown(name)} is a {tensor.dtype} of {tensor.layout}: no form in a tensor file.")
        data = constant_bytes(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        if not tensor.is_contiguous():
            notes[name + _STRIDE] = ",".join(map(str, tensor.stride()))
        at += len(data)
        pieces.append(data)
    if notes:
        header["__metadata__"] = notes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU; anything that is not such a file raises GraphFormatError."""
    return from_bytes(Path(path).read_bytes(), str(path))


def from_bytes(raw: bytes, path: str) -> dict[str, Tensor]:
    """The tensors of the contents of a file, which messages call `path`."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(len(raw) - 8, _MAX_HEADER):
        raise GraphFormatError(f"{path} is not a file of tensors: its header is longer than the file.")
    try:
        header = json.loads(raw[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"{path}: the header is not JSON.") from error
    if not isinstance(header, dict):
        raise GraphFormatError(f"{path}: the header must be an object, not {shown(header)}.")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict):
        raise GraphFormatError(f"{path}: its metadata must be an object, not {shown(notes)}.")
    data = memoryview(raw)[8 + length :]
    found: dict[str, Tensor] = {}
    left = len(data)  # a small file could name the same bytes again and again
    for name, entry in header.items():
        tensor = _read(name, entry, notes.get(name + _STRIDE), data)
        left -= tensor.numel() * tensor.dtype.itemsize
        if left < 0:
            raise GraphFormatError(f"{path}: tensors overlap.")
        found[name] = tensor
    return found


def _read(name: str, entry: Any, stride: Any, data: memoryview) -> Tensor:
    known: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape: Any = known.get("shape")
    offsets: Any = known.get("data_offsets")
    dtype = _DTYPES.get(str(known.get("dtype")))
    if dtype is None or not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise GraphFormatError(f"the entry of {shown(name)} does not describe a tensor.")
    start, end = offsets
    if not start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise GraphFormatError(f"{shown(name)}: {dtype} of shape {shape} is not bytes {start} to {end} of the file.")
    if start == end:
        flat = torch.empty(0, dtype=dtype, device="cpu")
    else:
        flat = torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8).view(dtype)
    tensor = flat.reshape(shape)
    return tensor if stride is None else _strided(name, tensor, stride)


def _strided(name: str, tensor: Tensor, text: Any) -> Tensor:
    try:
        stride = [int(part) for part in text.split(",")] if isinstance(text, str) and text else []
    except ValueError as error:
        raise GraphFormatError(f"{shown(name)}: {shown(text)} is not a stride.") from error
    largest = max(stride, default=0)  # of a size of one a stride may be anything, and counts nowhere else
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=False) if size)
    is_wrong = len(stride) != tensor.dim() or min(stride, default=0) < 0 or largest >= _MOST_STRIDE
    if is_wrong or extent > 64 * tensor.numel() + 1024:
        raise GraphFormatError(f"{shown(name)}: the stride {shown(text)} does not fit the shape {list(tensor.shape)}.")
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="cpu")
    if 0 in stride:  # expanded: elements that lie in the same place are the same
        made.as_strided((extent,), (1,)).zero_()
        firsts = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
        made[firsts].copy_(tensor[firsts])
        return made
    return made.copy_(tensor)


def _whole_numbers(values: Any) -> bool:
    small = isinstance(values, list) and len(values) <= _MOST_DIMENSIONS
    return small and all(type(value) is int and 0 <= value < 1 << 48 for value in values)
