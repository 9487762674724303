"""Values of inputs in a safetensors file, with strides and shared memory as they were.

Each piece of memory is one tensor of the file. A contiguous input lies there in its own shape, so that other programs
can read it; anything else as the flat memory that it spans, which inputs that overlap share. Records say where they are
in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholestep.compilers.input_records import InputRecord, placed
from wholestep.compilers.safe_files import read_bytes
from wholestep.errors import DumpError, GraphFormatError
from wholestep.ir.io.tensor_file import can_write, from_bytes, to_bytes
from wholestep.ir.memory import spanned
from wholestep.torch_private.fake_tensors import storage_key


def keep_values(
    path: Path, values: Sequence[Any], records: Sequence[InputRecord], extra: dict[str, Tensor]
) -> list[InputRecord]:
    """Write the values of tensors, and `extra` ones under their names; the records that say where they lie."""
    found = list(records)
    by_memory: dict[tuple[Any, ...], list[int]] = {}
    for i, (value, record) in enumerate(zip(values, records, strict=True)):
        if isinstance(value, Tensor) and record.kind == "tensor":
            # A conjugate shares memory, but a file has numbers as they are read: it gets its own.
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


def read_values(path: Path, max_bytes: int) -> dict[str, Tensor]:
    """All tensors of a file that `keep_values` wrote."""
    try:
        return from_bytes(read_bytes(path, max_bytes), path.name)
    except GraphFormatError as error:
        raise DumpError(error.what) from error


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
