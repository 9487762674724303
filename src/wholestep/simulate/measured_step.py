"""A step as it was measured: every node, compiled region and collective with its time (`step.profile(*args)`).

    measured = step.profile(batch, steps=5)
    print(measured)                                            tables: by operator or region, by phase, by module
    machine = ws.simulate.calibrate(ws.simulate.CPU, measured)
    ws.simulate.step(step.last).perfetto("step.json", measured=measured)

A `MeasuredStep` is a `StepProfile`, which is what calibration takes. A collective runs beside the nodes that follow it:
its span is from its start to the end of its wait. What it took is known only where the wait stood still for it, so only
then it counts for calibration; the wait's own time is that of standing still.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from wholestep.ir.readable import html_in_notebooks
from wholestep.simulate.profile import StepProfile

_MOST_ROWS = 15
_MILLI = 1e3
RANGE = "wholestep node "
"""The names of the profiler's ranges around nodes begin so."""


@dataclass(frozen=True)
class MeasuredRow:
    """One node or compiled region, and its microseconds in every run."""

    name: str
    what: str
    """The operator; of a region, what it computes."""
    runs: tuple[float, ...]
    nodes: tuple[str, ...] = ()
    """Of a region, the nodes of the graph that it computes."""
    phase: str = "forward"
    module_path: str = ""
    line: str = ""
    is_wait: bool = False

    @property
    def us(self) -> float:
        """The median of the runs."""
        return statistics.median(self.runs) if self.runs else 0.0


@dataclass(frozen=True)
class MeasuredStep(StepProfile):
    """A measured step. Times are microseconds."""

    name: str = ""
    lower: str = ""
    """"eager" or "inductor"."""
    step_runs: tuple[float, ...] = ()
    """Of each run of the step as it is, from its call to its return."""
    timed_runs: tuple[float, ...] = ()
    """Of each run of the graph with clocks in it."""
    measured: tuple[MeasuredRow, ...] = ()
    """In the order in which they ran."""
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Start and end of nodes and regions in one run, the median one."""

    _repr_html_ = html_in_notebooks

    @property
    def step_us(self) -> float:
        """The median time of a step."""
        return statistics.median(self.step_runs) if self.step_runs else 0.0

    @property
    def nodes_us(self) -> float:
        """The time of all nodes and regions together."""
        return sum(row.us for row in self.measured)

    def by(self, column: str) -> dict[str, tuple[float, int]]:
        """Microseconds and number of rows by "what", "phase", "module_path" or "line", longest first."""
        found: dict[str, tuple[float, int]] = {}
        for row in self.measured:
            key = getattr(row, column)
            us, count = found.get(key, (0.0, 0))
            found[key] = us + row.us, count + 1
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def as_data(self) -> dict[str, object]:
        """Everything as plain data, for JSON."""
        rows = [{**asdict(row), "us": row.us} for row in self.measured]
        return {"name": self.name, "device": self.device, "lower": self.lower, "step_us": self.step_us} | {
            "step_runs": self.step_runs,
            "nodes_us": self.nodes_us,
            "rows": rows,
            "spans": dict(self.spans),
        }

    def __str__(self) -> str:
        runs = [us / _MILLI for us in self.step_runs] or [0.0]
        waits = sum(row.us for row in self.measured if row.is_wait)
        head = (
            f"{self.name or 'step'} on {self.device}, lower={self.lower!r}: {len(self.step_runs)} steps, median "
            f"{self.step_us / _MILLI:.3f} ms ({min(runs):.3f} to {max(runs):.3f})"
        )
        parts = (
            f"  nodes {self.nodes_us / _MILLI:.3f} ms, of them standing still for communication {waits / _MILLI:.3f}"
        )
        lines = [head, parts]
        for column, title in (("what", "operator or region"), ("phase", "phase"), ("module_path", "module")):
            lines += self._table(column, title)
        return "\n".join(lines)

    def _table(self, column: str, title: str) -> list[str]:
        found = self.by(column)
        whole = self.nodes_us or 1.0
        lines = ["", f"{'ms':>10} {'share':>6} {'calls':>6}  {title}"]
        for key, (us, count) in list(found.items())[:_MOST_ROWS]:
            lines.append(f"{us / _MILLI:>10.3f} {us / whole:>6.1%} {count:>6}  {key or '(none)'}")
        rest = list(found.values())[_MOST_ROWS:]
        if rest:
            us, count = sum(each for each, _ in rest), sum(each for _, each in rest)
            lines.append(f"{us / _MILLI:>10.3f} {us / whole:>6.1%} {count:>6}  {len(rest)} others")
        return lines


def kernel_spans(trace: str) -> dict[str, list[tuple[float, float]]]:
    """Kernels by the range of the profiler that launched them: start and end in microseconds.

    `trace`: the text of `torch.profiler.profile.export_chrome_trace`. A kernel has the correlation number of the call
    of CUDA's runtime that launched it; the node is the innermost of our ranges around that call, on its thread.
    """
    events = [event for event in json.loads(trace)["traceEvents"] if event.get("ph") == "X"]
    ranges: dict[object, list[tuple[float, float, str]]] = {}
    launches: dict[object, tuple[object, float]] = {}
    for event in events:
        kind = event.get("cat", "")
        if kind == "user_annotation" and event["name"].startswith(RANGE):
            at = (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(RANGE))
            ranges.setdefault(event["tid"], []).append(at)
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[event.get("args", {}).get("correlation")] = event["tid"], event["ts"]
    for each in ranges.values():
        each.sort()
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launches.get(event.get("args", {}).get("correlation"))
        name = _range_at(ranges.get(launch[0], []), launch[1]) if launch is not None else ""
        found.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def _range_at(ranges: list[tuple[float, float, str]], when: float) -> str:
    """The range that a moment is in; ranges of nodes do not overlap."""
    i = bisect_right(ranges, (when, float("inf"), "")) - 1
    return ranges[i][2] if i >= 0 and when <= ranges[i][1] else ""
