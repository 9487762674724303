"""What a user may write as a memory budget: bytes, a text such as "12GiB", or a fraction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from wholestep.errors import OptionError

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)})
_UNITS.update({f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)})
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*")
_FIX = 'use bytes (12_000_000_000), a text ("12GiB", "800MB"), or a fraction from 0.0 to 1.0.'
_FIX_BYTES = 'use bytes (12_000_000_000) or a text ("12GiB", "800MB").'


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
            return cls(most=_bytes(given))
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise OptionError(f"memory_budget={given!r}", fix=_FIX)
        if isinstance(given, float) and 0.0 <= given <= 1.0:
            return cls(fraction=given)
        if not 1 < given < 2**63 or given != int(given):
            raise OptionError(f"memory_budget={given!r}", fix=_FIX)
        return cls(most=int(given))


def as_bytes(given: Any, name: str) -> float | None:
    """What a user may write as an amount of memory: bytes or a text; None stays None."""
    if given is None:
        return None
    if isinstance(given, str):
        return _bytes(given, name, _FIX_BYTES)
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise OptionError(f"{name}={given!r}", fix=_FIX_BYTES)
    return given


def _bytes(text: str, name: str = "memory_budget", fix: str = _FIX) -> int:
    match = _TEXT.fullmatch(text)
    count = float(match[1]) * _UNITS[match[2]] if match is not None and match[2] in _UNITS else 0.0
    if not 1 < count < 2**63:  # "0.5" is not half of something
        raise OptionError(f"{name}={text!r}", fix=fix)
    return int(count)
