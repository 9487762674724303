"""Decisions that are the same on all ranks: what one of them found wrong is wrong for all.

Every rank asks the same questions in the same order, since each question follows from answers that all have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from wholestep.torch_private.distributed import is_gloo

_NONE = 1 << 40


class Together:
    """The ranks of the default group; alone where there is none, or where the step has no plan."""

    def __init__(self, parallel: Any) -> None:
        ready = parallel is not None and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if ready else 1
        self.rank = dist.get_rank() if self.size > 1 else 0

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return self.first(0 if flag else None) is not None

    def first(self, place: int | None) -> int | None:
        """The smallest place of all ranks; None where no rank has one."""
        if self.size == 1:
            return place
        device = torch.device("cpu") if is_gloo(dist.group.WORLD) else torch.device("cuda", torch.cuda.current_device())
        found = torch.tensor([_NONE if place is None else place], dtype=torch.int64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return None if int(found) == _NONE else int(found)
