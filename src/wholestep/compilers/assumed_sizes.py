"""What a trace with symbols for sizes relied on, and whether it is true of other inputs.

Sizes and whole numbers that were equal have one symbol (torch's duck shaping), 0 and 1 are plain numbers, and guards
are conditions on symbols. Strides follow from sizes where a tensor is dense; one that is not has the same sizes and
strides at each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from wholestep.torch_private.dumps import symbols_by_value
from wholestep.torch_private.symbolic_shapes import shape_guards


def pattern_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """What has to be equal of two tensors for one trace: where sizes are 0 or 1, and the order of dense strides."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    dense, step = True, 1
    for dim in order:
        dense = dense and tensor.stride(dim) == step
        step *= tensor.shape[dim]
    if not dense or not tensor.numel():
        return tuple(tensor.shape), tensor.stride()
    return tuple(size if size == 1 else -1 for size in tensor.shape), tuple(order)


class AssumedSizes:
    """The sizes of one traced call, and the conditions on them."""

    def __init__(self, env: Any, leaves: Sequence[Any]) -> None:
        self._env = env
        self._traced = _numbers(leaves)
        self._held: tuple[int, list[int]] = (-1, [])

    def hold_for(self, leaves: Sequence[Any]) -> bool:
        """Whether equal sizes are equal again, 0 and 1 are where they were, and all guards are true."""
        guards, sizes = shape_guards(self._env), _numbers(leaves)
        # Compiling the backward may add guards.
        if self._held != (len(guards), sizes):
            if not self._check(guards, sizes):
                return False
            self._held = len(guards), sizes
        return True

    def _check(self, guards: list[Any], sizes: list[int]) -> bool:
        now: dict[int, int] = {}
        for before, after in zip(self._traced, sizes, strict=True):
            if now.setdefault(before, after) != after or ((before in (0, 1) or after in (0, 1)) and before != after):
                return False
        symbols = symbols_by_value(self._env)
        values = {symbol: now[value] for value, symbol in symbols.items() if value in now}
        # A guard on anything else than these symbols cannot be evaluated, and is not taken for true.
        return all(guard.subs(values) == True for guard in guards)  # noqa: E712 (sympy's true)


def _numbers(leaves: Sequence[Any]) -> list[int]:
    found: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found += leaf.shape
        elif type(leaf) is int:
            found.append(abs(leaf))  # a number below zero is minus a symbol
    return found
