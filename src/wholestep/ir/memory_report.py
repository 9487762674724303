"""What became of a memory budget: `step.last.memory`."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_ROWS = 12


@dataclass(frozen=True)
class SavedTensor:
    """A forward value that lives until the backward."""

    name: str
    """The node that makes it."""
    bytes: int
    module_path: str


@dataclass
class MemoryReport:
    """Peaks are bytes on one device: parameters, state and batch of the step, and all that it makes."""

    device: str
    budget: int
    """What the peak may be at most."""
    planned_peak: int
    """What it will be: the executable graph played node by node, with what compiled calls need measured."""
    smallest_peak: int
    """Of the plans that were tried or estimated: the lowest."""
    peak_without: int
    """With nothing computed again; estimated where nobody asked for a fraction."""
    saved: tuple[SavedTensor, ...]
    """What is kept for the backward, largest first."""
    recomputed: tuple[str, ...]
    """Forward nodes that the backward computes again."""
    plans_tried: int
    shed: int | None = None
    """Compiled steps whose budget allows it are cut where torch would cut, and keep so many bytes less (at least);
    names are then those of the compiled region. None: the graph itself says what is computed again."""
    measured_peak: int | None = None
    """What the first call of this graph had; None before it, or while a profiler ran."""

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
            f"  {len(self.recomputed)} nodes computed again, {len(self.saved)} tensors kept "
            f"({shown(self.saved_bytes)}):",
        ]
        lines += [f"    {shown(t.bytes):>12}  {t.name}  {t.module_path}".rstrip() for t in self.saved[:_MOST_ROWS]]
        if len(self.saved) > _MOST_ROWS:
            rest = self.saved[_MOST_ROWS:]
            lines.append(f"    {shown(sum(t.bytes for t in rest)):>12}  in {len(rest)} others")
        return "\n".join(lines)


def shown(count: float) -> str:
    """Bytes for a person."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
