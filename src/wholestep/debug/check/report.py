"""The result of a check: a frozen record that prints as a table, with time and peak memory of both sides."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.debug.check.findings import Finding, Status
from wholestep.debug.check.first_difference import FirstDifference
from wholestep.debug.check.reachable import Part
from wholestep.errors import CheckError
from wholestep.lower.report import Lowering
from wholestep.passes.engine.contract import Numerics
from wholestep.remat.measure import bytes_at_most

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SHOWN = 6


@dataclass(frozen=True)
class CheckRow:
    """One part of the state: the worst of all calls."""

    part: Part
    status: Status
    compared: int
    """Values of this part, in the call that had most."""
    worst: Finding | None = None
    call: int = 0
    """The number of the call in which the worst was found, from 1."""

    def __str__(self) -> str:
        return "  ".join(self.cells)

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The columns of the table."""
        values = "1 value" if self.compared == 1 else f"{self.compared} values"
        return str(self.part), str(self.status), values, self._detail()

    def _detail(self) -> str:
        worst = self.worst
        if worst is None:
            return ""
        text = [f"call {self.call}: {worst.path}"]
        if worst.status is Status.DIFFERENT:
            return f"{text[0]}: {worst.text}"
        text += [] if worst.ulps is None else [f"{worst.ulps} ulps"]
        text.append(f"{worst.relative:.1e} of the largest")
        text += [] if worst.distance is None else [f"{worst.distance:.2g} x eager's distance from float64"]
        return ", ".join(text)


@dataclass(frozen=True)
class CheckReport:
    """Eager and compiled side by side: what agrees, what was captured, and what both cost."""

    name: str
    lower: str
    steps: int
    """Calls that were compared; a difference ends the check."""
    asked: int
    numerics: Numerics
    """The contract of the step: the same bits, or reassociated sums."""
    rows: tuple[CheckRow, ...]
    first_difference: FirstDifference | None = None
    reference: str = ""
    """Why no float64 reference was made; "" where there is one, or none was needed."""
    graphs: int = 0
    recompiles: tuple[str, ...] = ()
    """Why each capture after the first happened."""
    lowering: Lowering | None = None
    """What was compiled of the graph that ran last, and why the rest was not."""
    capture_seconds: float = 0.0
    eager: CallCost | None = None
    """Seconds and peak bytes of one call; None where the check ended at a difference."""
    compiled: CallCost | None = None
    shared: dict[str, str] = field(default_factory=dict)
    """Path to type of objects that both runs shared, because they cannot be saved and restored."""

    @property
    def ok(self) -> bool:
        """True if nothing is different."""
        return all(row.status is not Status.DIFFERENT for row in self.rows)

    @property
    def exact(self) -> bool:
        """True if everything is equal to the bit."""
        return all(row.status is Status.EQUAL for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, part: str) -> CheckRow:
        """The row of a part: `report["gradients"]`."""
        return next(row for row in self.rows if row.part == part)

    def raise_if_different(self) -> None:
        """Raise CheckError (WS-CHECK) with this report if something is different."""
        if not self.ok:
            raise error_of(self)

    def __str__(self) -> str:
        calls = f"{self.steps} call" + ("" if self.steps == 1 else "s")
        more = f" of {self.asked}, until the first difference" if self.steps < self.asked else ""
        lines = [f'{self.name}: {calls}{more}, eager beside compiled (lower="{self.lower}", {self.numerics})', ""]
        lines += _table([("", "", "", ""), *(row.cells for row in self.rows)])[1:]
        lines += ["", *_table([*self._graphs(), *self._costs(), *self._notes()])]
        if self.first_difference is not None:
            lines += ["", *f"first difference: {self.first_difference}".split("\n")]
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        if not self.ok:
            return "DIFFERENT: " + ", ".join(row.part for row in self.rows if row.status is Status.DIFFERENT)
        return "ok: equal to the bit" if self.exact else "ok: within rounding"

    def _graphs(self) -> list[tuple[str, ...]]:
        rows = [("graphs", f"{self.graphs} captured in {self.capture_seconds:.2f} s")]
        rows += [("", reason) for reason in self.recompiles[:_SHOWN]]
        if len(self.recompiles) > _SHOWN:
            rows.append(("", f"and {len(self.recompiles) - _SHOWN} more"))
        if self.lowering is not None:
            inside = sum(region.operators for region in self.lowering.regions)
            outside = len(self.lowering.outside)
            rows.append(("regions", f"{len(self.lowering.regions)} with {inside} operators, {outside} nodes outside"))
            reasons = Counter(reason for _, _, reason in self.lowering.outside)
            rows += [("", f"{count} outside: {reason}") for reason, count in reasons.most_common(_SHOWN)]
        return list[tuple[str, ...]](rows)

    def _costs(self) -> list[tuple[str, ...]]:
        if self.eager is None or self.compiled is None:
            return []
        times = f"eager {_seconds(self.eager.seconds)}, compiled {_seconds(self.compiled.seconds)} a call"
        peaks = f"eager {_bytes(self.eager.peak_bytes)}, compiled {_bytes(self.compiled.peak_bytes)} a call"
        return [("time", times), ("peak memory", peaks)]

    def _notes(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        if self.reference and self.numerics != "exact":
            rows.append(("float64", f"no reference: {self.reference}"))
        for i, (path, kind) in enumerate(list(self.shared.items())[:_SHOWN]):
            rows.append(("shared" if i == 0 else "", f"{path} ({kind})"))
        if len(self.shared) > _SHOWN:
            rows.append(("", f"and {len(self.shared) - _SHOWN} more"))
        return rows


def error_of(report: CheckReport) -> CheckError:
    """The error that carries a report."""
    found = report.first_difference
    different = [row for row in report.rows if row.status is Status.DIFFERENT]
    worst = different[0].worst
    assert worst is not None
    names = ", ".join(row.part for row in different)
    error = CheckError(
        f"the compiled step differs from eager in {names}. {worst.path}: {worst.text}.",
        fix="print(error.report) shows all of it; ws.debug.bisect(step, args) makes a small script of it.",
        node="" if found is None else found.text or found.node,
        location=None if found is None else found.location,
    )
    error.report = report
    return error


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _bytes(count: int | None) -> str:
    if count is None:
        return "unknown"
    return next((f"{count / size:.1f} {unit}" for size, unit in _UNITS if count >= size), f"{count} B")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_TIMES = 2


@dataclass(frozen=True)
class CallCost:
    """Seconds of the fastest call, and the most bytes of one above what was there before it."""

    seconds: float = 0.0
    peak_bytes: int | None = None


def cost_of(run: Callable[[], Any], device: torch.device) -> CallCost:
    """Run a call a few times. The caller restores the state."""
    seconds = min(_timed(run, device) for _ in range(_TIMES))
    _, peak = bytes_at_most(run, device)
    return CallCost(seconds, peak)


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
