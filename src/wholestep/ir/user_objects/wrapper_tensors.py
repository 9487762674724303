"""Tensors that are made of other tensors, in optimizer state: torchao's 8-bit, 4-bit and fp8 moments.

Such a tensor has no memory of its own. Its class says by `__tensor_flatten__` which of its attributes are tensors and
what else it is made with, and `__tensor_unflatten__` makes one. To a graph it is a container: its tensors are inputs
and are written one by one, and the rest is a constant under a guard.

    optimizer.state[w]["exp_avg"]        OptimState8bit(signed=True), 64 x 64
    optimizer.state[w].exp_avg.codes     InnerTensorSlot: uint8, 64 x 64
    optimizer.state[w].exp_avg.scale     InnerTensorSlot: float32, 16

DTensors are not handled here: they have a slot of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.ir.user_objects.slots import ABSENT, Slot
from wholestep.torch_private.distributed import is_dtensor

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})


class InnerName(str):
    """The attribute of a wrapper tensor that holds a tensor, where a container has a key."""

    __slots__ = ()


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor made of other tensors."""
    if not isinstance(value, Tensor) or type(value) in _PLAIN:
        return False
    return is_wrapper_class(type(value)) and not value.is_nested and not is_dtensor(value)


def is_wrapper_class(kind: Any) -> bool:
    """Whether instances of a class can be taken apart and made of their parts."""
    is_class = isinstance(kind, type) and issubclass(kind, Tensor)
    return is_class and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def inner_tensors(wrapper: Any) -> dict[InnerName, Tensor]:
    """The tensors that a wrapper is made of, by attribute."""
    return {InnerName(name): getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}


def context_of(wrapper: Any) -> Any:
    """What else it is made with."""
    return wrapper.__tensor_flatten__()[1]


def plain_context(wrapper: Any) -> Any:
    """What else it is made with, as something that can be compared: many wrappers build it anew when they are asked."""
    return _plain(context_of(wrapper))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [_plain(getattr(value, field.name)) for field in fields(value)]
    return value


def made_of(wrapper: Any, inner: Mapping[InnerName, Any]) -> Tensor:
    """A wrapper like another one, of other tensors."""
    return _make(type(wrapper), inner, context_of(wrapper), wrapper.size(), wrapper.stride())


def _make(kind: Any, inner: Mapping[InnerName, Any], context: Any, size: Any, stride: Any) -> Tensor:
    made: Tensor = kind.__tensor_unflatten__({str(name): each for name, each in inner.items()}, context, size, stride)
    return made


@dataclass(frozen=True)
class TensorForm:
    """What an uninitialised tensor is made with."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def build(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class WrapperForm:
    """What a wrapper is made with whose contents a graph computes; its tensors are set after it was built."""

    kind: type[Tensor]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    inner: tuple[tuple[str, TensorForm | WrapperForm], ...]

    def build(self) -> Tensor:
        inner = {InnerName(name): form.build() for name, form in self.inner}
        return _make(self.kind, inner, self.context, torch.Size(self.size), self.stride)


def form_of(tensor: Tensor) -> TensorForm | WrapperForm:
    """The form of a tensor, which may be fake or made of fakes."""
    size, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    if not is_wrapper(tensor):
        return TensorForm(size, stride, tensor.dtype, tensor.device)
    inner = tuple((str(name), form_of(each)) for name, each in inner_tensors(tensor).items())
    return WrapperForm(type(tensor), context_of(tensor), size, stride, inner)


@dataclass(frozen=True, eq=False)
class InnerTensorSlot(Slot):
    """A tensor that the wrapper in another slot is made of."""

    root: Slot
    name: str

    def get(self) -> Any:
        wrapper = self.root.get()
        return getattr(wrapper, self.name, ABSENT) if is_wrapper(wrapper) else ABSENT

    def set(self, value: Any) -> None:
        setattr(self.root.get(), self.name, value)
