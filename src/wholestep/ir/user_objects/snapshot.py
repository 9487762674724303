"""The state around a step at one moment, restored in place: the user's own objects, never copies of them.

    before = Snapshot(roots)
    ...                        run anything: the function, its compiled form, with other numbers
    before.restore()           every object that the step can reach holds what it held, to the bit

Identities stay: tensors, modules, optimizers and dicts are the objects that guards, closures and globals refer to.
Tensors are saved as bytes once per storage, on the host: views stay views and tied tensors stay tied. Iterators over
lists, tuples and ranges take `__setstate__`; a Python generator, `itertools.count` or a file cannot be moved back.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.ir.tensor_copies import extent_of
from wholestep.ir.user_objects.object_contents import saved, saved_variable
from wholestep.ir.user_objects.plain_contents import PLAIN
from wholestep.ir.user_objects.reachable import Part, Reached, reach
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import set_version, storage_key
from wholestep.torch_private.guard_checks import cuda_is_initialized

Roots = list[tuple[str, Any]]


class Snapshot:
    """What to restore, and how."""

    def __init__(self, roots: Roots) -> None:
        self.reached: Reached = reach(roots)
        tensors = [seen.obj for seen in self.reached.tensors]
        self.unsaved = {
            seen.path: _kind(seen.obj) for seen in self.reached.tensors if not can_be_saved(local_of(seen.obj))
        }
        """Tensors that are not plain memory: path to what they are. Of a DTensor the local shard is saved."""
        self._tensors = SavedTensors(local for tensor in tensors if can_be_saved(local := local_of(tensor)))
        self._grads_of_sharded = [(t, t.grad) for t in tensors if t.is_leaf and local_of(t) is not t]
        self._python: list[Callable[[], None]] = [
            put_back
            for obj in (*(seen.obj for seen in self.reached.holders), *tensors)
            if (put_back := _saved_python(obj)) is not None
        ]
        self._python += [saved_variable(place, name) for place, name in self.reached.variables]
        self._python += process_state()
        self._positions = [IteratorPosition(seen.path, seen.obj) for seen in self.reached.iterators]

    @property
    def nbytes(self) -> int:
        """Host memory for the contents of tensors."""
        return self._tensors.nbytes

    @property
    def on_cuda(self) -> torch.device | None:
        """The CUDA device of the first tensor there that is on one."""
        return next((seen.obj.device for seen in self.reached.tensors if seen.obj.is_cuda), None)

    def restore(self) -> None:
        """Restore everything; safe to call more than once."""
        torch.clear_autocast_cache()
        for put_back in self._python:
            put_back()
        self._tensors.restore()
        for tensor, grad in self._grads_of_sharded:
            if tensor.grad is not grad:
                tensor.grad = grad

    def advanced_iterators(self) -> list[str]:
        """Iterators that were advanced and cannot be rewound."""
        return [position.path for position in self._positions if not position.put_back()]


def default_generators() -> list[tuple[str, torch.Generator]]:
    """Torch's default generators, of the CPU and of every CUDA device in use."""
    found = [("torch.default_generator", torch.default_generator)]
    if cuda_is_initialized():
        found += [(f"torch.cuda.default_generators[{i}]", g) for i, g in enumerate(torch.cuda.default_generators)]
    return found


def process_state() -> list[Callable[[], None]]:
    """Random state of the process, environment variables and torch's modes, as functions that restore them."""
    found: list[Callable[[], None]] = []
    for _, generator in default_generators():
        put_back = saved(generator)
        assert put_back is not None
        found.append(put_back)
    python, numpy, environment = random.getstate(), np.random.get_state(), dict(os.environ)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()

    def rest() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)

    return [*found, rest]


def process_values() -> dict[str, tuple[Part, Any]]:
    """The random state of the process as values that can be compared."""
    found: dict[str, tuple[Part, Any]] = {
        path: (Part.RNG, generator.get_state()) for path, generator in default_generators()
    }
    found["random"] = (Part.RNG, random.getstate())
    name, keys, *rest = np.random.get_state()
    found["numpy.random"] = (Part.RNG, (name, np.asarray(keys).tobytes(), *rest))
    return found


def _saved_python(obj: Any) -> Callable[[], None] | None:
    if not isinstance(obj, Tensor):
        return saved(obj)
    attributes = obj.__dict__  # also of a tensor that has none yet
    items = dict(attributes)

    def put_back() -> None:
        if attributes or items:
            attributes.clear()
            attributes.update(items)

    return put_back


def _kind(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested tensor"
    return f"{tensor.layout} tensor" if tensor.layout is not torch.strided else type(tensor).__name__


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
        if not _same_layout(now, before):
            if now.is_leaf and now.grad is not None and now.dtype != before.dtype:
                now.grad = None  # it has the present dtype of the tensor
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
        """Restore everything; safe to call more than once."""
        with torch.no_grad(), torch.inference_mode(False):
            for saved in self.tensors:
                saved.put_back()
            for memory in self.storages:
                memory.put_back()
            for saved in self.tensors:
                saved.put_back_grad()


def can_be_saved(tensor: Tensor) -> bool:
    """True if a tensor is plain strided memory."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def _saved_storage(storage: torch.UntypedStorage, device: torch.device, first: int, last: int) -> _SavedStorage:
    content = _bytes_of(storage, device, first, last - first)
    content = content.clone() if device.type == "cpu" else content.cpu()
    return _SavedStorage(storage, device, first, content, storage.nbytes())


def _same_layout(now: Tensor, before: Tensor) -> bool:
    same = now.dtype == before.dtype and now.device == before.device and now.shape == before.shape
    if not same or now.stride() != before.stride() or now.storage_offset() != before.storage_offset():
        return False
    return storage_key(now) == storage_key(before)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device, first: int, count: int) -> Tensor:
    memory: Any = torch.empty(0, dtype=torch.uint8, device=device)
    found: Tensor = memory.set_(storage, first, (count,), (1,))
    return found


class IteratorPosition:
    """The position of one iterator at one moment."""

    def __init__(self, path: str, iterator: Any) -> None:
        self.path = path
        self._iterator = iterator
        self._position = _position(iterator)

    def put_back(self) -> bool:
        """True if the iterator is where it was, rewound if need be."""
        if _same(_position(self._iterator), self._position):
            return True
        state = self._position[2] if isinstance(self._position, tuple) and len(self._position) > 2 else None
        if not isinstance(state, int) or not hasattr(self._iterator, "__setstate__"):
            return False
        self._iterator.__setstate__(state)
        return _same(_position(self._iterator), self._position)


def _position(iterator: Any) -> Any:
    """Something that differs after `next`; None where nothing can be known."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return "exhausted"
        return frame.f_lasti, frame.f_lineno, {k: _word(v) for k, v in frame.f_locals.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of copying itertools, from Python 3.12 on
            return _word(iterator.__reduce__())
    except TypeError:
        return None


def _word(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple):
        return tuple(map(_word, value))
    if isinstance(value, range):
        return repr(value)  # an iterator over one returns another range each time
    return _position(value) if hasattr(value, "__next__") else id(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a is b or (isinstance(a, (*PLAIN, dict)) and type(a) is type(b) and a == b))
