"""Memory over the course of a step, by kind: `step.memory_timeline()`, `ws.inspect.memory_timeline(sg)`.

    timeline = step.memory_timeline()
    print(timeline)                         the course, the peak by kind and by module, the largest tensors there
    timeline.peak_bytes, timeline.peak_at
    timeline.by_kind["saved"]               bytes at every place of the step; their sum is `timeline.live`
    timeline.alive("mm_default_3")          what is in memory while that node runs, largest first

No memory budget is needed, and nothing runs: tensors live from the node that makes them to the last one that reads
them, with updates in place as in a run (`report_page/memory_columns.py`). Compiled regions may need less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy
from torch import fx

from wholestep.errors import OptionError, called
from wholestep.inspect.report_page.memory_columns import StepMemory, step_memory
from wholestep.ir.meta import location_of_node, module_path, phase
from wholestep.ir.readable import html_in_notebooks
from wholestep.ir.signature import InputSpec
from wholestep.ir.step_graph import StepGraph, shown
from wholestep.simulate.step_index import Integers, makers

_COLUMNS = 64
_MOST = 10
_BARS = " ▁▂▃▄▅▆▇█"


class TensorInMemory(NamedTuple):
    """A tensor that is alive at some place."""

    name: str
    """The node that makes it, or the path of an input."""
    bytes: int
    kind: str
    module_path: str
    line: str


@dataclass(frozen=True, eq=False)
class StepMemoryTimeline:
    """Bytes over the nodes of a step."""

    memory: StepMemory

    _repr_html_ = html_in_notebooks

    @property
    def live(self) -> Integers:
        """Bytes at each place of the step."""
        return self.memory.live

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any place."""
        return self.memory.peak

    @property
    def peak_at(self) -> str:
        """The node that runs at the peak."""
        place = self.memory.peak_place
        return self.memory.index.nodes[place].name if place >= 0 else ""

    def peak_line(self) -> str:
        """The peak in one line."""
        return f"peak {shown(self.peak_bytes)} at {self.peak_at}, inputs {shown(self.memory.input_bytes)}"

    @cached_property
    def by_kind(self) -> dict[str, Integers]:
        """Bytes at each place, by kind, those of the largest share of the peak first."""
        memory, places = self.memory, len(self.memory.index)
        kinds = numpy.array(memory.kinds)
        found = {}
        for kind in dict.fromkeys(memory.kinds):
            mine = kinds == kind
            change = numpy.zeros(places + 1, dtype=numpy.int64)
            numpy.add.at(change, memory.first[mine], memory.index.sizes[mine])
            numpy.add.at(change, memory.last[mine] + 1, -memory.index.sizes[mine])
            found[kind] = numpy.cumsum(change[:places])
        peak = memory.peak_place
        return dict(sorted(found.items(), key=lambda item: -int(item[1][peak]) if places else 0))

    def alive(self, node: str | None = None) -> list[TensorInMemory]:
        """What is alive while a node runs (at the peak without one), largest first."""
        memory, place = self.memory, self._place(node)
        made_by = makers(memory.index)
        specs = {} if memory.signature is None else {spec.name: spec for spec in memory.signature.inputs}
        found = []
        for storage in ((memory.first <= place) & (memory.last >= place) & (memory.index.sizes > 0)).nonzero()[0]:
            maker = memory.index.nodes[made_by[int(storage)]] if int(storage) in made_by else None
            found.append(_tensor(maker, int(memory.index.sizes[storage]), memory.kinds[int(storage)], specs))
        return sorted(found, key=lambda each: -each.bytes)

    def by_module(self, node: str | None = None, depth: int = 3) -> dict[str, int]:
        """Bytes alive while a node runs (at the peak without one), by the first parts of module paths."""
        found: Counter[str] = Counter()
        for each in self.alive(node):
            found[".".join(each.module_path.split(".")[:depth])] += each.bytes
        return dict(found.most_common())

    def _place(self, node: str | None) -> int:
        if node is None:
            return self.memory.peak_place
        place = self._places.get(node)
        if place is None:
            raise OptionError(
                f"{node!r} does not run in this step.",
                fix="give the name of a node; an update that is done in place runs under the name of its operator.",
            )
        return place

    @cached_property
    def _places(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.memory.index.nodes)}

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            "peak_bytes": self.peak_bytes,
            "peak_at": self.peak_at,
            "nodes": [node.name for node in self.memory.index.nodes],
            "by_kind": {kind: values.tolist() for kind, values in self.by_kind.items()},
            "alive_at_peak": [each._asdict() for each in self.alive()],
        }

    def phases(self) -> list[tuple[str, int, int]]:
        """Runs of places of the same phase: its name, first place and the one behind it."""
        found: list[tuple[str, int, int]] = []
        for i, node in enumerate(self.memory.index.nodes):
            name = "" if node.op in ("placeholder", "output") else phase(node)
            if found and (found[-1][0] == name or not name):
                found[-1] = (found[-1][0], found[-1][1], i + 1)
            elif name:
                found.append((name, i, i + 1))
        return found

    def __str__(self) -> str:
        nodes = self.memory.index.nodes
        if not nodes or not self.peak_bytes:
            return "no memory: the graph has no tensors with metadata"
        place = self.memory.peak_place
        line = location_of_node(nodes[place])
        where = ", ".join(part for part in (phase(nodes[place]), module_path(nodes[place]), str(line or "")) if part)
        lines = [f"peak {shown(self.peak_bytes)} at {self.peak_at} ({where})", f"  {self._course()}"]
        lines += [*(f"  {row}" for row in self._rulers()), f"{'at peak':>14} {'most':>12}  kind"]
        for kind, values in self.by_kind.items():
            lines.append(f"{shown(int(values[place])):>14} {shown(int(values.max())):>12}  {kind}")
        lines += ["", f"{'bytes':>14}  largest at the peak"]
        for each in self.alive()[:_MOST]:
            about = "  ".join(part for part in (each.kind, each.module_path, each.line) if part)
            lines.append(f"{shown(each.bytes):>14}  {each.name}  {about}")
        return "\n".join(lines)

    __repr__ = __str__

    def _course(self) -> str:
        """Bytes over the step as a row of bars."""
        parts = numpy.array_split(self.live, min(_COLUMNS, len(self.live)))
        return "".join(_BARS[round(int(part.max()) / self.peak_bytes * (len(_BARS) - 1))] for part in parts)

    def _rulers(self) -> list[str]:
        """The phases below the bars, in as many lines as they need."""
        rows: list[str] = []
        for name, first, _ in self.phases():
            column = first * min(_COLUMNS, len(self.live)) // len(self.live)
            n = next((n for n, row in enumerate(rows) if len(row) < column), len(rows))
            rows[n:] = [f"{rows[n] if n < len(rows) else '':<{column}}^{name}", *rows[n + 1 :]]
        return rows


def memory_timeline(given: Any) -> StepMemoryTimeline:
    """Memory over the course of a StepGraph, a graph module, or the last graph of a compiled step."""
    last = getattr(given, "last", None)
    given = last if isinstance(last, StepGraph) else given
    if not isinstance(given, StepGraph | fx.GraphModule):
        raise OptionError(
            f"{called(given)} has no graph whose memory could be followed.",
            fix="give a StepGraph, a graph module, or a compiled step that has run.",
        )
    return StepMemoryTimeline(step_memory(given))


def _tensor(node: fx.Node | None, size: int, kind: str, specs: dict[str, InputSpec]) -> TensorInMemory:
    if node is None:
        return TensorInMemory("", size, kind, "", "")
    spec = specs.get(node.name)
    if spec is not None:
        return TensorInMemory(spec.path, size, kind, (spec.of or spec.path).rpartition(".")[0], "")
    line = location_of_node(node)
    return TensorInMemory(node.name, size, kind, module_path(node), "" if line is None else str(line))
