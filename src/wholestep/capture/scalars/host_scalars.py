"""Numbers that Python around the graph computes: a learning rate after `scheduler.step()` inside of the step.

The graph does not know them. The step may return them; the runtime reads them after it repeated the scheduler's call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.optim.lr_scheduler import LRScheduler

from wholestep.errors import SideEffectError
from wholestep.ir.user_location import user_location
from wholestep.ir.user_objects.slots import ABSENT, Slot


@dataclass(frozen=True, eq=False)
class LastRateSlot(Slot):
    """`scheduler.get_last_lr()[index]`."""

    scheduler: LRScheduler
    index: int

    def get(self) -> Any:
        rates = getattr(self.scheduler, "_last_lr", ())
        return rates[self.index] if self.index < len(rates) else ABSENT


class HostNumber:
    """A number that exists only after the step ran. It can be returned, and nothing else."""

    def __init__(self, path: str, read: Callable[[], Any]) -> None:
        self.path = path
        self.read = read

    def _refuse(self, *_: Any) -> NoReturn:
        raise SideEffectError(
            f"the step computes with {self.path} after a scheduler changed it in the same step.",
            fix="call scheduler.step() at the end of the step, or outside of it.",
            location=user_location(),
        )

    __float__ = __int__ = __index__ = __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __format__ = _refuse

    def __repr__(self) -> str:
        return f"<{self.path} after the step>"
