"""What a compiled step shows of itself: text, a page, memory over time, and the times of real calls.

`ShownStep` has these methods of `CompiledStep`. Leaf packages that draw and print come with first use.

`step.profile(*args, steps=5)` measures real calls, node by node, and restores all state:

    save the state             parameters, gradients, optimizer state, RNG, Python (`ir/user_objects/snapshot.py`)
    run until no graph is new  lazily created state has a graph of its own, and caches are warm
    run `steps` times          the step as it is
    run `steps` times          on the CPU, its graph with a clock behind every node; on CUDA, with a range of the
                               profiler around each, to which kernels belong by their correlation number
    restore the state          whatever happens

On CUDA the graph runs without its CUDA graph for that: the kernels are the same, and their launches are then known to
belong to nodes. What the step prints or logs is printed in every run.
"""

from __future__ import annotations

import contextvars
import functools
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from wholestep.capture.objects.discover import find_models
from wholestep.cross_iteration.executor import CrossingExecutor
from wholestep.errors import GraphFormatError, OptionError, UnsupportedError, invalid_value
from wholestep.ir.collectives import collective_of
from wholestep.ir.effects import is_collective, is_wait, main_device
from wholestep.ir.groups import group_of
from wholestep.ir.meta import location_of_node, module_path, phase
from wholestep.ir.readable import html_in_notebooks
from wholestep.ir.user_objects.reachable import roots_of
from wholestep.ir.user_objects.snapshot import Snapshot
from wholestep.lower.report import RegionReport, target_text
from wholestep.runtime.python_program import annotated_program, timed_nodes, timed_program
from wholestep.simulate.machine import Machine
from wholestep.simulate.measured_step import MeasuredRow, MeasuredStep, kernel_spans
from wholestep.simulate.profile import collective_times, profile_of
from wholestep.step import Executable, ResolvedOptions
from wholestep.torch_private.aot import trace_log_is_written, write_artefact

if TYPE_CHECKING:
    from wholestep.inspect.memory_over_time import StepMemoryTimeline

_MOST_WARMUPS = 6
_MOST_RECOMPILES = 5
_OUTSIDE = "(outside of nodes)"


class ShownStep:
    """A base class of `CompiledStep`, which has these attributes."""

    options: ResolvedOptions
    recompiles: list[Any]
    capture_seconds: float
    _calls: int
    _fn: Callable[..., Any]
    _last: Executable | None
    _entries: list[Executable]

    _repr_html_ = html_in_notebooks

    @property
    def _name(self) -> str:  # the same in every process: no address of an object
        fn: Any = self._fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        return self.options.name or getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def explain(self, machine: Machine | None = None) -> str:
        """What runs, as text: why there are several graphs, which passes ran, what was compiled, the memory, and which
        communication is not hidden and why, as simulated on `machine` (by default that of the graph's device)."""
        if self._last is None:
            return f"{self._name}: nothing was captured yet"
        head, *recompiles = self._graphs()
        captured = f"{head} for {self._calls} calls, captured in {self.capture_seconds:.2f} s"
        hidden = len(recompiles) - _MOST_RECOMPILES
        recompiles = [*([f"  {hidden} earlier recompiles"] if hidden > 0 else []), *recompiles[-_MOST_RECOMPILES:]]
        return "\n".join([captured, *recompiles, _explained(self._last, machine)])

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write an HTML page about the graph that ran last; `options` are those of `ws.inspect.report`."""
        from wholestep.inspect import report

        return report(self, path, **options)

    def memory_timeline(self) -> StepMemoryTimeline:
        """What is in memory over the course of the graph that ran last, by kind; no memory budget is needed."""
        from wholestep.inspect import memory_timeline

        return memory_timeline(self)

    def profile(self, *args: Any, steps: int = 5, **kwargs: Any) -> MeasuredStep:
        """Measure `steps` real calls, node by node; all state is restored. `ws.simulate.calibrate` takes the result."""
        return profile_step(self, self._fn, args, kwargs, steps)

    def _write_artefacts(self, entry: Executable) -> None:
        """With `TORCH_TRACE=folder`: the graph that was just compiled, as tlparse shows it."""
        if not trace_log_is_written():
            return
        frame, number = zlib.crc32(self._name.encode()) % 10_000, len(self._entries) - 1
        graph = entry.step_graph
        found = {"graph": graph.print_readable(print_output=False), "explain": _explained(entry, None)}
        for what, text in found.items():
            write_artefact(frame, number, f"wholestep_{what}", text, "string")
        with suppress(GraphFormatError):  # a graph of operators that have no form in a file
            write_artefact(frame, number, "wholestep_step", graph.to_json(), "json")

    def _graphs(self) -> list[str]:
        count = "1 graph" if len(self._entries) == 1 else f"{len(self._entries)} graphs"
        return [f"{self._name}: {count}", *(f"  {recompile}" for recompile in self.recompiles)]

    def __str__(self) -> str:
        if self._last is None:
            return f"{self._name}: nothing was captured yet"
        return "\n".join([*self._graphs(), str(self._last.step_graph)])

    def __repr__(self) -> str:
        return f"CompiledStep({self._name}, {len(self._entries)} graphs)"


class _MeasuredRun(NamedTuple):
    """One run: when each node began and ended, and how long it took (of several kernels, without what is between)."""

    spans: dict[str, tuple[float, float]]
    us: dict[str, float]


def profile_step(
    step: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], steps: int
) -> MeasuredStep:
    """Measure calls of a compiled step. `fn`: its function."""
    if type(steps) is not int or steps < 1:
        raise invalid_value("steps", steps, "use a whole number, 1 or more.")
    step.flush()
    if step.options.parallel is not None:
        find_models(fn, args, kwargs, step.options).run()  # sharded as by a first call: that is not undone
    before = Snapshot(roots_of(fn, args, kwargs))
    if before.unsaved:
        path, kind = next(iter(before.unsaved.items()))
        raise UnsupportedError(
            f"{path} is a {kind}, whose contents cannot be saved and restored: a profile runs real steps.",
            fix="profile a copy of the model that need not stay as it is, in a process of its own.",
        )

    def run() -> None:
        contextvars.copy_context().run(step._run, fn, args, dict(kwargs))

    try:
        entry = _warm_up(step, run, before)
        device = main_device(entry.graph_module.graph)
        step_runs = [_timed(run, device) for _ in range(steps)]
        measure = _cuda_runs if device.type == "cuda" else _cpu_runs
        runs = measure(entry, run, steps)
    finally:
        step.flush()
        before.restore()
    return _result(entry, step._name, step.options.lower, device, step_runs, runs)


def _warm_up(step: Any, run: Callable[[], None], before: Snapshot) -> Executable:
    """Run until the same graph ran twice in a row."""
    last = None
    for _ in range(_MOST_WARMUPS):
        run()
        entry: Executable | None = step._last
        if entry is None:
            raise _no_graph()
        advanced = before.advanced_iterators()
        if advanced:
            raise OptionError(
                f"the step takes items from {', '.join(advanced)}, which cannot be rewound.",
                fix="take the items outside of the step, and pass them as arguments.",
            )
        if isinstance(entry.executor, CrossingExecutor):
            raise UnsupportedError(
                "updates of this step run in the next iteration, so one run of a graph is not one step.",
                fix="profile it without that pass: disable_passes=[...].",
            )
        if entry is last:
            return entry
        last = entry
    raise UnsupportedError(
        f"equal calls were captured again {_MOST_WARMUPS} times; the last reason: {step.recompiles[-1]}.",
        fix="step.recompiles says why; profile a step that comes to rest.",
    )


def _no_graph() -> UnsupportedError:
    return UnsupportedError(
        "the call ran in eager, not as a graph: there are no nodes to measure.",
        fix='on_refusal="raise" says why it was not captured; leave modes around the call that need eager.',
    )


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Microseconds of one call, with the device done before and after."""
    _finish(device)
    begin = time.perf_counter_ns()
    run()
    _finish(device)
    return (time.perf_counter_ns() - begin) / 1e3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_runs(entry: Executable, run: Callable[[], None], steps: int) -> list[_MeasuredRun]:
    """Each run, by a clock between nodes."""
    stamps: list[int] = []
    names = [node.name for node in timed_nodes(entry.graph_module)]
    found = []
    with entry.executor.running(timed_program(entry.graph_module, stamps)):
        for _ in range(steps + 1):  # the first one warms the new function
            stamps.clear()
            run()
            if len(stamps) != len(names) + 1:
                raise _no_graph()
            times = [(stamp - stamps[0]) / 1e3 for stamp in stamps]
            spans = dict(zip(names, pairwise(times), strict=True))
            found.append(_MeasuredRun(spans, {name: end - start for name, (start, end) in spans.items()}))
    return found[1:]


def _cuda_runs(entry: Executable, run: Callable[[], None], steps: int) -> list[_MeasuredRun]:
    """Each run, by the kernels that nodes launched."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    found = []
    with entry.executor.running(annotated_program(entry.graph_module)):
        run()
        for _ in range(steps):
            with torch.profiler.profile(activities=activities) as profiler:
                run()
                torch.cuda.synchronize()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")
                profiler.export_chrome_trace(str(path))
                kernels = kernel_spans(path.read_text(encoding="utf-8"))
            if not set(kernels) - {""}:
                raise _no_graph()
            first = min(start for spans in kernels.values() for start, _ in spans)
            spans = {
                name: (min(a for a, _ in each) - first, max(b for _, b in each) - first)
                for name, each in kernels.items()
            }
            found.append(_MeasuredRun(spans, {name: sum(b - a for a, b in each) for name, each in kernels.items()}))
    return found


def _result(
    entry: Executable,
    name: str,
    lower: str,
    device: torch.device,
    step_runs: Sequence[float],
    runs: Sequence[_MeasuredRun],
) -> MeasuredStep:
    regions = {} if entry.lowering is None else {region.name: region for region in entry.lowering.regions}
    nodes = timed_nodes(entry.graph_module)
    waits = {node: collective_of(node) for node in nodes if is_wait(node.target)}
    rows = []
    for node in nodes:
        if _is_element(node):
            continue  # of what a region returns: a node of this name is computed in the region
        times = [run.us[node.name] for run in runs if node.name in run.us]
        if times:
            rows.append(_row(node, times, regions))
    if any("" in run.us for run in runs):
        rows.append(MeasuredRow(_OUTSIDE, _OUTSIDE, tuple(run.us.get("", 0.0) for run in runs)))
    whole = [max(end for _, end in run.spans.values()) for run in runs]
    spans = runs[whole.index(statistics.median_low(whole))].spans
    spans = {row.name: spans[row.name] for row in rows if row.name in spans}
    known: dict[str, list[float]] = {}
    groups = {collective.name: group_of(collective) or "" for collective in waits.values()}
    for run in runs:
        ends = {c.name: run.spans[wait.name] for wait, c in waits.items() if {c.name, wait.name} <= set(run.spans)}
        for each, us in collective_times(groups, run.spans, ends).items():
            known.setdefault(each, []).append(us)
    for wait, collective in waits.items():
        if collective.name in spans and wait.name in spans:
            spans[collective.name] = spans[collective.name][0], spans[wait.name][1]
    hidden = {node.name for node in nodes if is_collective(node.target) or node in waits}
    graph = entry.step_graph
    of_graph = {node.name for node in graph.gm.graph.nodes}
    times_of = {row.name: row.runs for row in rows if row.name not in hidden and (row.nodes or row.name in of_graph)}
    profile = profile_of(
        graph,
        times_of,
        collectives={each: [times] for each, times in known.items() if times and each in of_graph},
        regions={row.name: [each for each in row.nodes if each in of_graph] for row in rows if row.nodes},
    )
    return MeasuredStep(
        profile.rows,
        str(device),
        name=name,
        lower=lower,
        step_runs=tuple(step_runs),
        timed_runs=tuple(whole),
        measured=tuple(rows),
        spans=spans,
    )


def _row(node: fx.Node, runs: Sequence[float], regions: dict[str, RegionReport]) -> MeasuredRow:
    line = location_of_node(node, user_only=True)
    where = "" if line is None else str(line)
    region = regions.get(str(node.target)) if node.op == "call_module" else None
    if region is not None:
        what = f"{region.name}: {region.operators} operators compiled"
        return MeasuredRow(node.name, what, tuple(runs), region.nodes, ", ".join(region.phases), "", where)
    what = target_text(node)
    return MeasuredRow(node.name, what, tuple(runs), (), phase(node), module_path(node), where, is_wait(node.target))


def _is_element(node: fx.Node) -> bool:
    return node.op == "call_function" and any(source.op == "call_module" for source in node.all_input_nodes[:1])


def _explained(entry: Executable, machine: Machine | None) -> str:
    """What runs, with the memory of a run, which updates in place."""
    from wholestep.inspect import memory_timeline

    memory = memory_timeline(entry.step_graph)
    return entry.explain(machine, memory.peak_line())
