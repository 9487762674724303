"""Tensors that a graph holds as constants (`get_attr`), as JSON with their bytes in base64.

The bytes are those of the memory that the tensor spans, so that any strides come back as they were. Their number is
checked against the shape before anything is allocated.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import check_identifier, read_device, read_dtype, shown
from wholestep.torch_private.fake_tensors import FakeTensor

_MAX_DIM = 1 << 40
_FREE_NUMEL = 1 << 20
"""A constant may be expanded (stride 0) to this many elements, or to 64 times its bytes, but not to fill the memory."""


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
