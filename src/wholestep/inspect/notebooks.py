"""How our objects look in notebooks: `html_of(value)` writes the HTML that `_repr_html_` of each class returns.

`SHOWN` says which function writes which class, by the class's full name: no class is imported for it, and the classes
do not know this module (`ir/readable.py` finds it by name). A class that is not listed is its text. Everything that a
user wrote is escaped; colours are those of the notebook's theme, so that light and dark both work.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from wholestep.inspect.memory_over_time import StepMemoryTimeline, memory_timeline
from wholestep.inspect.node_table import ShownNodes
from wholestep.ir.step_graph import MemoryReport, StepGraph, shown
from wholestep.simulate.measured_step import MeasuredStep
from wholestep.simulate.step_timeline import StepTimeline

_TABLE = 'style="text-align:left;font-variant-numeric:tabular-nums"'
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#dd8833")
"""Paul Tol's bright scheme, which the colour-blind can tell apart."""
_MOST_ROWS = 200
_WIDTH, _HEIGHT = 720, 160


def html_of(value: Any) -> str:
    """A value as HTML."""
    for cls in type(value).__mro__:
        write = SHOWN.get(f"{cls.__module__}.{cls.__qualname__}")
        if write is not None:
            return f"<div>{write(value)}</div>"
    return f"<div>{_text(str(value))}</div>"


def table(rows: Iterable[Sequence[object]], numbers: int = 0) -> str:
    """Rows as a table; the first is the head. `numbers`: how many columns at the end are right-aligned."""
    body = []
    for i, row in enumerate(rows):
        tag, cells = ("th" if i == 0 else "td"), []
        for j, cell in enumerate(row):
            side = ' style="text-align:right"' if j >= len(row) - numbers else ' style="text-align:left"'
            cells.append(f"<{tag}{side}>{html.escape(str(cell))}</{tag}>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table {_TABLE}>{''.join(body)}</table>"


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{inside}</details>"


def _step_graph(value: StepGraph) -> str:
    inputs = [("input", "kind", "value")]
    for spec in value.signature.inputs[:_MOST_ROWS]:
        tensor = "" if spec.tensor is None else f"{spec.tensor.dtype}{list(spec.tensor.shape)}"
        inputs.append((spec.path, spec.kind.value, f"{tensor} {spec.placement}".strip()))
    parts = [_text(str(value)), _folded(f"{len(value.signature.inputs)} inputs", table(inputs))]
    if value.num_nodes <= 5000:
        parts.append(_folded("the whole graph", _text(value.print_readable(print_output=False))))
    return "".join(parts)


def _compiled_step(value: Any) -> str:
    parts = [f"<p>{html.escape(repr(value))}</p>"]
    if value.recompiles:
        parts.append(table([("captured again because",), *((str(each),) for each in value.recompiles[:_MOST_ROWS])]))
    if value.last is not None:
        parts.append(_step_graph(value.last))
        parts.append(_folded("memory", _memory(memory_timeline(value))))
    if value.lowering is not None:
        parts.append(_folded("compiled regions", _lowering(value.lowering)))
    return "".join(parts)


def _lowering(value: Any) -> str:
    head = ("region", "operators", "inputs", "outputs", "writes", "phases")
    regions = [(r.name, r.operators, r.inputs, r.outputs, r.writes, ", ".join(r.phases)) for r in value.regions]
    outside = [("node", "operator", "why it is outside of regions"), *value.outside[:_MOST_ROWS]]
    title = f"{len(value.outside)} nodes outside of regions"
    return table([head, *regions]) + (_folded(title, table(outside)) if value.outside else f"<p>{title}</p>")


def _check(value: Any) -> str:
    rows = [("", "", "", ""), *(row.cells for row in value.rows)]
    return (
        table(rows)
        + _folded("all of it", _text(str(value)))
        + f"<p><b>{html.escape(str(value).splitlines()[-1])}</b></p>"
    )


def _memory_report(value: MemoryReport) -> str:
    rows = [("saved for the backward", "module", "bytes")]
    rows += [(each.name, each.module_path, shown(each.bytes)) for each in value.saved[:_MOST_ROWS]]
    return _text(str(value)) + _folded(f"{len(value.saved)} saved tensors", table(rows, 1))


def _nodes(value: ShownNodes) -> str:
    hints = "" if value.rows else _text("\n".join(value.hints()))
    return f"<p>{html.escape(value.heading)}</p>" + (table(value.cells(_MOST_ROWS), 2) if value.rows else hints)


def _timeline(value: StepTimeline) -> str:
    spans = [("node", "stream", "start us", "us")]
    longest = sorted(value.spans, key=lambda span: -span.us)[:50]
    spans += [(span.name, span.stream, f"{span.start:.1f}", f"{span.us:.1f}") for span in longest]
    return _text(str(value)) + _folded("the longest nodes", table(spans, 2))


def _measured(value: MeasuredStep) -> str:
    rows = [("node or region", "operator", "phase", "module", "line", "us")]
    in_order = sorted(value.measured, key=lambda row: -row.us)[:_MOST_ROWS]
    rows += [(r.name, r.what, r.phase, r.module_path, r.line, f"{r.us:.1f}") for r in in_order]
    return _text(str(value)) + _folded("every node", table(rows, 1))


def _memory(value: StepMemoryTimeline) -> str:
    rows = [("kind", "at the peak", "most")]
    place = value.memory.peak_place
    for kind, values in value.by_kind.items():
        rows.append((kind, shown(int(values[place])), shown(int(values.max()))))
    alive = [("largest at the peak", "kind", "module", "line", "bytes")]
    alive += [(e.name, e.kind, e.module_path, e.line, shown(e.bytes)) for e in value.alive()[:50]]
    head = f"<p>peak {shown(value.peak_bytes)} at {html.escape(value.peak_at)}</p>"
    return head + _areas(value) + table(rows, 2) + _folded("tensors", table(alive, 1))


def _areas(value: StepMemoryTimeline) -> str:
    """Bytes by kind, one on top of the other, over the nodes of the step."""
    places, peak = len(value.live), max(value.peak_bytes, 1)
    columns = list(dict.fromkeys(round(i * (places - 1) / (_WIDTH - 1)) for i in range(_WIDTH))) if places else []
    below = [0.0] * len(columns)
    shapes, legend = [], []
    for n, (kind, values) in enumerate(value.by_kind.items()):
        colour = _COLOURS[n % len(_COLOURS)]
        above = [low + int(values[at]) / peak * _HEIGHT for low, at in zip(below, columns, strict=True)]
        step = _WIDTH / max(len(columns), 1)
        up = " ".join(f"{i * step:.1f},{_HEIGHT - y:.1f}" for i, y in enumerate(above))
        down = " ".join(f"{i * step:.1f},{_HEIGHT - y:.1f}" for i, y in reversed(list(enumerate(below))))
        shapes.append(f'<polygon points="{up} {down}" fill="{colour}"><title>{html.escape(kind)}</title></polygon>')
        legend.append(f'<span style="color:{colour}">■</span> {html.escape(kind)}')
        below = above
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img">{"".join(shapes)}</svg>'
    return f"{drawing}<p>{' &nbsp; '.join(legend)}</p>"


def _difference(value: Any) -> str:
    rows: list[tuple[object, ...]] = [("", "cause", "where", "line", "nodes behind it", "ms")]
    for cause in value.causes[:_MOST_ROWS]:
        where = f"{cause.module_path} ({cause.times} modules)" if cause.times > 1 else cause.module_path
        line = cause.location or ""
        rows.append((cause.kind, cause.text, where, line, cause.follows, f"{cause.us / 1e3:+.3f}"))
    head = "\n".join(line for line in str(value).splitlines()[:2])
    return _text(head) + (table(rows, 2) if value.causes else "")


def _pipeline(value: Any) -> str:
    from wholestep.simulate.timeline import svg

    return svg(value) + _text(str(value))


SHOWN: dict[str, Callable[[Any], str]] = {
    "wholestep.ir.step_graph.StepGraph": _step_graph,
    "wholestep.ir.step_graph.MemoryReport": _memory_report,
    "wholestep.shown_step.ShownStep": _compiled_step,
    "wholestep.lower.report.Lowering": _lowering,
    "wholestep.debug.check.report.CheckReport": _check,
    "wholestep.simulate.step_timeline.StepTimeline": _timeline,
    "wholestep.simulate.measured_step.MeasuredStep": _measured,
    "wholestep.simulate.timeline.Timeline": _pipeline,
    "wholestep.inspect.differences.graph_diff.GraphDiff": _difference,
    "wholestep.inspect.memory_over_time.StepMemoryTimeline": _memory,
    "wholestep.inspect.node_table.ShownNodes": _nodes,
}
"""The full name of a class to the function that writes it."""
