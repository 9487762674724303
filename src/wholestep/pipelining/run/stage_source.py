"""What a stage on a rank needs of the pipe that it is from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from wholestep.pipelining.build.shared import SharedParameter


class Source(Protocol):
    """What a stage needs of a pipe."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Parameters that several stages use."""

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of a stage."""

    def flatten_inputs(self, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
        """The tensors of a call."""

    def unflatten_outputs(self, flat: Sequence[torch.Tensor]) -> Any:
        """What the model returns."""
