"""Pipes written by hand, for tests that need no tracing: a chain of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from wholestep.pipelining import SharedParameter


class HandMade:
    """Stages in a row."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        shared: Sequence[SharedParameter] = (),
        result: Callable[[Sequence[torch.Tensor]], Any] | None = None,
    ) -> None:
        self.stages = list(stages)
        self.shared = tuple(shared)
        self.result = result

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        return self.stages[stage_idx]

    def flatten_inputs(self, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
        return [*args, *kwargs.values()]

    def unflatten_outputs(self, flat: Sequence[torch.Tensor]) -> Any:
        if self.result is not None:
            return self.result(flat)
        return flat[0] if len(flat) == 1 else tuple(flat)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values: Any = self.flatten_inputs(args, kwargs)
        for stage in self.stages:
            values = stage(*values)
            values = [values] if isinstance(values, torch.Tensor) else list(values)
        return self.unflatten_outputs(values)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.parameters()]
