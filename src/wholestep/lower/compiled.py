"""The compiled call that stands for a region in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from wholestep.errors import LowerError
from wholestep.lower.assumptions import Assumptions
from wholestep.torch_private.autograd import is_profiling

Compiled = Callable[[list[Any]], Any]


class CompiledRegion(nn.Module):
    """Takes the tensors of a region in order; returns a tuple. The profiler shows its tag."""

    boxed = True
    """May be called with one list, which it empties: values die as early as they can."""

    _is_impure = True
    """torch.fx's mark: not dead where nobody uses its results. It may write into its arguments."""

    def __init__(self, compiled: Compiled, tag: str, operators: int) -> None:
        super().__init__()
        self._compiled = compiled
        self._assumptions: Assumptions | None = None
        self.tag = tag
        self.operators = operators

    @property
    def compiled(self) -> Compiled:
        """What runs."""
        return self._compiled

    def assume(self, assumptions: Assumptions) -> None:
        """Look at the arguments before each call."""
        self._assumptions = assumptions

    @property
    def added(self) -> list[fx.Node]:
        """Inputs of the graph that are looked at, which follow the region's own."""
        return self._assumptions.added if self._assumptions is not None else []

    def forward(self, *tensors: Any, tag: str = "") -> tuple[Any, ...]:
        return self.call_boxed(list(tensors))

    def call_boxed(self, tensors: list[Any]) -> tuple[Any, ...]:
        """The same with a list that is emptied."""
        if is_profiling():
            with torch.profiler.record_function(self.tag):
                return tuple(self._run(tensors))
        return self._run(tensors)

    def _run(self, tensors: list[Any]) -> tuple[Any, ...]:
        if self._assumptions is not None:
            added = self._assumptions.take(tensors)
            if not self._assumptions.hold(tensors, added):
                return self._assumptions.run(tensors)
        return self._compiled(tensors)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledRegion:
        return self  # code and nothing else

    def __reduce__(self) -> Any:
        raise LowerError(
            f"{self.tag!r} is compiled code of this process and cannot be pickled.",
            fix="pickle the graph before it is lowered, and lower it again: Inductor's cache knows its regions.",
        )

    def extra_repr(self) -> str:
        return f"{self.tag!r}, {self.operators} operators"
