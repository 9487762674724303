"""The result of a check: a frozen record that prints as a table, with time and peak memory of both sides.

Where in the graph and in the user's code a difference comes from.

`ws.debug.bisect` checks capture, passes, lowering and guards. Where it finds nothing (the graph is right, the use of
its outputs is not), the signature says which node computes the value that differs.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.debug.bisect import Found, bisect
from wholestep.debug.check.findings import Finding, Status
from wholestep.debug.check.reachable import Part
from wholestep.debug.compare import compare_versions
from wholestep.debug.step_versions import Version, captured_call, with_passes
from wholestep.errors import CheckError, Location
from wholestep.ir.meta import nearest_location
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.lower.report import Lowering
from wholestep.passes.engine.contract import Numerics
from wholestep.remat.measure import bytes_at_most

_SECONDS = 120.0


@dataclass(frozen=True)
class FirstDifference:
    """The first node that differs, and the stage of the step that makes it differ."""

    stage: str
    """capture, pass, lowering or guard; "run" where the graph is right, and the use of its outputs is not."""
    what: str
    node: str = ""
    text: str = ""
    """The node as Python."""
    location: Location | None = None
    """The user's line."""
    pass_name: str = ""
    region: str = ""

    def __str__(self) -> str:
        part = {"pass": f"pass {self.pass_name}", "lowering": f"lowering, {self.region or 'no region'}"}
        lines = [f"{part.get(self.stage, self.stage)}: {self.what}"]
        lines += [f"  node  {self.text or self.node}"] if self.node else []
        lines += [f"  at    {self.location}"] if self.location is not None else []
        if self.location is not None and self.location.text:
            lines.append(f"            {self.location.text}")
        return "\n".join(lines)


def locate(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], finding: Finding) -> FirstDifference:
    """Find the stage that makes a value differ. The state is that before the call."""
    graph: StepGraph | None = step.last
    if graph is None:  # a mode around the call makes the compiled step run in eager
        return FirstDifference("eager", f"two runs in eager differ. {finding.path}: {finding.text}")
    with tempfile.TemporaryDirectory(prefix="wholestep-check-") as folder:
        try:
            found = bisect(step, args, kwargs, folder=folder, timeout=_SECONDS, minimise=False, quiet=True)
            if found.stage == "guard" and not found.node:
                found = _stale_node(step, args, kwargs) or found
        except Exception as error:  # the difference is known; the search for its node must not hide it
            found = Found("nothing", what=f"the search for the node raised {type(error).__name__}: {error}")
    if found:
        node = _node(graph.gm.graph, found.node)
        where = nearest_location(node) or nearest_location(_maker(graph, finding.path))
        text = found.text or (format_node(node) if node is not None else "")
        return FirstDifference(found.stage, found.what, found.node, text, where, found.pass_name, found.region)
    node = _maker(graph, finding.path)
    text = "" if node is None else format_node(node)
    what = f"{finding.path}: {finding.text}" + (f" ({found.what})" if found.what else "")
    return FirstDifference("run", what, "" if node is None else node.name, text, nearest_location(node))


def _stale_node(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    """The first node of the graph that ran that differs from a graph captured for this call."""
    entry = step._last
    inputs = entry.gather.read(leaves_of((args, kwargs))[0])
    if inputs is None:
        return None
    call = captured_call(step._fn, args, kwargs, step.options)
    fresh = with_passes(call.step_graph, step.options.passes, 0)
    versions = Version("new", fresh.gm, call.inputs), Version("kept", entry.step_graph.gm, tuple(inputs))
    first = compare_versions(*versions, "reassociates").first
    if first is None:
        return None
    what = f"a graph of an earlier call ran, whose guards hold and which is wrong for this one: {first.gap}"
    return Found("guard", what=what, node=first.node, text=first.text)


def _node(graph: fx.Graph, name: str) -> fx.Node | None:
    return next((node for node in graph.nodes if node.name == name), None)


def _maker(graph: StepGraph, path: str) -> fx.Node | None:
    """The node whose value is written to a path, or the input at that path."""
    signature = graph.signature
    path = path.removesuffix(".requires_grad")
    by_path = {signature.input(write.target).path: write.value for write in signature.write_backs}
    if path in by_path:
        return _node(graph.gm.graph, by_path[path])
    outputs: Any = graph.gm.graph.output_node().args[0]
    for change in signature.state_changes:
        if change.path == path and change.output is not None:
            return _as_node(outputs[change.output])
    for i, spec in enumerate(signature.outputs):
        if spec.path == path or f"result{spec.path}" == path:
            return _as_node(outputs[i])
    return next((_node(graph.gm.graph, spec.name) for spec in signature.inputs if spec.path == path), None)


def _as_node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


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
