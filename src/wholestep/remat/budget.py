"""What a user may write as a memory budget: bytes, a text such as "12GiB", or a fraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wholestep.errors import invalid_value
from wholestep.ir.amounts import bytes_in

_FIX = 'use bytes (12_000_000_000), a text ("12GiB", "800MB"), or a fraction from 0.0 to 1.0.'


@dataclass(frozen=True)
class Budget:
    """One of the two is set."""

    most: int | None = None
    """Bytes of peak memory."""
    fraction: float | None = None
    """0.0: the smallest peak that can be reached; 1.0: the peak without computing anything again."""

    @classmethod
    def of(cls, given: Any) -> Budget | None:
        """Read what the user wrote; None stays None."""
        if given is None or isinstance(given, Budget):
            return given
        if isinstance(given, str):
            return cls(most=bytes_in(given, "memory_budget", _FIX))
        if isinstance(given, np.integer | np.floating):
            given = given.item()
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise invalid_value("memory_budget", given, _FIX)
        if isinstance(given, float) and 0.0 <= given <= 1.0:
            return cls(fraction=given)
        if not 1 < given < 2**63 or given != int(given):
            raise invalid_value("memory_budget", given, _FIX)
        return cls(most=int(given))
