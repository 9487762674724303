"""The result of a check: what is equal, what differs by rounding, what is different, and where a difference comes from.

Two observations of the state are compared:

    observe(roots, result, copy=True)      values by path, to be compared after the state has changed
    observe(roots, result, copy=False)     to be compared now

`within rounding` is decided for one call from one state, so that errors of earlier calls do not count. A difference is
rounding if it is

- a few rounding errors of the coarsest dtype that the graph computes in, relative to the largest element, and a
  multiple of what eager itself changes when its inputs move by one rounding error (`debug/value_distance.py`); or
- no farther from a float64 run of the same call than a small multiple of eager's own distance (`check_calls.py`).

Where the contract is exact (`lower="eager"`, passes that promise the same bits) every difference counts.

`CheckReport` is a frozen record that prints as a table, with time and peak memory of both sides.

Where in the graph and in the user's code a difference comes from: `ws.debug.bisect` checks capture, passes, lowering
and guards. Where it finds nothing (the graph is right, the use of its outputs is not), the signature says which node
computes the value that differs.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from wholestep.debug.bisect import Found, bisect
from wholestep.debug.compare import compare_versions
from wholestep.debug.step_versions import Version, captured_call, with_passes
from wholestep.debug.value_distance import Gap, gap_between
from wholestep.errors import CheckError, Location
from wholestep.ir.meta import nearest_location
from wholestep.ir.readable import format_node, html_in_notebooks
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.tensor_copies import copy_tensor
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.ir.user_objects.object_contents import random_state_of
from wholestep.ir.user_objects.plain_contents import same_plain
from wholestep.ir.user_objects.reachable import Part, reach
from wholestep.ir.user_objects.slots import ABSENT
from wholestep.ir.user_objects.snapshot import Roots, can_be_saved, process_values
from wholestep.lower.report import Lowering
from wholestep.passes.engine.contract import Numerics
from wholestep.remat.measure import bytes_at_most

_AS_CLOSE = 4.0
"""How many times eager's own distance from float64 the compiled step may have."""
_EXPLAINED = 16.0
"""How far eager may be from float64, in multiples of what rounding moves it by, to be the same computation."""


class Status(IntEnum):
    """From best to worst."""

    EQUAL = 0
    ROUNDING = 1
    DIFFERENT = 2

    def __str__(self) -> str:
        return ("equal to the bit", "within rounding", "DIFFERENT")[self.value]


@dataclass(frozen=True)
class Finding:
    """One value that is not equal to the bit."""

    part: Part
    path: str
    status: Status
    text: str
    ulps: int | None = None
    relative: float = 0.0
    """The largest difference, relative to the largest element."""
    distance: float | None = None
    """How far the compiled value is from float64, in multiples of eager's own distance; None without a reference."""


@dataclass(frozen=True)
class Tolerance:
    """What counts as a rounding difference."""

    numerics: Numerics
    eps: float = 0.0
    """The rounding error of the coarsest dtype that the graph computes in."""
    noise: Observation | None = None
    """Eager again, from inputs that were moved by one rounding error."""
    reference: Observation | None = None
    """Eager again, in float64."""


def findings(eager: Observation, compiled: Observation, tolerance: Tolerance) -> list[Finding]:
    """Every value that is not equal to the bit, in the order in which eager's were seen."""
    found = []
    for path in [*eager.values, *(path for path in compiled.values if path not in eager.values)]:
        part = (eager.values.get(path) or compiled.values[path])[0]
        finding = _finding(part, path, eager.at(path), compiled.at(path), tolerance)
        if finding is not None:
            found.append(finding)
    return found


def counts(observation: Observation) -> dict[Part, int]:
    """How many values of each part were compared."""
    found: dict[Part, int] = {}
    for part, _ in observation.values.values():
        found[part] = found.get(part, 0) + 1
    return found


def _finding(part: Part, path: str, a: Any, b: Any, tolerance: Tolerance) -> Finding | None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return None if same_bits(a, b) else _of_tensors(part, path, a, b.to(a.device), tolerance)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return None if same else Finding(part, path, Status.DIFFERENT, "the arrays differ")
    if same_plain(a, b) or (isinstance(a, tuple | frozenset) and type(a) is type(b) and _same_items(a, b)):
        return None
    exact = tolerance.numerics == "exact" or part is Part.RNG
    both = isinstance(a, float) and isinstance(b, float) and not exact
    if both and gap_between(a, b, _at(tolerance.noise, path), "reassociates", tolerance.eps) is None:
        relative = abs(a - b) / max(abs(a), 1e-300)
        return Finding(part, path, Status.ROUNDING, f"eager {a!r}, compiled {b!r}", relative=relative)
    return Finding(part, path, Status.DIFFERENT, f"eager has {_short(a)}, compiled {_short(b)}")


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, frozenset):
        return bool(a == b)
    return len(a) == len(b) and all(
        same_plain(x, y) or (isinstance(x, tuple) and isinstance(y, tuple) and _same_items(x, y))
        for x, y in zip(a, b, strict=True)
    )


def _of_tensors(part: Part, path: str, a: Tensor, b: Tensor, tolerance: Tolerance) -> Finding:
    gap = gap_between(a, b, None, "exact")
    if gap is None:
        gap = Gap("sign", text="zeros of another sign")
    relative = _relative(a, gap)
    exact = tolerance.numerics == "exact" or part is Part.RNG or a.shape != b.shape or a.dtype != b.dtype
    if exact:
        return Finding(part, path, Status.DIFFERENT, str(gap), gap.ulps, relative)
    distance = _distance(a, b, path, tolerance)
    allowed = gap_between(a, b, _at(tolerance.noise, path), "reassociates", tolerance.eps) is None
    close = distance is not None and distance <= _AS_CLOSE
    status = Status.ROUNDING if allowed or close else Status.DIFFERENT
    return Finding(part, path, status, str(gap), gap.ulps, relative, distance)


def _at(observation: Observation | None, path: str) -> Any:
    return None if observation is None else observation.at(path)


def _relative(a: Tensor, gap: Gap) -> float:
    if gap.kind != "value" or not (a.is_floating_point() or a.is_complex()):
        return 0.0
    finite = a.abs()[a.abs().isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    return gap.largest / largest if largest else float(gap.largest > 0)


def _distance(a: Tensor, b: Tensor, path: str, tolerance: Tolerance) -> float | None:
    """How far the compiled value is from float64, in multiples of eager's own distance.

    None where eager itself is farther from float64 than rounding explains: that run computed something else.
    """
    wide, noisy = _at(tolerance.reference, path), _at(tolerance.noise, path)
    if not isinstance(wide, Tensor) or wide.shape != a.shape or not wide.is_floating_point():
        return None
    if not bool(a.isfinite().all() and b.isfinite().all() and wide.isfinite().all()):
        return None
    mine, theirs = (float((each.double() - wide.to(each.device)).abs().max()) for each in (a, b))
    largest = float(wide.abs().max())
    noise = float((a.double() - noisy.double()).abs().max()) if _is_like(noisy, a) else 0.0
    eps = max(tolerance.eps, torch.finfo(a.dtype).eps)
    if mine > _EXPLAINED * (noise + eps * largest):
        return None
    return theirs / max(mine, torch.finfo(a.dtype).eps * largest / 2, 1e-300)


def _is_like(value: Any, a: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == a.shape and bool(value.isfinite().all())


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')}{list(value.shape)} tensor"
    text = "nothing" if value is ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def worst_of(found: Mapping[Part, list[Finding]], part: Part) -> Finding | None:
    """The worst finding of a part: by status, then by how far it is off."""
    return max(found.get(part, []), key=lambda each: (each.status, each.relative), default=None)


@dataclass(frozen=True)
class Observation:
    """Values by path. Tensors with several paths are under the first, which is the same in every observation."""

    values: dict[str, tuple[Part, Any]]
    aliases: dict[str, str] = field(default_factory=dict)
    """Further paths of tensors to the first one."""
    error: BaseException | None = None
    """What the call raised."""

    def at(self, path: str) -> Any:
        """The value that a path leads to, by whichever path it was seen first; `ABSENT` where there is none."""
        return self.values.get(self.aliases.get(path, path), (None, ABSENT))[1]


def observe(roots: Roots, result: Any, *, copy: bool) -> Observation:
    """Everything reachable, and what the call returned. Generators count by their state."""
    values: dict[str, tuple[Part, Any]] = {}
    aliases: dict[str, str] = {}
    for where in ([("result", result)], roots):
        found = reach(where, Part.RESULT if where is not roots else None)
        aliases.update(found.aliases)
        for path, known in found.values.items():
            values.setdefault(path, known)
        for seen in found.tensors:
            if seen.observed:
                values.setdefault(seen.path, (seen.part, _frozen(seen.obj, copy)))
        for seen in found.holders:
            if seen.observed and seen.part is Part.RNG:
                values.setdefault(seen.path, (Part.RNG, _random_state(seen.obj)))
    return Observation({**values, **process_values()}, aliases)


def _random_state(generator: Any) -> Any:
    state = random_state_of(generator)
    return repr(state) if isinstance(state, dict) else state


def _frozen(tensor: Tensor, copy: bool) -> Any:
    if not can_be_saved(tensor):
        return f"<{type(tensor).__name__} of {list(tensor.shape)}>"
    found = tensor.detach()
    if not copy:
        return found
    return copy_tensor(found) if found.device.type == "cpu" else found.to("cpu", copy=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if equal to the bit: the sign of zero counts, all NaNs are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg().to(a.device)
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if torch.equal(a, b):
        zeros = a == 0
        return torch.equal(torch.signbit(a[zeros]), torch.signbit(b[zeros]))
    same = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((same | (a.isnan() & b.isnan())).all())


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
        where = None if self.location is None else self.location.users_first
        for word, place in (("at", where), ("in", where and where.inside)):
            if place is not None:
                lines.append(f"  {word}    {place}")
                lines += [f"            {place.text}"] if place.text else []
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

    _repr_html_ = html_in_notebooks

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
