"""`on_refusal="eager"`: a call that cannot be captured runs as the plain function.

    capture refuses call 3          WS-ITEM, at train.py:31
    train_step(model, batch)        the plain function; one EagerWarning says why
    call 4                          is captured again, at most `ATTEMPTS` times in all

Graphs that exist still run for the calls that their guards allow. After `ATTEMPTS` refusals no capture is tried any
more: a step that logs `loss.item()` every tenth time uses its graph for the other nine calls, and a step that never
can be captured does not pay for a trace in each call.

A refusal is kept as text: its traceback holds the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wholestep.errors import (
    CaptureError,
    DynamicShapeError,
    EagerWarning,
    ShardedOptimizerError,
    WholestepError,
    WrappedError,
)
from wholestep.ir.meta import location_of_exception, warn_user

ATTEMPTS = 3
"""How many captures of one step may be refused before no other is tried."""

REFUSALS = (CaptureError, WrappedError, ShardedOptimizerError)
"""The errors that say that a step cannot be captured. Others are about options, or about what was asked for."""


def is_refusal(error: Exception) -> bool:
    """Whether an error of a capture means that the step cannot be captured. A wrong `dynamic=` does not."""
    if not isinstance(error, WholestepError):
        return True
    return isinstance(error, REFUSALS) and not isinstance(error, DynamicShapeError)


@dataclass(frozen=True)
class Refusal:
    """Why a call cannot be captured."""

    text: str
    """The error: its code, the user's line, what to do."""
    about: str
    """The code and the line: what was said once is not said again."""
    may_be_the_users: bool = False
    """The step itself raised while it was traced. It may raise in eager too: then there is nothing to warn of."""

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """The refusal that an error in a capture is."""
        where = getattr(error, "location", None) or location_of_exception(error)
        if isinstance(error, WholestepError):
            return cls(str(error), f"{error.code} {where}")
        lines = str(error).strip().splitlines()
        text = f"[WS-CAPTURE] the trace raised {type(error).__name__}: {lines[0] if lines else ''}"
        if where is not None:
            text += f"\n  at    {where.users_first}\n            {where.users_first.text}"
        fix = "capture what can be captured: compile a smaller function, and do this outside of it."
        return cls(f"{text}\n  fix   {fix}", f"{type(error).__name__} {where}", may_be_the_users=True)

    @classmethod
    def of_ranks(cls, texts: Mapping[int, str]) -> Refusal:
        """The refusals of other ranks, by rank."""
        rank, text = min(texts.items())
        return cls(f"(rank {rank}) {text}", f"rank {text.partition(chr(10))[0]}")


class CannotCaptureError(Exception):
    """Inside of a compiled step: its capture was refused, and `on_refusal="eager"`. The traceback was dropped."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass
class Refusals:
    """The refusals of one step."""

    count: int = 0
    """How many calls ran in eager because a capture was refused, up to `ATTEMPTS`."""
    _last: Refusal | None = None
    _warned: set[str] = field(default_factory=set)

    @property
    def final(self) -> Refusal | None:
        """The last refusal, if no other capture is to be tried; else None."""
        return self._last if self.count >= ATTEMPTS else None

    def note(self, refusal: Refusal) -> None:
        """A call ran in eager for that reason."""
        self._last, self.count = refusal, min(self.count + 1, ATTEMPTS)

    def warn(self, step: str, call: int, refusal: Refusal) -> None:
        """Say it at the line that calls the step: once for each code and line."""
        if refusal.about in self._warned:
            return
        self._warned.add(refusal.about)
        text = f'{step} runs in eager in call {call} (on_refusal="eager"), because it cannot be captured:'
        warn_user(f"{text}\n{refusal.text}", EagerWarning)
