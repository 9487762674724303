"""Tensors as data: files in the safetensors format, and constants of a graph as JSON. Nothing is unpickled.

model.safetensors     by the `safetensors` package, which validates the header (dtypes, sizes, offsets that neither
                      overlap nor leave the file) before anything is allocated
"__metadata__"        {"x.stride": "1,2"}: the format holds contiguous tensors only; other readers ignore this
a constant            {"shape": [2], "stride": [1], "dtype": "float32", "device": "cpu", "base64": ".."}: the memory
                      that the tensor spans, so that any strides come back; sizes are checked before allocation
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import check_identifier, read_device, read_dtype, shown
from wholestep.torch_private.fake_tensors import FakeTensor

DTYPES_IN_FILES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
"""Dtypes that the safetensors format has."""
_MOST_STRIDE = 1 << 48
_STRIDE = ".stride"
_MAX_DIM = 1 << 40
_FREE_NUMEL = 1 << 20
"""A constant may be expanded (stride 0) to this many elements, or to 64 times its bytes, but not to fill the memory."""


def can_write(value: object) -> bool:
    """True if a value is a tensor that a file can hold."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return value.dtype in DTYPES_IN_FILES and not value.is_quantized and not value.is_nested


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors; a file that is there is replaced atomically."""
    part = Path(f"{path}.part")
    part.write_bytes(to_bytes(tensors))
    os.replace(part, path)


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The contents of a safetensors file; `metadata`: texts for its header."""
    from safetensors.torch import save  # not at the top: `import wholestep` writes no files

    packed: dict[str, Tensor] = {}
    strides: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not can_write(tensor):
            raise GraphFormatError(f"{shown(name)} is a {tensor.dtype} of {tensor.layout}: no form in a tensor file.")
        if not tensor.is_contiguous():
            strides[name + _STRIDE] = ",".join(map(str, tensor.stride()))
        # The package refuses views and tensors that share memory.
        packed[name] = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return save(packed, {**strides, **(metadata or {})} or None)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU; anything that is not such a file raises GraphFormatError."""
    return from_bytes(Path(path).read_bytes(), str(path))


def from_bytes(raw: bytes, path: str) -> dict[str, Tensor]:
    """The tensors of the contents of a file, which messages call `path`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        with torch.device("cpu"):  # not the default device
            found = load(raw)
    except SafetensorError as error:
        raise GraphFormatError(f"{path} is not a file of tensors: {str(error)[:200]}.") from error
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise GraphFormatError(f"{path} describes a tensor that torch cannot make: {str(error)[:200]}.") from error
    strides = metadata_of(raw)
    return {
        name: _strided(name, found[name], strides[name + _STRIDE]) if name + _STRIDE in strides else found[name]
        for name in sorted(found)
    }


def metadata_of(raw: bytes) -> dict[str, str]:
    """The text metadata in the header of a file that the package has validated; it returns them only for open files."""
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return header.get("__metadata__") or {}


def _strided(name: str, tensor: Tensor, text: Any) -> Tensor:
    try:
        stride = [int(part) for part in text.split(",")] if isinstance(text, str) and text else []
    except ValueError as error:
        raise GraphFormatError(f"{shown(name)}: {shown(text)} is not a stride.") from error
    largest = max(stride, default=0)  # the stride of a dimension of size 1 is arbitrary
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=False) if size)
    is_wrong = len(stride) != tensor.dim() or min(stride, default=0) < 0 or largest >= _MOST_STRIDE
    if is_wrong or extent > 64 * tensor.numel() + 1024:
        raise GraphFormatError(f"{shown(name)}: the stride {shown(text)} does not fit the shape {list(tensor.shape)}.")
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="cpu")
    if 0 in stride:  # expanded: several indices refer to one element
        made.as_strided((extent,), (1,)).zero_()
        firsts = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
        made[firsts].copy_(tensor[firsts])
        return made
    return made.copy_(tensor)


def find_constant(gm: fx.GraphModule, target: str) -> Tensor:
    """The tensor that a `get_attr` node reads."""
    found: Any = gm
    for atom in target.split("."):
        found = getattr(found, atom, None)
    if not isinstance(found, Tensor):
        raise GraphFormatError(
            f"the attribute {target!r} of the graph is a {type(found).__name__}, not a tensor.",
            fix="a StepGraph holds tensors only; inline sub-graphs before writing it.",
        )
    return found


def constant_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor in logical order."""
    return _raw(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1))


def write_constant(tensor: Tensor, device: torch.device) -> dict[str, Any]:
    """One constant as JSON; `device` is where the graph expects it."""
    if isinstance(tensor, FakeTensor):
        raise GraphFormatError("a constant of the graph is a FakeTensor: it has no data to write.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise GraphFormatError(f"a constant of layout {tensor.layout} has no form in the file.")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    memory = tensor.as_strided((_extent(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(device),
        "base64": base64.b64encode(_raw(memory.cpu())).decode("ascii"),
    }


def read_constant(data: Any, name: str) -> Tensor:
    """The tensor of one constant, on its device if this machine has it, otherwise on the CPU."""
    if not isinstance(data, dict):
        raise GraphFormatError(f"constant {name}: expected an object, found {shown(data)}.")
    shape, stride = _dims(data.get("shape"), name), _dims(data.get("stride"), name)
    if len(shape) != len(stride):
        raise GraphFormatError(f"constant {name}: shape and stride differ in length.")
    dtype, device, text = read_dtype(data.get("dtype")), read_device(data.get("device")), data.get("base64")
    extent = _extent(shape, stride)
    expected = extent * dtype.itemsize
    if math.prod(shape) > _FREE_NUMEL + 64 * extent:
        raise GraphFormatError(f"constant {name}: shape {shape} is too large for its stride {stride}.")
    if not isinstance(text, str) or len(text) != 4 * -(-expected // 3):
        raise GraphFormatError(
            f"constant {name}: {dtype} of shape {shape} and stride {stride} needs {expected} bytes, "
            f"the file holds {len(text) * 3 // 4 if isinstance(text, str) else 'none'}."
        )
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GraphFormatError(f"constant {name}: its bytes are not base64.") from error
    if len(raw) != expected:
        raise GraphFormatError(f"constant {name}: {len(raw)} bytes where {expected} belong.")
    try:
        memory = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            if raw
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        tensor = memory.view(dtype).as_strided(shape, stride)
    except (RuntimeError, ValueError, TypeError) as error:
        raise GraphFormatError(f"constant {name}: torch cannot make it: {error}.") from error
    return tensor.to(device) if _is_here(device) else tensor


def check_constant_name(target: object) -> str:
    """The attribute path of a constant; it ends up in generated Python and as an attribute of a GraphModule."""
    if not isinstance(target, str):
        raise GraphFormatError(f"{shown(target)} is not the name of a constant.")
    for atom in target.split("."):
        check_identifier(atom, "the name of a constant")
        if atom.startswith("__") or hasattr(fx.GraphModule, atom) or atom in ("training", "_parameters", "_buffers"):
            raise GraphFormatError(f"{shown(target)} cannot be the name of a constant: torch uses that name.")
    return target


def _raw(flat: Tensor) -> bytes:
    if sys.byteorder != "little":
        raise GraphFormatError("constants are written and read on little-endian machines only.")
    return bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _dims(data: Any, name: str) -> list[int]:
    if not (isinstance(data, list) and len(data) <= 64 and all(type(d) is int and 0 <= d < _MAX_DIM for d in data)):
        raise GraphFormatError(f"constant {name}: {shown(data)} is not a shape or stride.")
    return data


def _is_here(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return device.type == "cpu"
    module = getattr(torch, device.type, None)
    return bool(module is not None and module.is_available() and (device.index or 0) < module.device_count())
