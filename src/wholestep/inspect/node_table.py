"""Some nodes of a graph as a table: `ws.inspect.show(sg, module="*.attn", phase="backward", op="mm")`.

    name          operator            value          module              line             us      bytes
    mm_default_3  aten.mm             f32[64, 64]    blocks.0.attn.out   train.py:31    12.4    16 KiB

Patterns are those of a shell (`*`, `?`, `[ab]`). A module stands for all that is inside of it, and its path may leave
out where it begins: `attn` finds `model.blocks.0.attn.out`. Times are predicted, bytes are what a node allocates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from wholestep.errors import OptionError, called
from wholestep.ir.meta import location_of_node, module_path, phase
from wholestep.ir.readable import call_text, describe_value, html_in_notebooks
from wholestep.ir.step_graph import StepGraph, shown
from wholestep.simulate.machine import Machine
from wholestep.simulate.step_index import plain
from wholestep.simulate.step_timeline import step as simulate_step

_MOST_ROWS = 60
_WIDEST = 44
PHASES = ("forward", "backward", "update", "optimizer", "epilogue")


@dataclass(frozen=True)
class NodeRow:
    """One node."""

    name: str
    operator: str
    arguments: str
    value: str
    module_path: str
    phase: str
    line: str
    us: float
    """Predicted microseconds."""
    bytes: int
    """Bytes of memory that it allocates."""


@dataclass(frozen=True)
class ShownNodes:
    """The nodes that were asked for, in the order of the graph."""

    rows: tuple[NodeRow, ...]
    asked: str
    """The filter, as text."""
    of: int
    """How many nodes the graph has."""
    modules: tuple[str, ...]
    operators: tuple[str, ...]
    """What there is, most frequent first, for whom asked for something else."""

    _repr_html_ = html_in_notebooks

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def us(self) -> float:
        """Predicted microseconds of all of them."""
        return sum(row.us for row in self.rows)

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {"asked": self.asked, "of": self.of, "us": self.us, "nodes": [asdict(row) for row in self.rows]}

    @property
    def heading(self) -> str:
        """What was found, in one line."""
        made = shown(sum(row.bytes for row in self.rows))
        what = f" ({self.asked})" if self.asked else ""
        return f"{len(self)} of {self.of} nodes{what}: {self.us / 1e3:.3f} ms predicted, {made} allocated"

    def cells(self, most: int = _MOST_ROWS) -> list[tuple[str, ...]]:
        """The table as text, with a head."""
        head = ("node", "operator", "value", "module", "phase", "line", "us", "bytes")
        rows = [
            (
                r.name,
                r.operator.removesuffix(".default"),
                r.value,
                r.module_path,
                r.phase,
                r.line,
                f"{r.us:.1f}" if r.us else "",
                _size(r.bytes),
            )
            for r in self.rows[:most]
        ]
        return [head, *rows]

    def __str__(self) -> str:
        if not self.rows:
            return "\n".join([self.heading, *self.hints()])
        cells = [tuple(_cut(cell) for cell in row) for row in self.cells()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        more = [f"and {len(self) - _MOST_ROWS} others"] if len(self) > _MOST_ROWS else []
        return "\n".join([self.heading, *lines, *more])

    def hints(self) -> list[str]:
        """What the graph has, where nothing was found."""
        return [f"modules: {', '.join(self.modules) or 'none recorded'}", f"operators: {', '.join(self.operators)}"]

    __repr__ = __str__


def show(
    given: Any,
    *,
    module: str | None = None,
    phase: str | None = None,
    op: str | None = None,
    machine: Machine | None = None,
) -> ShownNodes:
    """The nodes of a graph of some modules, of a phase, of some operators.

    `given`: a StepGraph, a graph module, or a compiled step that has run. `module`: a pattern for the module path
    ("*.attn", "model.layers.3"). `phase`: forward, backward, update, optimizer or epilogue. `op`: a pattern for the
    operator ("mm", "aten.mm.default", "*attention*").
    """
    last = getattr(given, "last", None)
    given = last if isinstance(last, StepGraph) else given
    gm = given.gm if isinstance(given, StepGraph) else given
    if not isinstance(gm, fx.GraphModule):
        raise OptionError(
            f"{called(given)} has no graph to show.",
            fix="give a StepGraph, a graph module, or a compiled step that has run.",
        )
    if phase is not None and phase not in PHASES:
        raise OptionError(f"phase={phase!r} is not a phase of a step.", fix=f"use {', '.join(PHASES)}.")
    timeline = simulate_step(gm, machine=machine)
    index = timeline.index
    rows: list[NodeRow] = []
    modules: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for i, node in enumerate(index.nodes):
        if node.op in ("placeholder", "output"):
            continue
        row = _row(node, timeline.cost[i], sum(int(index.sizes[s]) for s in index.made[i]))
        modules[row.module_path] += 1
        operators[plain(node.target)] += 1
        if _is_in(row, module) and (phase is None or row.phase == phase) and _is_operator(row, plain(node.target), op):
            rows.append(row)
    asked = {"module": module, "phase": phase, "op": op}
    text = ", ".join(f"{key} {value}" for key, value in asked.items() if value is not None)
    known = [[name for name, _ in each.most_common(12) if name] for each in (modules, operators)]
    return ShownNodes(tuple(rows), text, len(index), tuple(known[0]), tuple(known[1]))


def _row(node: fx.Node, us: float, size: int) -> NodeRow:
    operator, arguments = call_text(node.op, node.target, node.args, node.kwargs)
    line = location_of_node(node)
    where = "" if line is None else str(line).partition(" in ")[0]
    value = describe_value(node.meta.get("val"))
    return NodeRow(node.name, operator, arguments, value, module_path(node), phase(node), where, us, size)


def _is_in(row: NodeRow, pattern: str | None) -> bool:
    if pattern is None:
        return True
    path = row.module_path
    return any(fnmatchcase(path, each) for each in (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"))


def _is_operator(row: NodeRow, short: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    wanted = pattern.replace("::", ".")
    names = (short, row.operator, row.operator.rpartition(".")[0], row.operator.partition(".")[2])
    return any(fnmatchcase(name, wanted) for name in names)


def _size(count: int) -> str:
    return shown(count) if count else ""


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"…{text[1 - _WIDEST :]}"
