"""What a step costs before it runs: time, exposed communication, memory, and how far it is from the best possible.

    timeline = ws.simulate.step(graph, machine=ws.simulate.H100)
    print(timeline)                                   a table
    timeline.step_us, timeline.exposed_us             microseconds, as all times here
    timeline.peak_bytes, timeline.alive_at_peak()
    timeline.bounds, timeline.gap                     nothing that computes the same is faster than the bounds
    timeline.exposed(), timeline.explain("all_gather_into_tensor_17")
    timeline.perfetto("step.json")                    for https://ui.perfetto.dev and chrome://tracing

The model is that of `step_replay`. Communication is exposed where the compute stream stands still for it; the time
counts for the collective whose wait that is, although another one may be what it is queued behind. Cost: a few walks.

A trace has one process for the prediction and one for the measurement; in each a row for the compute stream, the host
and every process group. A counter shows live bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from torch import fx

from wholestep.errors import OptionError
from wholestep.ir.effects import main_device
from wholestep.ir.meta import location_of_node, module_path, phase
from wholestep.ir.readable import describe_value, html_in_notebooks
from wholestep.ir.step_graph import StepGraph, shown
from wholestep.simulate.cost_model import node_costs, sent_bytes, spread_of
from wholestep.simulate.exposed_collectives import ExposedCollective, explain_exposed, without
from wholestep.simulate.machine import CPU, H100, GroupSpread, Machine
from wholestep.simulate.measured_step import MeasuredStep
from wholestep.simulate.step_index import (
    COMPUTE,
    ISSUE,
    READ,
    WAIT,
    Floats,
    Integers,
    StepIndex,
    alive_at,
    costs_by,
    graph_of,
    index_step,
    makers,
    memory_of,
    plain,
)
from wholestep.simulate.step_replay import StepReplay, StreamRules, replay
from wholestep.simulate.timeline import naming_event

_MOST_ROWS = 8


class NodeSpan(NamedTuple):
    """When a node runs, in microseconds."""

    name: str
    stream: str
    """`compute`, `host`, or the name of a process group."""
    start: float
    end: float

    @property
    def us(self) -> float:
        """Its length."""
        return self.end - self.start


class LiveTensor(NamedTuple):
    """Memory that is alive, and the node that allocated it."""

    name: str
    bytes: int
    module_path: str
    line: str


@dataclass(frozen=True)
class LowerBounds:
    """What no order of the same nodes is faster than."""

    compute: float
    """All computation, one after the other."""
    chain: float
    """The longest chain of nodes that need each other, if everything else took no time."""
    links: Mapping[str, float]
    """Of each process group, all its collectives one after the other."""

    @property
    def largest(self) -> float:
        """The largest of them."""
        return max(self.compute, self.chain, *self.links.values())

    @property
    def binding(self) -> str:
        """Which it is: `compute`, `chain`, or the name of a group."""
        times = {"compute": self.compute, "chain": self.chain, **self.links}
        return max(times, key=times.__getitem__)


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """A simulated step. All times are microseconds."""

    index: StepIndex
    cost: list[float]
    replay: StepReplay
    rules: StreamRules
    machine: str = ""
    limit: int | None = None
    """The most bytes that the schedule was allowed, for `explain`."""

    _repr_html_ = html_in_notebooks

    @property
    def step_us(self) -> float:
        """From the start to the end of the last computation or collective."""
        return self.replay.step

    @property
    def compute_us(self) -> float:
        """Time in which something is computed."""
        return self.replay.compute

    @property
    def exposed_us(self) -> float:
        """Time in which nothing is computed because a collective is not done."""
        return max(self.replay.step - self.replay.compute - self.replay.dispatch, 0.0)

    @cached_property
    def exposed_by(self) -> dict[str, float]:
        """Exposed time of each collective that is not hidden, by name."""
        return {each.name: each.exposed_us for each in self.exposed()}

    @cached_property
    def collective_us(self) -> dict[str, float]:
        """Time of all collectives, by process group."""
        found = dict.fromkeys(self.index.groups, 0.0)
        for i in self.index.collectives:
            found[self.index.groups[self.index.group[i]]] += self.replay.end[i] - self.replay.start[i]
        return found

    @cached_property
    def spans(self) -> tuple[NodeSpan, ...]:
        """Every node that takes time, in the order in which they are issued."""
        index, replay = self.index, self.replay
        streams = {COMPUTE: "compute", READ: "host", WAIT: "compute"}
        return tuple(
            NodeSpan(
                index.nodes[i].name,
                streams.get(index.kind[i]) or index.groups[index.group[i]],
                replay.start[i],
                replay.end[i],
            )
            for i in replay.order
            if index.kind[i] in (COMPUTE, READ, ISSUE) or (index.kind[i] == WAIT and replay.end[i] > replay.start[i])
        )

    def span(self, name: str) -> NodeSpan:
        """When the node of that name runs; a wait's is the time for which computation stands still."""
        i = self._number(name)
        stream = self.index.groups[self.index.group[i]] if self.index.kind[i] == ISSUE else "compute"
        return NodeSpan(name, stream, self.replay.start[i], self.replay.end[i])

    @cached_property
    def _memory(self) -> tuple[Integers, int]:
        return memory_of(self.index, self.replay.order)

    @property
    def memory(self) -> tuple[Floats, Integers]:
        """Live bytes over time: when each node is issued, and the bytes that are alive while it runs."""
        when = [self._issued(i) for i in self.replay.order]
        return numpy.array(when), self._memory[0]

    def _issued(self, i: int) -> float:
        return self.replay.issue[i] if self.index.kind[i] == ISSUE else self.replay.start[i]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any moment, with those of inputs."""
        return int(self._memory[0].max()) if len(self.index) else 0

    @property
    def input_bytes(self) -> int:
        """Bytes of inputs and constants, which are never freed."""
        return self._memory[1]

    @property
    def peak_at(self) -> str:
        """The node that runs at the peak."""
        return self.index.nodes[self.replay.order[int(self._memory[0].argmax())]].name if len(self.index) else ""

    def alive_at_peak(self) -> list[LiveTensor]:
        """What is alive at the peak beside inputs, largest first."""
        made_by = makers(self.index)
        where = int(self._memory[0].argmax())
        found = []
        for storage in alive_at(self.index, where, self.replay.order):
            node = self.index.nodes[made_by[storage]]
            size = int(self.index.sizes[storage])
            found.append(LiveTensor(node.name, size, module_path(node), _line(node)))
        return found

    @cached_property
    def bounds(self) -> LowerBounds:
        """Lower bounds of the step time for this graph and these costs."""
        index, cost = self.index, self.cost
        ready = [0.0] * len(index)
        links = dict.fromkeys(index.groups, 0.0)
        compute = 0.0
        for i, sources in enumerate(index.sources):
            ready[i] = cost[i] + max((ready[source] for source in sources), default=0.0)
            if index.kind[i] == ISSUE:
                links[index.groups[index.group[i]]] += cost[i]
            else:
                compute += cost[i]
        return LowerBounds(compute, max(ready, default=0.0), links)

    @property
    def gap(self) -> float:
        """By how much the step is longer than the largest bound: 0.08 is 8%."""
        largest = self.bounds.largest
        return self.step_us / largest - 1.0 if largest else 0.0

    @cached_property
    def critical_path(self) -> tuple[NodeSpan, ...]:
        """The nodes that follow each other without a gap from the end of the step back to its start, in order.

        Shortening one of them shortens the step, until another path is the longest.
        """
        index, replay = self.index, self.replay
        before = self._computed_before()
        by_name = {span.name: span for span in self.spans}
        on_path: list[NodeSpan] = []
        last = [i for i in replay.order if index.kind[i] in (COMPUTE, READ, ISSUE)]
        i = max(last, key=lambda each: replay.end[each], default=-1)
        while i >= 0:
            on_path.append(by_name[index.nodes[i].name])
            i = before[i]
        return tuple(reversed(on_path))

    def _computed_before(self) -> dict[int, int]:
        """Of each node that takes time, the one whose end let it start; -1 for the first."""
        index, replay = self.index, self.replay
        found: dict[int, int] = {}
        latest, queue = -1, dict[int, int]()
        for i in replay.order:
            kind = index.kind[i]
            if kind == ISSUE:
                queued = queue.get(index.group[i], -1)
                found[i] = queued if queued >= 0 and replay.end[queued] > replay.issue[i] else latest
                queue[index.group[i]] = i
            elif kind == WAIT and replay.end[i] > replay.start[i]:
                latest = index.issued[i]
            elif kind in (COMPUTE, READ):
                found[i] = latest
                latest = i
        return found

    def exposed(self) -> list[ExposedCollective]:
        """The collectives that are not hidden, each with the one constraint that keeps it from being hidden."""
        return self._exposed

    @cached_property
    def _exposed(self) -> list[ExposedCollective]:
        return explain_exposed(self.index, self.cost, self.replay, self.limit)

    def explain(self, name: str) -> str:
        """Why the collective of that name is exposed, or that it is not."""
        i = self._number(name)
        if self.index.kind[i] != ISSUE:
            raise OptionError(f"{name} is not a collective.", fix=self._which_collective(name))
        span = self.span(name)
        line = _line(self.index.nodes[i])
        head = f"{name} ({self._about(i)}{', ' + line if line else ''}) takes {span.us:.1f} us"
        found = next((each for each in self.exposed() if each.node == i), None)
        if found is None:
            return f"{head}, all of them hidden."
        named = [(self.index.nodes[each].name, _line(self.index.nodes[each])) for each in found.nodes]
        return f"{head}; {found.text(self.index)}." + "".join(f"\n  {name}: {line}" for name, line in named if line)

    def without(self, exposed: ExposedCollective) -> StepTimeline:
        """The same step without the constraint that keeps a collective from being hidden."""
        found = without(self.index, self.cost, self.replay, self.rules, exposed)
        return replace(self, replay=found)

    def perfetto(
        self, path: str | Path, measured: MeasuredStep | Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        """Write a trace for https://ui.perfetto.dev and chrome://tracing. `measured`: what `step.profile` returned, or
        start and end in microseconds of nodes as a profiler saw them; they are drawn beside the prediction."""
        spans = measured.spans if isinstance(measured, MeasuredStep) else measured
        events = list(step_events(self.spans, self.memory, spans, self._event_details))
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _event_details(self, name: str) -> dict[str, str]:
        """What a viewer shows of an event that is clicked."""
        i = self._by_name.get(name)
        if i is None:
            return {}
        node = self.index.nodes[i]
        value = describe_value(node.meta.get("val"))
        found = {"operator": plain(node.target), "value": value, "phase": phase(node), "module": module_path(node)}
        return {key: text for key, text in (found | {"line": _line(node)}).items() if text}

    def _number(self, name: str) -> int:
        found = self._by_name.get(name)
        if found is None:
            close = " or ".join(get_close_matches(name, self._by_name, 3))
            fix = f"did you mean {close}?" if close else "node names are those of the graph as simulated."
            raise OptionError(f"the graph has no node {name!r}.", fix=fix)
        return found

    def _which_collective(self, name: str) -> str:
        """What to give in the place of a name: the collectives that it is most like."""
        known = [self.index.nodes[i].name for i in self.index.collectives]
        close = get_close_matches(name, known, 3, cutoff=0.0)
        many = f" ({len(known)} in all)" if len(known) > len(close) else ""
        return f"collectives of this graph: {', '.join(close)}{many}." if close else "this graph has no collective."

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.index.nodes)}

    def _about(self, i: int) -> str:
        index, node = self.index, self.index.nodes[i]
        size = shown(sent_bytes(node))
        return f"{plain(node.target)} of {size} in group {index.groups[index.group[i]]!r}"

    def __str__(self) -> str:
        return self.text(f"peak {shown(self.peak_bytes)} at {self.peak_at}, inputs {shown(self.input_bytes)}")

    def text(self, memory: str) -> str:
        """The timeline as a table, with another line about memory: that of a run, which updates in place."""
        return "\n".join([*self._summary(), f"  memory: {memory}", *self._by_kind(), *self._longest()])

    def _summary(self) -> list[str]:
        bounds = self.bounds
        links = "".join(f", group {name!r} {_ms(us)}" for name, us in bounds.links.items())
        host = f", host {_ms(self.replay.dispatch)}" if self.replay.dispatch else ""
        return [
            f"step {_ms(self.step_us)} ms: computing {_ms(self.compute_us)}, exposed {_ms(self.exposed_us)}{host}"
            + (f" (on {self.machine})" if self.machine else ""),
            f"  bounds: computation {_ms(bounds.compute)}, longest chain {_ms(bounds.chain)}{links}; "
            f"the step is {self.gap:.1%} above the largest ({bounds.binding})",
        ]

    def _by_kind(self) -> list[str]:
        index, replay = self.index, self.replay
        rows: dict[tuple[str, str], list[float]] = {}
        by = self.exposed_by
        for i in index.collectives:
            key = plain(index.nodes[i].target), index.groups[index.group[i]]
            row = rows.setdefault(key, [0.0, 0.0, 0.0])
            row[0] += 1
            row[1] += replay.end[i] - replay.start[i]
            row[2] += by.get(index.nodes[i].name, 0.0)
        table: list[tuple[str, ...]] = [("collective", "group", "number", "ms", "exposed ms")]
        table += [(kind, name, f"{n:.0f}", _ms(us), _ms(out)) for (kind, name), (n, us, out) in rows.items()]
        return _table(table) if rows else []

    def _longest(self) -> list[str]:
        found = sorted(self.exposed(), key=lambda each: -each.exposed_us)
        lines = [f"  {each.name}: {each.text(self.index)}" for each in found[:_MOST_ROWS]]
        rest = found[_MOST_ROWS:]
        if rest:
            lines.append(f"  and {len(rest)} others, {_ms(sum(each.exposed_us for each in rest))} ms")
        return ["longest exposed:", *lines] if lines else []


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f}" if us < 1e4 else f"{us / 1e3:.2f}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if n < 2 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _line(node: fx.Node) -> str:
    found = location_of_node(node, user_only=True)
    return "" if found is None else str(found)


def step(
    given: StepGraph | fx.GraphModule | fx.Graph,
    *,
    machine: Machine | None = None,
    cost: Callable[[fx.Node], float] | None = None,
    groups: Mapping[str, GroupSpread] | None = None,
    peak_bytes: int | None = None,
) -> StepTimeline:
    """Simulate a step as its graph orders it.

    `machine`: default by the device of the graph. `cost`: microseconds of a node, instead of the machine's model;
    without a machine, streams then do not slow each other. `groups`: how process groups lie on nodes, by name, where
    torch.distributed does not know. `peak_bytes`: the limit that the schedule was made under, for `explain`.
    """
    graph = graph_of(given)
    index = index_step(graph)
    if cost is not None:
        times = costs_by(index, cost)
    else:
        machine = machine or machine_for(graph)
        times = node_costs(index, machine, groups)
    rules = stream_rules(index, machine, groups)
    name = machine.name if machine is not None else ""
    return StepTimeline(index, times, replay(index, times, None, rules), rules, name, peak_bytes)


def machine_for(graph: fx.Graph) -> Machine:
    """The machine that a graph is simulated on by default."""
    return CPU if main_device(graph).type == "cpu" else H100


def stream_rules(
    index: StepIndex, machine: Machine | None, groups: Mapping[str, GroupSpread] | None = None
) -> StreamRules:
    """What streams do to each other on a machine; nothing without one."""
    if machine is None:
        return StreamRules()
    links: tuple[frozenset[str], ...] = ()
    if machine.shared_links:
        spreads = [
            spread_of(name, ranks, machine, groups) for name, ranks in zip(index.groups, index.group_ranks, strict=True)
        ]
        links = tuple(_links(spread) for spread in spreads)
    return StreamRules(machine.contention, links, machine.dispatch * 1e6)


def _links(spread: GroupSpread) -> frozenset[str]:
    if spread.is_within:
        return frozenset({"within"})
    return frozenset({"across"}) if spread.nodes == spread.ranks else frozenset({"within", "across"})


_PREDICTED, _MEASURED = 0, 1
_FIRST_ROWS = ("compute", "host")

TraceEvent = dict[str, Any]


def step_events(
    spans: Sequence[NodeSpan],
    memory: tuple[Floats, Integers],
    measured: Mapping[str, tuple[float, float]] | None = None,
    details: Callable[[str], dict[str, str]] = lambda name: {},
) -> Iterator[TraceEvent]:
    """The events of the trace. `details`: what a viewer shows of a node's event."""
    streams = dict.fromkeys((*_FIRST_ROWS, *(span.stream for span in spans)))
    rows = {stream: row for row, stream in enumerate(streams)}
    titles = ("predicted", "measured") if measured else ("predicted",)
    for process, title in enumerate(titles):
        yield naming_event("process_name", process, 0, title)
        for stream, row in rows.items():
            yield naming_event("thread_name", process, row, stream if stream in _FIRST_ROWS else f"group {stream}")
    for span in spans:
        row = rows[span.stream]
        yield _complete(span.name, _PREDICTED, row, span.start, span.end) | {"args": details(span.name)}
    stream_of = {span.name: span.stream for span in spans}
    for name, (start, end) in (measured or {}).items():
        row = rows[stream_of.get(name, "compute")]
        yield _complete(name, _MEASURED, row, start, end) | {"args": details(name)}
    last = None
    for when, live in zip(memory[0].tolist(), memory[1].tolist(), strict=True):
        if live != last:
            yield {"ph": "C", "name": "live bytes", "pid": _PREDICTED, "ts": when, "args": {"bytes": live}}
            last = live


def _complete(name: str, process: int, row: int, start: float, end: float) -> TraceEvent:
    return {"ph": "X", "name": name, "pid": process, "tid": row, "ts": start, "dur": end - start}
