"""Everything that a page shows, as plain data: lists, numbers and texts that JSON can hold.

    ReportSource        what is known of a step: its graph, and of a compiled step also captures, options and regions
    collect(source)     {"summary": .., "nodes": .., "memory": .., "passes": .., "exposed": .., "advice": ..}

Nothing runs: times are those of the simulation (`simulate.step`), beside measured ones where a profile is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from wholestep.errors import OptionError, called
from wholestep.inspect.report_page.advice import Facts, advice
from wholestep.inspect.report_page.memory_columns import SAVED, StepMemory, step_memory
from wholestep.inspect.report_page.node_columns import nanoseconds, node_columns, node_line
from wholestep.ir.io.node_values import size_hint
from wholestep.ir.meta import module_path, phase
from wholestep.ir.signature import InputKind, InputSpec, Signature
from wholestep.ir.step_graph import StepGraph
from wholestep.passes.engine.contract import applied_passes
from wholestep.passes.engine.record import pass_records
from wholestep.simulate import step as simulate_step
from wholestep.simulate.cost_model import NodeWork, node_works
from wholestep.simulate.machine import GroupSpread, Machine
from wholestep.simulate.step_index import COMPUTE, ISSUE, plain
from wholestep.simulate.step_timeline import StepTimeline, machine_for

Measured = Mapping[str, tuple[float, float]]
"""Start and end in microseconds of nodes and compiled regions, by name, as a profiler saw them."""
_MOST_INPUTS = 12
_MOST_REASONS = 12


@runtime_checkable
class _Step(Protocol):
    """What the page reads of a `CompiledStep`, which this package does not import."""

    @property
    def last(self) -> StepGraph | None: ...
    @property
    def graphs(self) -> list[StepGraph]: ...
    @property
    def lowering(self) -> Any: ...

    recompiles: list[Any]
    options: Any
    capture_seconds: float


@dataclass(frozen=True)
class ReportSource:
    """What a page is made from."""

    graph: StepGraph | fx.GraphModule
    title: str
    graphs: tuple[StepGraph, ...] = ()
    """All graphs that were captured."""
    recompiles: tuple[str, ...] = ()
    """Why each capture after the first happened."""
    capture_seconds: float = 0.0
    lowering: Any = None
    """Which nodes are in compiled regions (`lower.report.Lowering`); None if none are."""
    lower: str = ""
    """How the step runs: `inductor`, `eager` or `debug`; "" for a graph that is not of a compiled step."""
    measured: Measured = field(default_factory=dict)
    measured_regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The nodes of each region that was measured."""
    measured_us: float | None = None
    """The time of a whole step as measured."""

    @classmethod
    def of(cls, given: Any, title: str = "", profile: Any = None) -> ReportSource:
        """From a CompiledStep that has run, a StepGraph, an Executable or a graph module."""
        measured, step_us = _measured(profile)
        rows = getattr(profile, "measured", ())
        found: dict[str, Any] = {
            "measured": measured,
            "measured_us": step_us,
            "measured_regions": {row.name: row.nodes for row in rows if row.nodes},
        }
        if isinstance(given, StepGraph | fx.GraphModule):
            return cls(given, title or type(given).__name__, **found)
        if isinstance(given, _Step):
            if given.last is None:
                raise OptionError(
                    f"{title or 'the step'} has captured nothing yet, so there is nothing to report.",
                    fix="call it once before, or give what step.capture(*args) returns.",
                )
            return cls(
                given.last,
                title or getattr(given, "__name__", "step"),
                tuple(given.graphs),
                tuple(map(str, given.recompiles)),
                given.capture_seconds,
                given.lowering,
                given.options.lower,
                **found,
            )
        graph = getattr(given, "step_graph", None)
        if not isinstance(graph, StepGraph):
            raise OptionError(
                f"{called(given)} cannot be reported.",
                fix="give a step of ws.compile, a StepGraph, an Executable or a graph module.",
            )
        return cls(graph, title or "step", lowering=getattr(given, "lowering", None), **found)


def _measured(profile: Any) -> tuple[Measured, float | None]:
    """Times of nodes from what `step.profile` returned, or from a mapping of names to start and end."""
    if profile is None:
        return {}, None
    if isinstance(profile, Mapping):
        end = max((end for _, end in profile.values()), default=None)
        begin = min((begin for begin, _ in profile.values()), default=0.0)
        return profile, None if end is None else end - begin
    spans = getattr(profile, "spans", None)
    if spans is None:
        raise OptionError(
            f"profile= is a {type(profile).__name__}, which has no spans.",
            fix="give what step.profile(*args) returns, or {node name: (start, end)} in microseconds.",
        )
    measured = dict(spans) if isinstance(spans, Mapping) else {each.name: (each.start, each.end) for each in spans}
    step_us = getattr(profile, "step_us", None)
    return measured, _measured(measured)[1] if step_us is None else float(step_us)


def collect(
    source: ReportSource,
    *,
    machine: Machine | None = None,
    groups: Mapping[str, GroupSpread] | None = None,
    with_source: bool = True,
) -> dict[str, Any]:
    """The data of a page. `with_source`: whether it holds the text of the files that nodes come from."""
    given = source.graph
    machine = machine or machine_for(given.gm.graph if isinstance(given, StepGraph) else given.graph)
    budget = given.memory.budget if isinstance(given, StepGraph) and given.memory is not None else None
    timeline = simulate_step(given, machine=machine, groups=groups, peak_bytes=budget)
    works = node_works(timeline.index, machine, groups)
    memory = step_memory(given)
    flops = [0.0 if work is None else work.flops for work in works]
    moved = [0 if work is None else work.moved for work in works]
    number = {node.name: i for i, node in enumerate(timeline.index.nodes)}
    module = given.gm if isinstance(given, StepGraph) else given
    facts = _facts(source, timeline, memory, applied_passes(module))
    return {
        "title": source.title,
        "versions": {"wholestep": _version(), "torch": torch.__version__},
        "summary": _summary(source, timeline, memory, works),
        "advice": [asdict(each) for each in advice(facts)],
        "nodes": node_columns(timeline, flops, moved, with_source=with_source),
        "groups": [_group(timeline, i) for i in range(len(timeline.index.groups))],
        "exposed": _exposed(timeline),
        "critical": [number[span.name] for span in timeline.critical_path],
        "memory": memory.columns(number),
        "measured": _measured_columns(source, number),
        "regions": _regions(source.lowering, number),
        "outside": _outside(source.lowering, number),
        "passes": [asdict(record) for record in pass_records(module)],
    }


def _version() -> str:
    import wholestep

    return wholestep.__version__


def _summary(
    source: ReportSource, timeline: StepTimeline, memory: StepMemory, works: Sequence[NodeWork | None]
) -> dict[str, Any]:
    given, index = source.graph, timeline.index
    signature = given.signature if isinstance(given, StepGraph) else Signature()
    report = given.memory if isinstance(given, StepGraph) else None
    lowering = source.lowering
    bounds = timeline.bounds
    collectives = Counter(plain(index.nodes[i].target) for i in index.collectives)
    return {
        "lower": source.lower,
        "machine": timeline.machine,
        "nodes": len(index),
        "operators": sum(kind == COMPUTE for kind in index.kind),
        "regions": None if lowering is None else len(lowering.regions),
        "in_regions": None if lowering is None else sum(region.operators for region in lowering.regions),
        "flops": sum(work.flops for work in works if work is not None),
        "moved": sum(work.moved for i, work in enumerate(works) if work is not None and index.kind[i] != ISSUE),
        "sent": sum(work.moved for i, work in enumerate(works) if work is not None and index.kind[i] == ISSUE),
        "collectives": [
            {"op": op, "count": count, "us": _us_of(timeline, op)} for op, count in collectives.most_common()
        ],
        "step_us": timeline.step_us,
        "compute_us": timeline.compute_us,
        "exposed_us": timeline.exposed_us,
        "host_us": timeline.replay.dispatch,
        "bounds": {"computation": bounds.compute, "longest chain": bounds.chain}
        | {f"group {name}": us for name, us in bounds.links.items()},
        "measured_us": source.measured_us,
        "peak": memory.peak,
        "peak_by_kind": memory.by_kind_at(memory.peak_place),
        "input_bytes": memory.input_bytes,
        "budget": None
        if report is None
        else {
            "budget": report.budget,
            "planned": report.planned_peak,
            "measured": report.measured_peak,
            "without": report.peak_without,
            "recomputed": len(report.recomputed),
        },
        "inputs": _inputs(signature),
        "largest_batch": _largest_batch(signature),
        "batch": [_input(spec) for spec in signature.of_kind(InputKind.BATCH)][:_MOST_INPUTS],
        "graphs": [{"nodes": graph.num_nodes, "last": graph is given} for graph in source.graphs],
        "recompiles": list(source.recompiles),
        "capture_seconds": source.capture_seconds,
        "guards": list(signature.guards),
        "host_calls": list(signature.host_calls),
        "passes": list(applied_passes(given.gm if isinstance(given, StepGraph) else given)),
        "outside": _reasons(lowering),
    }


def _us_of(timeline: StepTimeline, op: str) -> float:
    index, replay = timeline.index, timeline.replay
    return sum(replay.end[i] - replay.start[i] for i in index.collectives if plain(index.nodes[i].target) == op)


def _inputs(signature: Signature) -> list[dict[str, Any]]:
    """Of each kind of input, how many tensors, elements and bytes there are on this rank."""
    found: dict[str, list[int]] = {}
    for spec in signature.inputs:
        row = found.setdefault(str(spec.kind), [0, 0, 0])
        row[0] += 1
        if spec.tensor is not None:
            count = prod(size if isinstance(size, int) else 1 for size in spec.tensor.shape)
            row[1] += count
            row[2] += count * _itemsize(spec.tensor.dtype)
    return [{"kind": kind, "tensors": row[0], "elements": row[1], "bytes": row[2]} for kind, row in found.items()]


def _largest_batch(signature: Signature) -> dict[str, Any] | None:
    """Rows of the largest batch tensor, and its tokens if it holds integers in rows; None without known sizes."""
    tensors = [spec.tensor for spec in signature.of_kind(InputKind.BATCH) if spec.tensor is not None]
    known = [each for each in tensors if each.shape and all(isinstance(size, int) for size in each.shape)]
    if not known:
        return None
    ids = [each for each in known if len(each.shape) == 2 and each.dtype.removeprefix("torch.").startswith("int")]
    largest = max(ids or known, key=lambda each: prod(map(int, each.shape)))
    return {"rows": largest.shape[0], "tokens": prod(map(int, largest.shape)) if ids else None}


def _itemsize(name: str) -> int:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 0


def _input(spec: InputSpec) -> str:
    shape = "" if spec.tensor is None else f"{spec.tensor.dtype}[{', '.join(map(str, spec.tensor.shape))}]"
    return f"{spec.path}: {shape}" if shape else spec.path


def _group(timeline: StepTimeline, number: int) -> dict[str, Any]:
    name = timeline.index.groups[number]
    return {"name": name, "ranks": timeline.index.group_ranks[number], "us": timeline.collective_us[name]}


def _exposed(timeline: StepTimeline) -> list[dict[str, Any]]:
    """The collectives that are not hidden, each with its reason, and where computation stands still for them."""
    index, replay = timeline.index, timeline.replay
    found = []
    for each in timeline.exposed():
        stalls = [w for w in index.waits.get(each.node, []) if replay.end[w] - replay.start[w] > 0]
        found.append(
            {
                "node": each.node,
                "us": each.exposed_us,
                "reason": each.reason,
                "text": each.text(index),
                "nodes": list(each.nodes),
                "stalls": [nanoseconds((replay.start[w], replay.end[w])) for w in stalls],
            }
        )
    return found


def _measured_columns(source: ReportSource, number: Mapping[str, int]) -> dict[str, list[Any]]:
    """Measured spans, each with its nodes: a compiled region has several, and is shown at the first of them."""
    found = []
    for name, (start, end) in source.measured.items():
        nodes = [number[each] for each in source.measured_regions.get(name, (name,)) if each in number]
        if nodes:
            found.append((nodes, "" if nodes == [number.get(name)] else name, start, end))
    first = min((start for _, _, start, _ in found), default=0.0)
    return {
        "nodes": [nodes for nodes, _, _, _ in found],
        "region": [region for _, region, _, _ in found],
        "start": nanoseconds(start - first for _, _, start, _ in found),
        "end": nanoseconds(end - first for _, _, _, end in found),
    }


def _regions(lowering: Any, number: Mapping[str, int]) -> list[dict[str, Any]]:
    """The compiled regions, each with the nodes that it computes."""
    regions = () if lowering is None else lowering.regions
    found = [(each, [number[name] for name in each.nodes if name in number]) for each in regions]
    return [{"name": each.name, "operators": each.operators, "nodes": nodes} for each, nodes in found]


def _outside(lowering: Any, number: Mapping[str, int]) -> dict[str, Any]:
    """Why nodes are in no compiled region: node to the number of the reason."""
    if lowering is None:
        return {"reasons": [], "node": [], "reason": []}
    known = [(number[name], reason) for name, _, reason in lowering.outside if name in number]
    reasons = list(dict.fromkeys(reason for _, reason in known))
    return {
        "reasons": reasons,
        "node": [i for i, _ in known],
        "reason": [reasons.index(reason) for _, reason in known],
    }


def _reasons(lowering: Any) -> list[dict[str, Any]]:
    if lowering is None:
        return []
    counts = Counter(reason for _, _, reason in lowering.outside)
    example = {reason: name for name, _, reason in reversed(lowering.outside)}
    return [
        {"reason": reason, "count": count, "example": example[reason]}
        for reason, count in counts.most_common(_MOST_REASONS)
    ]


def _time_outside(lowering: Any, timeline: StepTimeline) -> tuple[tuple[str, float], ...]:
    """The predicted time of what is in no region, by reason, most first."""
    index, replay = timeline.index, timeline.replay
    number = {node.name: i for i, node in enumerate(index.nodes) if index.kind[i] == COMPUTE}
    found: dict[str, float] = {}
    for name, _, reason in () if lowering is None else lowering.outside:
        if name in number:
            i = number[name]
            found[reason] = found.get(reason, 0.0) + replay.end[i] - replay.start[i]
    return tuple(sorted(found.items(), key=lambda each: -each[1]))


def _facts(source: ReportSource, timeline: StepTimeline, memory: StepMemory, passes: Sequence[str]) -> Facts:
    index = timeline.index
    at_peak = memory.by_kind_at(memory.peak_place)
    worst = max(timeline.exposed(), key=lambda each: each.exposed_us, default=None)
    given = source.graph
    return Facts(
        name=source.title if source.title.isidentifier() else "train_step",
        lower=source.lower,
        step_us=timeline.step_us,
        exposed_us=timeline.exposed_us,
        worst="" if worst is None else f"{worst.name}: {worst.text(index)}",
        worst_reason="" if worst is None else worst.reason,
        collectives=len(index.collectives),
        passes=tuple(passes),
        peak=memory.peak,
        saved=at_peak.get(SAVED, 0),
        saved_example=_largest_saved(memory),
        has_budget=isinstance(given, StepGraph) and given.memory is not None,
        recompiles=source.recompiles,
        outside=_time_outside(source.lowering, timeline),
        optimizer_nodes=_optimizer_nodes(timeline),
        measured=bool(source.measured),
    )


def _largest_saved(memory: StepMemory) -> str:
    """The largest activation at the peak, with its module and line."""
    made_by = {s: i for i, made in enumerate(memory.index.made) for s in made}
    place = memory.peak_place
    alive = [s for s, kind in enumerate(memory.kinds) if kind == SAVED and memory.first[s] <= place <= memory.last[s]]
    if not alive:
        return ""
    node = memory.index.nodes[made_by[max(alive, key=lambda s: size_hint(int(memory.index.sizes[s])))]]
    where = ", ".join(part for part in (module_path(node), node_line(node)) if part)
    return f"{node.name} ({where})" if where else node.name


def _optimizer_nodes(timeline: StepTimeline) -> int:
    """How many operators the optimizer runs; none where it is one for many parameters."""
    index = timeline.index
    nodes = [node for kind, node in zip(index.kind, index.nodes, strict=True) if kind == COMPUTE]
    own = [node for node in nodes if phase(node) == "optimizer"]
    return 0 if any(plain(node.target).startswith(("_fused_", "_foreach_")) for node in own) else len(own)
