"""Values of the example call, with the sizes that it had in place of symbols."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.ir.io.node_values import hint_of
from wholestep.torch_private.fake_tensors import FakeTensorMode, fake_tensor


def example_value(value: Any, mode: FakeTensorMode) -> Any:
    """A recorded value with its sizes as numbers; tensors are new fake ones of the given mode."""
    if isinstance(value, list | tuple):
        return type(value)(example_value(item, mode) for item in value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value
        shape, stride = _numbers(value.shape), _numbers(value.stride())
        return fake_tensor(mode, shape, stride, value.dtype, value.device)
    return hint_of(value)


def example_bytes(value: Any) -> int:
    """The bytes of a recorded value, with the sizes of the example."""
    if isinstance(value, list | tuple):
        return sum(example_bytes(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return 0
    count = 1
    for size in _numbers(value.shape):
        count *= size
    return count * value.element_size()


def _numbers(sizes: Any) -> list[int]:
    """Sizes as numbers; one that only a run can know (the number of hits of a filter) counts as 1."""
    found = [hint_of(size) for size in sizes]
    return [1 if number is None else int(number) for number in found]
