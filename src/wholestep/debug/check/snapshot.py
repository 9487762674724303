"""The state around a step at one moment, put back in place: the user's own objects, never copies of them.

    before = Snapshot(roots)
    ...                        run anything: the function, its compiled form, with other numbers
    before.restore()           every object that the step can reach holds what it held, to the bit

Identities stay: tensors, modules, optimizers and dicts are the objects that guards, closures and globals refer to.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.debug.check.children import saved, saved_variable
from wholestep.debug.check.iterators import IteratorPosition
from wholestep.debug.check.reachable import Part, Reached, reach
from wholestep.debug.check.tensor_memory import SavedTensors, can_be_saved
from wholestep.torch_private.guard_checks import cuda_is_initialized

Roots = list[tuple[str, Any]]


class Snapshot:
    """What to put back, and how."""

    def __init__(self, roots: Roots) -> None:
        self.reached: Reached = reach(roots)
        tensors = [seen.obj for seen in self.reached.tensors]
        self.unsaved = {seen.path: _kind(seen.obj) for seen in self.reached.tensors if not can_be_saved(seen.obj)}
        """Tensors that are not plain memory: path to what they are."""
        self._tensors = SavedTensors(tensor for tensor in tensors if can_be_saved(tensor))
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
        """Put everything back; safe to do more than once."""
        torch.clear_autocast_cache()
        for put_back in self._python:
            put_back()
        self._tensors.restore()

    def advanced_iterators(self) -> list[str]:
        """Iterators that something was taken from and that cannot be put back."""
        return [position.path for position in self._positions if not position.put_back()]


def default_generators() -> list[tuple[str, torch.Generator]]:
    """Torch's own generators, of the CPU and of every CUDA device in use."""
    found = [("torch.default_generator", torch.default_generator)]
    if cuda_is_initialized():
        found += [(f"torch.cuda.default_generators[{i}]", g) for i, g in enumerate(torch.cuda.default_generators)]
    return found


def process_state() -> list[Callable[[], None]]:
    """Random state of the process, environment variables and torch's modes, as functions that put them back."""
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
