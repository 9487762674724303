"""Tensors as they are, to the bit: memory by storage, and how each tensor lies in it.

    saved = SavedTensors(tensors)      copies what the tensors span of each storage, to host memory
    saved.restore()                    the same tensor objects on the same storages with the same bytes

Views stay views and tied tensors stay tied, since bytes are saved once per storage and objects are never replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholestep.ir.memory import extent_of
from wholestep.torch_private.dumps import set_version
from wholestep.torch_private.fake_tensors import storage_key


@dataclass(frozen=True)
class _SavedTensor:
    tensor: Tensor
    alias: Tensor
    """Another tensor on the same storage, in the same layout."""
    requires_grad: bool
    grad: Tensor | None
    version: int

    def put_back(self) -> None:
        now, before = self.tensor, self.alias
        if not _lies_as(now, before):
            if now.is_leaf and now.grad is not None and now.dtype != before.dtype:
                now.grad = None  # it has the dtype that the tensor has now
            now.data = before
        if now.is_leaf and now.requires_grad != self.requires_grad:
            now.requires_grad_(self.requires_grad)

    def put_back_grad(self) -> None:
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad
        if not self.tensor.is_inference():
            set_version(self.tensor, self.version)


@dataclass(frozen=True)
class _SavedStorage:
    storage: torch.UntypedStorage
    device: torch.device
    first: int
    content: Tensor
    """Bytes, from `first` on."""
    size: int

    def put_back(self) -> None:
        if self.storage.nbytes() != self.size:
            self.storage.resize_(self.size)
        _bytes_of(self.storage, self.device, self.first, self.content.numel()).copy_(self.content)


class SavedTensors:
    """The contents and layout of tensors at one moment."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors: list[_SavedTensor] = []
        spans: dict[int, tuple[torch.UntypedStorage, torch.device, int, int]] = {}
        for tensor in tensors:
            alias = tensor.detach()
            grad = tensor.grad if tensor.is_leaf else None
            version = 0 if tensor.is_inference() else tensor._version
            self.tensors.append(_SavedTensor(tensor, alias, tensor.requires_grad, grad, version))
            first = int(alias.storage_offset()) * alias.itemsize
            last = first + extent_of(alias) * alias.itemsize
            key = storage_key(alias)
            _, _, a, b = spans.get(key, (None, None, first, last))
            spans[key] = (alias.untyped_storage(), alias.device, min(a, first), max(b, last))
        self.storages = [_saved_storage(*span) for span in spans.values()]

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return sum(saved.content.numel() for saved in self.storages)

    def restore(self) -> None:
        """Put everything back; safe to do more than once."""
        with torch.no_grad(), torch.inference_mode(False):
            for saved in self.tensors:
                saved.put_back()
            for memory in self.storages:
                memory.put_back()
            for saved in self.tensors:
                saved.put_back_grad()


def can_be_saved(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory and nothing else."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def _saved_storage(storage: torch.UntypedStorage, device: torch.device, first: int, last: int) -> _SavedStorage:
    content = _bytes_of(storage, device, first, last - first)
    content = content.clone() if device.type == "cpu" else content.cpu()
    return _SavedStorage(storage, device, first, content, storage.nbytes())


def _lies_as(now: Tensor, before: Tensor) -> bool:
    same = now.dtype == before.dtype and now.device == before.device and now.shape == before.shape
    if not same or now.stride() != before.stride() or now.storage_offset() != before.storage_offset():
        return False
    return storage_key(now) == storage_key(before)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device, first: int, count: int) -> Tensor:
    memory: Any = torch.empty(0, dtype=torch.uint8, device=device)
    found: Tensor = memory.set_(storage, first, (count,), (1,))
    return found
