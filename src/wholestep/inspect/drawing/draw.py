"""Draw a graph as SVG and DOT without any program from elsewhere, and as PNG where graphviz is installed.

    draw_graph_compile("forward")        a compiler that writes forward.svg and forward.dot, and runs the graph as it is
    draw_graph(gm, "step.svg")           just the drawing

What is in the drawing is decided in `collapse`, where it lies in `layout`.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from torch import fx

from wholestep.compilers.boxed import Compiled, Compiler, graph_module
from wholestep.compilers.plain import nop
from wholestep.errors import OptionError
from wholestep.inspect.drawing.collapse import KINDS, Box, Drawing, drawing
from wholestep.inspect.drawing.layout import Placed, place
from wholestep.ir.readable import clean
from wholestep.ir.step_graph import StepGraph

_CHARACTER = 7.1
"""Browsers that do not place letters between pixels make them 7 wide."""
_SMALL_CHARACTER = 5.0
_WIDE = 200.0
_LINE = 15.0
_LONGEST = 46
_MARGIN = 20.0
_LEGEND = 40.0
_ENDINGS = (".svg", ".dot", ".png")
_BREAK = "\n"


def draw_graph_compile(name: str, *, collapse: bool | int | str = "auto") -> Compiler:
    """A compiler that draws each graph it is given: `name`.svg and `name`.dot, then `name`_1.svg and so on.

    A name that ends in .svg, .dot or .png gives only that file. `collapse` is that of `draw_graph`.
    """
    path = Path(name)
    numbers = itertools.count()

    def compiler(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = ()) -> Compiled:
        number = next(numbers)
        ending = path.suffix if path.suffix in _ENDINGS else ""
        base = path.with_suffix("") if ending else path
        target = base.with_name(f"{base.name}_{number}" if number else base.name)
        if ending:
            draw_graph(fx_g, target.with_name(target.name + ending), collapse=collapse)
        else:
            for each in _ENDINGS[: 3 if shutil.which("dot") else 2]:
                draw_graph(fx_g, target.with_name(target.name + each), collapse=collapse)
        return nop(fx_g)

    return compiler


def draw_graph(
    traced: fx.GraphModule | StepGraph,
    fname: str | Path,
    figname: str = "fx_graph",
    clear_meta: bool = False,
    prog: str | None = None,
    *,
    collapse: bool | int | str = "auto",
) -> Path:
    """Write a drawing of a graph to a file whose ending says how: .svg (also without one), .dot or .png.

    `collapse`: False draws each node; a number draws a box for each module to that depth of its path; "auto" does
    what is readable. `figname`: the drawing's name inside the file. `clear_meta`: leave shapes and types out. `prog`:
    the program of graphviz that makes the PNG, `dot` by default.
    """
    target = Path(fname)
    target = target if target.suffix else target.with_name(target.name + ".svg")
    program = prog or "dot"
    names = {spec.name: spec.path for spec in traced.signature.inputs} if isinstance(traced, StepGraph) else {}
    found = drawing(graph_module(traced), collapse, names)
    if target.suffix not in _ENDINGS:
        raise OptionError(f"a drawing cannot be written to {target.name!r}.", fix="use a name in .svg, .dot or .png.")
    if target.suffix == ".png" and shutil.which(program) is None:
        raise OptionError(
            f"a PNG needs graphviz, and there is no program `{program}` here.", fix="draw an .svg instead."
        )
    if clear_meta:
        found = Drawing([replace(box, lines=[]) for box in found.boxes], dict.fromkeys(found.edges, ""))
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".svg":
        target.write_text(svg(found, figname), encoding="utf-8")
    elif target.suffix == ".dot":
        target.write_text(dot(found, figname), encoding="utf-8")
    else:
        text = dot(found, figname).encode()
        subprocess.run([program, "-Tpng", "-o", str(target)], input=text, check=True, timeout=300)
    return target


def svg(found: Drawing, name: str = "fx_graph") -> str:
    """The drawing as SVG text; hovering over a box shows its nodes and lines of code."""
    size = {box.key: _size(box) for box in found.boxes}
    placed = place([box.key for box in found.boxes], list(found.edges), size)
    far_out: dict[int, list[int]] = {}
    far_in: dict[int, list[int]] = {}
    titles = {box.key: box.title for box in found.boxes}
    for source, target in placed.far:
        far_out.setdefault(source, []).append(target)
        far_in.setdefault(target, []).append(source)
    width, height = placed.width + 2 * _MARGIN, placed.height + 2 * _MARGIN + _LEGEND
    width = max(width, 110.0 * len({box.kind for box in found.boxes}) + 2 * _MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="DejaVu Sans Mono, Menlo, monospace" font-size="11">',
        f"<title>{escape(_clean(name))}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#888"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *_legend(found),
        f'<g transform="translate({_MARGIN} {_MARGIN + _LEGEND})">',
        *(_edge(placed, edge, size, label) for edge, label in found.edges.items() if edge in placed.paths),
        *(_svg_box(box, placed, size[box.key], far_in, far_out, titles) for box in found.boxes),
        "</g></svg>\n",
    ]
    return "\n".join(parts)


def dot(found: Drawing, name: str = "fx_graph") -> str:
    """The drawing as DOT text, for graphviz and everything that reads it."""
    lines = [
        f'digraph "{_quoted(name)}" {{',
        '  node [shape=box, style="filled,rounded", fontname="monospace", fontsize=10];',
    ]
    for box in found.boxes:
        fill, line = KINDS[box.kind]
        label = "\\n".join(_quoted(text) for text in (box.title, *box.lines))
        lines.append(f'  n{box.key} [label="{label}", fillcolor="{fill}", color="{line}"];')
    lines += [f'  n{a} -> n{b} [tooltip="{_quoted(text)}"];' for (a, b), text in found.edges.items()]
    return "\n".join([*lines, "}", ""])


def _legend(found: Drawing) -> list[str]:
    used = {box.kind for box in found.boxes}
    parts, x = [], _MARGIN
    for kind, (fill, line) in KINDS.items():
        if kind in used:
            parts.append(
                f'<rect x="{x:.0f}" y="14" width="14" height="14" rx="3" fill="{fill}" stroke="{line}"/>'
                f'<text x="{x + 20:.0f}" y="25">{kind}</text>'
            )
            x += 110
    return parts


def _size(box: Box) -> tuple[float, float]:
    texts = [_cut(text) for text in (box.title, *box.lines)]
    return max(len(text) for text in texts) * _CHARACTER + 16, len(texts) * _LINE + 8


def _svg_box(
    box: Box,
    placed: Placed,
    size: tuple[float, float],
    far_in: dict[int, list[int]],
    far_out: dict[int, list[int]],
    titles: dict[int, str],
) -> str:
    fill, line = KINDS[box.kind]
    width, height = size
    left, top = placed.x[box.key] - width / 2, placed.y[box.key] - height / 2
    dash = ' stroke-dasharray="4 2"' if box.phase == "backward" else ""
    tooltip = [box.tooltip]
    tooltip += [f"from afar: {titles[key]}" for key in far_in.get(box.key, [])[:10]]
    tooltip += [f"goes far: {titles[key]}" for key in far_out.get(box.key, [])[:10]]
    parts = [
        f"<g><title>{escape(_clean(_BREAK.join(tooltip)))}</title>",
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5" fill="{fill}" '
        f'stroke="{line}"{dash}/>',
    ]
    for i, text in enumerate((box.title, *box.lines)):
        style = ' font-weight="bold"' if i == 0 else ' fill="#444"'
        parts.append(
            f'<text x="{left + 8:.1f}" y="{top + 16 + i * _LINE:.1f}"{style}>{escape(_clean(_cut(text)))}</text>'
        )
    for keys, y, sign in ((far_in.get(box.key), top - 4, "←"), (far_out.get(box.key), top + height + 11, "→")):
        if keys:
            # Lines over half of the drawing would hide it: their ends say where they lead, beside the other lines.
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            x = left + width / 2 + 8 if width > _WIDE else left
            room = max(int((left + width - x) / _SMALL_CHARACTER) - len(more), 8)
            note = f"{sign} {_cut(titles[keys[0]].rsplit(' · ', 1)[0], room)}{more}"
            parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="9" fill="#a33">{escape(_clean(note))}</text>')
    return "".join([*parts, "</g>"])


def _edge(placed: Placed, edge: tuple[int, int], size: dict[int, tuple[float, float]], label: str) -> str:
    points = list(placed.paths[edge])
    points[0] = (points[0][0], points[0][1] + size[edge[0]][1] / 2)
    points[-1] = (points[-1][0], points[-1][1] - size[edge[1]][1] / 2)
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
    return (
        f'<path d={quoteattr(" ".join(path))} fill="none" stroke="#999" stroke-width="1" '
        f'marker-end="url(#tip)"><title>{escape(_clean(label))}</title></path>'
    )


def _cut(text: str, length: int = _LONGEST) -> str:
    """The end of a text: that of a module's path says more than its beginning."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


def _clean(text: str) -> str:
    return "\n".join(clean(line) for line in text.split("\n"))


def _quoted(text: str) -> str:
    return clean(text).replace("\\", "\\\\").replace('"', '\\"')
