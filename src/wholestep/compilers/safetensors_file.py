"""The safetensors format: named tensors as eight bytes of length, a JSON header and raw data; nothing that executes.

Written here rather than taken from its package, so that wholestep needs torch alone; files are those that the package
reads and writes. Everything in a header is checked against the bytes that are there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import DumpError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that every version of the format has."""

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_MOST_HEADER = 100_000_000


def write(tensors: Mapping[str, Tensor]) -> bytes:
    """The file of these tensors: contiguous, on the CPU, of dtypes in `CODES`."""
    if sys.byteorder != "little":
        raise DumpError("values are written on little-endian machines only.")
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    # The package wants wide dtypes first, so that data is aligned in the file.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else b""
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(raw)],
        }
        parts.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def read(data: bytes, file: str) -> dict[str, Tensor]:
    """The tensors of a file; DumpError for anything that is not one."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MOST_HEADER, len(data) - 8):
        raise DumpError(f"{file} is not a safetensors file: it ends before its header does.")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{file} is not a safetensors file: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise DumpError(f"{file} is not a safetensors file: its header is not an object.")
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    found: dict[str, Tensor] = {}
    taken = 0
    for name, entry in header.items():
        tensor = _read_tensor(name, entry, body, file)
        taken += tensor.numel() * tensor.dtype.itemsize
        if taken > len(body):
            raise DumpError(f"{file}: tensors overlap.")
        found[name] = tensor
    return found


def _read_tensor(name: str, entry: Any, body: memoryview, file: str) -> Tensor:
    where = f"{file}: the tensor {name[:60]!r}"
    if not isinstance(entry, dict):
        raise DumpError(f"{where} is not described.")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DumpError(f"{where} has a dtype that is not read here: {str(dtype)[:20]!r}.")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise DumpError(f"{where} has a damaged shape or place.")
    start, end = offsets
    if not start <= end <= len(body) or math.prod(shape) * _DTYPES[dtype].itemsize != end - start:
        raise DumpError(f"{where} does not fit its place in the file.")
    if start == end:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(bytearray(body[start:end]), dtype=torch.uint8).view(_DTYPES[dtype]).reshape(shape)


def _are_sizes(data: Any) -> bool:
    return (
        isinstance(data, list) and len(data) <= 64 and all(type(item) is int and 0 <= item < 1 << 48 for item in data)
    )
