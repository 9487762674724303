"""Inputs of a graph as data: enough to make inputs like them, and where their values lie if they were saved.

    {"name": "primals_3", "path": "fc.weight", "kind": "tensor", "shape": [4, 8], "stride": [1, 4], "dtype": "float32",
     "device": "cpu", "low": null, "high": null, "memory": "0", "start": 0}

Integers record the range of their values, so that random inputs still index an embedding that exists. Values are saved
in a safetensors file, one tensor for each piece of memory: a contiguous input lies there in its own shape, for other
readers of the format; anything else as the flat memory that it spans. Inputs that overlap name the same `memory`, and
`start` in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import DumpError
from wholestep.ir.io.arguments import DTYPES
from wholestep.ir.io.node_values import hint_of
from wholestep.ir.io.tensor_file import can_write, to_bytes
from wholestep.ir.tensor_copies import spanned
from wholestep.torch_private.fake_tensors import FakeTensor, storage_key

LARGEST = 1 << 32
"""Bytes that random or saved inputs may take, unless the caller allows more."""
_DIMENSIONS = 64
_LIMIT = 1 << 62
_NUMBERS = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class InputRecord:
    """One input. Scalars have a `value`; tensors a layout, and a range if they hold integers."""

    name: str
    kind: str
    path: str = ""
    """What the user calls it: a parameter's name."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    requires_grad: bool = False
    low: int | None = None
    high: int | None = None
    value: int | float | bool | None = None
    memory: str = ""
    start: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of a tensor."""
        return DTYPES[self.dtype]

    @property
    def extent(self) -> int:
        """How many elements of memory a tensor spans."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


def record_of(value: Any, name: str, path: str = "") -> InputRecord:
    """The record of one input, real or fake. Symbolic sizes are those that the trace had."""
    if isinstance(value, Tensor):
        return _tensor_record(value, name, path)
    hint = hint_of(value)
    for kind, types in (("bool", bool | torch.SymBool), ("int", int | torch.SymInt), ("float", float | torch.SymFloat)):
        if isinstance(value, types):
            return InputRecord(name, kind, path, value=hint if hint is None else _NUMBERS[kind](hint))
    return InputRecord(name, "none" if value is None else "other", path)


def _tensor_record(tensor: Tensor, name: str, path: str) -> InputRecord:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return InputRecord(name, "other", path)
    found = InputRecord(
        name,
        "tensor",
        path,
        tuple(_size(size) for size in tensor.shape),
        tuple(_size(step) for step in tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        tensor.requires_grad,
    )
    is_whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    if is_whole and not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and tensor.numel():
        low, high = torch.aminmax(tensor.detach().cpu().to(torch.int64))
        found = replace(found, low=int(low), high=int(high))
    return found


def _size(size: Any) -> int:
    hint = hint_of(size)
    return 2 if hint is None else int(hint)


def check_record(record: InputRecord) -> None:
    """Raise DumpError unless a record that was read describes something that can be made."""
    if record.kind not in ("tensor", "none", "other", *_NUMBERS):
        raise DumpError(f"the input {record.name[:60]!r} is of an unknown kind, {record.kind[:60]!r}.")
    if record.kind != "tensor":
        return
    dims = (*record.shape, *record.stride, record.start)
    whole = (record.low, record.high)
    if record.dtype not in DTYPES:
        raise DumpError(f"the input {record.name[:60]!r} has an unknown dtype, {record.dtype[:60]!r}.")
    if len(record.shape) != len(record.stride) or len(record.shape) > _DIMENSIONS:
        raise DumpError(f"the input {record.name[:60]!r} has a shape and a stride that do not fit each other.")
    if not all(0 <= dim < _LIMIT for dim in dims) or not all(x is None or abs(x) < _LIMIT for x in whole):
        raise DumpError(f"the input {record.name[:60]!r} has a size, stride or range that is out of bounds.")
    if record.low is not None and record.high is not None and record.low > record.high:
        raise DumpError(f"the input {record.name[:60]!r} has an empty range.")


def check_size(records: Sequence[InputRecord], max_bytes: int) -> None:
    """Raise DumpError if such inputs would take too much memory, or repeat their memory too often."""
    total = 0
    for record in records:
        if record.kind == "tensor":
            total += record.extent * record.torch_dtype.itemsize
            if math.prod(record.shape) > max(1 << 20, 64 * record.extent) and 0 not in record.shape:
                raise DumpError(f"the input {record.name[:60]!r} repeats its memory too often.")
    if total > max_bytes:
        raise DumpError(
            f"the inputs take {total} bytes, more than {max_bytes}.", fix="pass max_bytes= if you trust the file."
        )


def random_input(record: InputRecord, device: torch.device | None, generator: torch.Generator) -> Any:
    """An input like the recorded one: the same scalars, integers in their range, floats between 0 and 1."""
    if record.kind != "tensor":
        return _NUMBERS[record.kind]() if record.value is None and record.kind in _NUMBERS else record.value
    dtype, extent = record.torch_dtype, record.extent
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
        memory = torch.rand(extent, generator=generator, dtype=wide).to(dtype)
    else:
        low = 0 if record.low is None else record.low
        high = max(low, 1) if record.high is None else record.high
        memory = torch.randint(low, high + 1, (extent,), generator=generator, dtype=torch.int64).to(dtype)
    return placed(memory, record, device)


def placed(memory: Tensor, record: InputRecord, device: torch.device | None) -> Tensor:
    """The tensor of a record over its memory, on the given device, the recorded one, or the CPU."""
    where = device if device is not None else _device_here(record.device)
    found = memory.to(where).as_strided(record.shape, record.stride, record.start)
    return found.requires_grad_() if record.requires_grad and found.is_floating_point() else found


def _device_here(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "meta":
            return torch.device("cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        return torch.device("cpu")
    return device


def save_values(
    path: Path, values: Sequence[Any], records: Sequence[InputRecord], extra: dict[str, Tensor]
) -> list[InputRecord]:
    """Write the values of tensors, and `extra` ones under their names; the records with their places in the file."""
    found = list(records)
    by_memory: dict[tuple[Any, ...], list[int]] = {}
    for i, (value, record) in enumerate(zip(values, records, strict=True)):
        if isinstance(value, Tensor) and record.kind == "tensor":
            # A conjugate view shares memory, but a file has resolved values: it gets its own.
            key = (storage_key(value), value.dtype, value.is_conj(), value.is_neg())
            by_memory.setdefault(key, []).append(i)
    tensors: dict[str, Tensor] = {name: _storable(tensor.detach().cpu().clone()) for name, tensor in extra.items()}
    for places in by_memory.values():
        label = str(places[0])
        tensors[label] = _memory([values[i] for i in places])
        first = min(int(values[i].storage_offset()) for i in places)
        for i in places:
            found[i] = replace(found[i], memory=label, start=int(values[i].storage_offset()) - first)
    path.write_bytes(to_bytes(tensors))
    return found


def _memory(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return _storable(tensors[0].detach().resolve_conj().resolve_neg().cpu().clone())
    flat, _ = spanned(tensors)
    return _storable(flat.resolve_conj().resolve_neg().cpu())


def _storable(tensor: Tensor) -> Tensor:
    """A dtype that the format does not have is written as bytes."""
    return tensor.contiguous() if can_write(tensor) else tensor.contiguous().reshape(-1).view(torch.uint8)


def value_of(record: InputRecord, tensors: dict[str, Tensor], device: torch.device | None) -> Any:
    """The value of an input out of the memory that its record names."""
    memory = tensors.get(record.memory)
    if memory is None:
        raise DumpError(f"the value of {record.name[:60]!r} is not in the file.")
    dtype = record.torch_dtype
    flat = memory.reshape(-1)
    if flat.dtype is not dtype:
        if flat.dtype is not torch.uint8 or flat.numel() % dtype.itemsize:
            raise DumpError(f"the value of {record.name[:60]!r} is of {flat.dtype}, its record says {dtype}.")
        flat = flat.clone().view(dtype)
    if record.start + record.extent > flat.numel():
        raise DumpError(f"the value of {record.name[:60]!r} is longer than its memory.")
    return placed(flat, record, device)
