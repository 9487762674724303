"""Sizes that vary from call to call: the range the user declared, and what a trace assumed of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from wholestep.errors import DynamicShapeError, OptionError
from wholestep.torch_private.symbolic_shapes import ShapeEnv, shape_guards

SizeCondition = tuple[str, Callable[[dict[str, int]], bool]]
"""A condition on the sizes of a call: its text, and its check by the names of symbols."""


@dataclass(frozen=True)
class Dim:
    """A dimension of a batch tensor that may differ from call to call, between `min` and `max` (both included)."""

    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if self.min < 1 or (self.max is not None and self.max < self.min):
            raise OptionError(f"Dim(min={self.min}, max={self.max}) is empty or below 1.", fix="use 1 <= min <= max.")


@dataclass(frozen=True)
class DynamicSizes:
    """The symbolic sizes of one captured graph."""

    dims: Mapping[int, Mapping[int, Dim]] = field(default_factory=dict)
    """By batch leaf and dimension, the declared range."""
    sources: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """By name of a symbol, the (batch leaf, dimension) places that have this size."""
    env: ShapeEnv | None = None
    """What torch assumed of the symbols. Lowering compares sizes as well and adds to it."""

    def assumed(self) -> list[SizeCondition]:
        """Conditions on the symbols that the trace, and what ran since, relied on."""
        if self.env is None:
            return []
        found: list[SizeCondition] = []
        for expression in shape_guards(self.env):
            free = sorted(expression.free_symbols, key=str)
            if free and not _only_excludes_one(expression):
                found.append((str(expression), _check_of(expression, free)))
        return found


def out_of_range(path: str, dim: int, size: int, declared: Dim) -> DynamicShapeError:
    """A call came with a size that the user excluded."""
    top = "any" if declared.max is None else declared.max
    return DynamicShapeError(
        f"{path} has size {size} in dimension {dim}, outside of the declared {declared.min} to {top}.",
        fix="declare a wider ws.Dim, or pad the batch.",
    )


def _only_excludes_one(expression: Any) -> bool:
    """`Ne(s0, 1)`: the trace assumed no broadcasting over a declared dim, which holds for size 1 too."""
    return isinstance(expression, sympy.Ne) and sympy.Integer(1) in expression.args


def _check_of(expression: Any, free: Sequence[Any]) -> Callable[[dict[str, int]], bool]:
    def check(sizes: dict[str, int]) -> bool:
        return bool(expression.subs({symbol: sizes[str(symbol)] for symbol in free}))

    return check
