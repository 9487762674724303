"""Several ranks of a step beside each other, and timelines of a pipeline's schedule, as data of a page.

Of each rank: what its step is predicted (and measured) to take, when its phases and collectives run, where it stands
still, how its graph differs from that of the first one (`ws.inspect.diff`), and the first collective that it issues in
another order. Ranks of one program have equal graphs; where they do not, one waits for what another never sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from wholestep.inspect.differences import diff
from wholestep.inspect.report_page.collect import ReportSource
from wholestep.inspect.report_page.memory_columns import step_memory
from wholestep.inspect.report_page.node_columns import nanoseconds
from wholestep.ir.effects import main_device
from wholestep.ir.meta import phase
from wholestep.ir.step_graph import shown
from wholestep.simulate.cost_model import sent_bytes
from wholestep.simulate.machine import GroupSpread, Machine
from wholestep.simulate.step_index import COMPUTE, graph_of, plain
from wholestep.simulate.step_timeline import StepTimeline
from wholestep.simulate.step_timeline import step as simulate_step
from wholestep.simulate.timeline import Timeline


def rank_columns(
    first: ReportSource,
    others: Sequence[Any] | Mapping[str, Any],
    machine: Machine | None,
    groups: Mapping[str, GroupSpread] | None,
) -> list[dict[str, Any]]:
    """One entry for each rank; none without others."""
    named = others.items() if isinstance(others, Mapping) else ((f"rank {i}", each) for i, each in enumerate(others, 1))
    found = [("this rank" if isinstance(others, Mapping) else "rank 0", first)]
    for name, each in named:
        graph, profile = each if isinstance(each, tuple) else (each, None)
        found.append((name, ReportSource.of(graph, name, profile)))
    if len(found) < 2:
        return []
    timelines = [simulate_step(source.graph, machine=machine, groups=groups) for _, source in found]
    labels = [name for name, _ in found]
    return [
        _rank(name, source, timeline)
        | {
            "order": "" if i == 0 else _first_other_collective(timelines[0], timeline, (labels[0], name)),
            "difference": "" if i == 0 else _difference(first, source, (labels[0], name), machine, groups),
        }
        for i, ((name, source), timeline) in enumerate(zip(found, timelines, strict=True))
    ]


def _rank(name: str, source: ReportSource, timeline: StepTimeline) -> dict[str, Any]:
    index, replay = timeline.index, timeline.replay
    phases: list[list[Any]] = []
    for i in replay.order:
        if index.kind[i] != COMPUTE or replay.end[i] <= replay.start[i]:
            continue
        part = phase(index.nodes[i])
        if phases and phases[-1][0] == part:
            phases[-1][2] = replay.end[i]
        else:
            phases.append([part, replay.start[i], replay.end[i]])
    stalls = [
        (each.name, replay.start[wait], replay.end[wait])
        for each in timeline.exposed()
        for wait in index.waits.get(each.node, [])
        if replay.end[wait] > replay.start[wait]
    ]
    collectives = [(index.nodes[i].name, replay.start[i], replay.end[i]) for i in index.collectives]
    return {
        "name": name,
        "device": str(main_device(graph_of(source.graph))),
        "nodes": len(index),
        "step_us": timeline.step_us,
        "compute_us": timeline.compute_us,
        "exposed_us": timeline.exposed_us,
        "measured_us": source.measured_us,
        "peak": step_memory(source.graph).peak,
        "phases": [_span(*each) for each in phases],
        "stalls": [_span(*each) for each in stalls],
        "collectives": [_span(*each) for each in collectives],
    }


def _span(name: str, start: float, end: float) -> list[Any]:
    return [name, *nanoseconds((start, end))]


def _difference(
    first: ReportSource,
    other: ReportSource,
    labels: tuple[str, str],
    machine: Machine | None,
    groups: Mapping[str, GroupSpread] | None,
) -> str:
    """What is different in the graphs of two ranks; empty if nothing is."""
    found = diff(first.graph, other.graph, machine=machine, groups=groups, labels=labels)
    return str(found) if found else ""


def _first_other_collective(a: StepTimeline, b: StepTimeline, labels: tuple[str, str]) -> str:
    """The first collective of one rank to which another one does not issue the counterpart."""
    for number, (one, other) in enumerate(zip_longest(_issued(a), _issued(b)), 1):
        if one is None or other is None or one[1:] != other[1:]:
            return f"collective {number} is {_said(one)} on {labels[0]} and {_said(other)} on {labels[1]}"
    return ""


_Collective = tuple[str, str, int, int]
"""Its node, what it is, the number of its group in the order of appearance, and the bytes that the rank puts in."""


def _issued(timeline: StepTimeline) -> list[_Collective]:
    index = timeline.index
    nodes = [index.nodes[i] for i in index.collectives]
    groups = [index.group[i] for i in index.collectives]
    return [(node.name, plain(node.target), group, sent_bytes(node)) for node, group in zip(nodes, groups, strict=True)]


def _said(issued: _Collective | None) -> str:
    return "none" if issued is None else f"{issued[0]} ({issued[1]} of {shown(issued[3])})"


def pipeline_columns(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """One entry for each timeline."""
    return [_timeline(each) for each in timelines]


def _timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "title": timeline.schedule.name,
        "makespan": float(timeline.makespan),
        "bubble": timeline.bubble_fraction,
        "work": [float(each) for each in timeline.work],
        "idle": [float(each) for each in timeline.bubble],
        "stall": [float(each) for each in timeline.stall],
        "activations": list(timeline.peak_activations),
        "deadlock": str(timeline.deadlock) if timeline.deadlock else "",
        "ranks": [
            [
                [str(s.action), s.action.kind.value, s.action.stage, s.action.microbatch, float(s.start), float(s.end)]
                for s in spans
                if s.end > s.start
            ]
            for spans in timeline.of_rank
        ],
    }
