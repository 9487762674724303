"""Amounts of memory as users write them: bytes, or a text such as "12GiB"."""

from __future__ import annotations

import re
from typing import Any

from wholestep.errors import invalid_value

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)})
_UNITS.update({f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)})
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*")
_FIX = 'use bytes (12_000_000_000) or a text ("12GiB", "800MB").'


def as_bytes(given: Any, name: str) -> float | None:
    """Bytes, from bytes or a text; None stays None. `name`: of the option, for its error."""
    if given is None:
        return None
    if isinstance(given, str):
        return bytes_in(given, name, _FIX)
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise invalid_value(name, given, _FIX)
    return given


def bytes_in(text: str, name: str, fix: str) -> int:
    """The bytes that a text names."""
    match = _TEXT.fullmatch(text)
    count = float(match[1]) * _UNITS[match[2]] if match is not None and match[2] in _UNITS else 0.0
    if not 1 < count < 2**63:  # "0.5" is not half of something
        raise invalid_value(name, text, fix)
    return int(count)
