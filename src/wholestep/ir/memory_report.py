"""The result of a memory budget (`step.last.memory`), and amounts of memory as users write and read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from wholestep.errors import invalid_value

_MOST_ROWS = 12


@dataclass(frozen=True)
class SavedTensor:
    """A forward value that lives until the backward."""

    name: str
    """The node that computes it."""
    bytes: int
    module_path: str


@dataclass
class MemoryReport:
    """Peaks are bytes on one device: parameters, state and batch of the step, and all that it allocates."""

    device: str
    budget: int
    """The largest allowed peak."""
    planned_peak: int
    """The expected peak: the executable graph simulated node by node, with the measured memory of compiled calls."""
    smallest_peak: int
    """The lowest peak of all candidates that were built or estimated."""
    peak_without: int
    """Peak without recomputation; an estimate unless the budget is a fraction."""
    saved: tuple[SavedTensor, ...]
    """What is saved for the backward, largest first."""
    recomputed: tuple[str, ...]
    """Forward nodes that the backward recomputes."""
    plans_tried: int
    """Candidates that were built."""
    shed: int | None = None
    """Compiled steps whose budget allows it use the compiler's own cut, with (at least) this many fewer bytes saved;
    names are then those of the compiled region. None: the graph itself says what is recomputed."""
    measured_peak: int | None = None
    """Peak of the first call of this graph; None before it, or if a profiler ran."""

    @property
    def saved_bytes(self) -> int:
        """Of all tensors in `saved`."""
        return sum(tensor.bytes for tensor in self.saved)

    def __str__(self) -> str:
        measured = "not yet" if self.measured_peak is None else shown(self.measured_peak)
        lines = [
            f"memory on {self.device}: budget {shown(self.budget)}, planned {shown(self.planned_peak)}, "
            f"measured {measured}",
            f"  without recomputation {shown(self.peak_without)}, smallest {shown(self.smallest_peak)}",
            f"  {len(self.recomputed)} nodes recomputed, {len(self.saved)} tensors saved ({shown(self.saved_bytes)}):",
        ]
        lines += [f"    {shown(t.bytes):>12}  {t.name}  {t.module_path}".rstrip() for t in self.saved[:_MOST_ROWS]]
        if len(self.saved) > _MOST_ROWS:
            rest = self.saved[_MOST_ROWS:]
            lines.append(f"    {shown(sum(t.bytes for t in rest)):>12}  in {len(rest)} others")
        return "\n".join(lines)


def shown(count: float) -> str:
    """Bytes as text with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)})
_UNITS.update({f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)})
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*")
_FIX = 'use bytes (12_000_000_000) or a text ("12GiB", "800MB").'


def as_bytes(given: Any, name: str) -> float | None:
    """Bytes, from a number or a text such as "12GiB"; None stays None. `name`: the option, for its error."""
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
    if not 1 < count < 2**63:  # "0.5" is not a fraction
        raise invalid_value(name, text, fix)
    return int(count)
