"""The nodes of a graph as columns of numbers and texts, as a page reads them.

    name     ["mm", "relu", ..]         one text per node
    op       [0, 1, ..]                 numbers of texts in `ops`; so are module, phase, value, call, place
    source   [.., 12, 13]               what node i reads: source[begin[i]:begin[i + 1]]
    start    [0, 8200, ..]              nanoseconds

A text that many nodes share (an operator, a module, a shape, a line) is sent once. `call` holds the arguments with
`$0`, `$1` in the place of nodes, so equal calls of many layers are one text.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from wholestep.errors import Location
from wholestep.inspect.drawing import kind_of_node
from wholestep.ir.meta import location_of_node, module_path, node_meta, phase
from wholestep.ir.readable import call_of, clean, describe_value
from wholestep.simulate.step_timeline import StepTimeline

_LONGEST_CALL = 300
_MOST_SOURCE = 1_500_000
"""Characters of the user's source in a page. Beyond them only the lines that nodes come from, with their neighbours."""
_LINES_AROUND = 6


class StringTable:
    """StringTable by number, each once."""

    def __init__(self) -> None:
        self._number: dict[Any, int] = {}

    def number(self, text: Any) -> int:
        """The number of a text."""
        return self._number.setdefault(text, len(self._number))

    def all(self) -> list[Any]:
        """All texts in the order of their numbers."""
        return list(self._number)


def nanoseconds(times: Iterable[float]) -> list[int]:
    """Microseconds as whole nanoseconds."""
    return [round(time * 1e3) for time in times]


def node_columns(
    timeline: StepTimeline, flops: Sequence[float], moved: Sequence[int], *, with_source: bool = True
) -> dict[str, Any]:
    """All nodes of a simulated graph. `flops`, `moved`: of each node."""
    index = timeline.index
    ops, modules, phases, values, calls, kinds, places = (StringTable() for _ in range(7))
    kind_of: dict[Any, int] = {}
    columns: dict[str, list[Any]] = {key: [] for key in ("op", "module", "phase", "value", "call", "kind", "place")}
    recomputed: list[int] = []
    for i, node in enumerate(index.nodes):
        target, arguments = call_of(node)
        columns["op"].append(ops.number(target))
        columns["module"].append(modules.number(clean(module_path(node))))
        columns["phase"].append(phases.number(phase(node)))
        columns["value"].append(values.number(describe_value(node.meta.get("val"))))
        columns["call"].append(calls.number(arguments[:_LONGEST_CALL]))
        key = (node.op, node.target)
        if key not in kind_of:
            kind_of[key] = kinds.number(kind_of_node(node))
        columns["kind"].append(kind_of[key])
        where = location_of_node(node, user_only=True)
        columns["place"].append(-1 if where is None else places.number((where.file, where.line, where.function)))
        if node_meta(node).recompute:
            recomputed.append(i)
    begin, sources = [0], list[int]()
    for read in index.sources:
        sources += read
        begin.append(len(sources))
    return {
        **columns,
        "name": [node.name for node in index.nodes],
        "run": index.kind,
        "group": index.group,
        "issued": index.issued,
        "begin": begin,
        "source": sources,
        "start": nanoseconds(timeline.replay.start),
        "end": nanoseconds(timeline.replay.end),
        "flops": [round(each) for each in flops],
        "moved": [int(each) for each in moved],
        "recomputed": recomputed,
        "order": list(timeline.replay.order),
        "ops": ops.all(),
        "modules": modules.all(),
        "phases": phases.all(),
        "values": values.all(),
        "calls": calls.all(),
        "kinds": kinds.all(),
        **_places_and_source(places.all(), with_source),
    }


def _places_and_source(places: Sequence[tuple[str, int, str]], with_source: bool) -> dict[str, Any]:
    """Lines that nodes come from, as (number of the file, line, function), and the text of those files."""
    files = StringTable()
    shown = [(files.number(file), line, function) for file, line, function in places]
    lines: dict[int, set[int]] = {}
    for file, line, _ in shown:
        lines.setdefault(file, set()).add(line)
    left = _MOST_SOURCE
    texts: list[dict[str, str] | str] = []
    for number, name in enumerate(files.all()):
        text = linecache.getlines(name) if with_source else []
        length = sum(map(len, text))
        if length <= left:
            left -= length
            texts.append("".join(text))
            continue
        near = {n for line in lines[number] for n in range(line - _LINES_AROUND, line + _LINES_AROUND + 1)}
        texts.append({str(n): text[n - 1].rstrip("\n") for n in sorted(near) if 0 < n <= len(text)})
    return {"places": shown, "files": files.all(), "sources": texts}


def line_of(location: Location | None) -> str:
    """`train.py:12`, or nothing."""
    return "" if location is None else f"{location.file.rsplit('/', 1)[-1]}:{location.line}"


def node_line(node: fx.Node) -> str:
    """The user's line of a node."""
    return line_of(location_of_node(node, user_only=True))
