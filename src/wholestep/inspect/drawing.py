"""Draw a graph as SVG or DOT, and as PNG where graphviz is installed: `ws.inspect.draw(sg, "step.svg")`.

    aten.addmm, aten.gelu, aten.addmm        ->        [ layers.0.mlp · forward · 3 nodes ]

Consecutive nodes of the same module (to some depth of its path) and phase become one box. Boxes are runs of a
topological order, so they cannot form a cycle. When boxes are collapsed, an input with one reader, or any input where
there are very many, is a line in the box of its first reader. `layered_layout` computes where boxes and edges lie.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from torch import Tensor, fx

from wholestep.errors import OptionError, called
from wholestep.inspect.layered_layout import Placed, place
from wholestep.ir.io.arguments import describe_target
from wholestep.ir.meta import location_of_node, module_path, phase
from wholestep.ir.readable import clean, describe_value
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.operators import OpOverload, op_name

_CHARACTER = 7.1
"""Browsers without sub-pixel positioning make letters 7 wide."""
_SMALL_CHARACTER = 5.0
_WIDE = 200.0
_LINE = 15.0
_LONGEST = 46
_MARGIN = 20.0
_LEGEND = 40.0
SUFFIXES = (".svg", ".dot", ".png")
_BREAK = "\n"

MOST_BOXES = 150
"""A drawing with more boxes than this is collapsed further, as long as module paths allow it."""

MOST_INPUTS = 24
"""Where there are more, each is a line in the first box that reads it, in a collapsed drawing."""

KINDS = {
    "input": ("#e8f1fb", "#4a7ab5"),
    "constant": ("#eeeeee", "#777777"),
    "matmul": ("#fbe3d6", "#c2622d"),
    "reduction": ("#efe3f7", "#8450a8"),
    "view": ("#f7f7f7", "#aaaaaa"),
    "pointwise": ("#e5f4e3", "#4f8f4a"),
    "random": ("#fff6cc", "#b59a1c"),
    "communication": ("#ffdfe5", "#c43d5b"),
    "write": ("#ffe9c7", "#c07f10"),
    "module": ("#f2f0fa", "#5a4fa0"),
    "other": ("#ffffff", "#555555"),
    "output": ("#dcdcdc", "#333333"),
}
"""Fill and line colour of each kind of box."""

_MATMUL = "mm bmm addmm baddbmm convolution linear matmul scaled_dot_product attention conv einsum".split()
_REDUCTION = "sum mean amax amin max min softmax norm var std argmax argmin logsumexp nll_loss any all prod".split()
_VIEW = (
    "view reshape t transpose permute expand squeeze unsqueeze slice select split getitem alias detach as_strided"
).split()
_RANDOM = "rand randn bernoulli dropout normal uniform randint randperm multinomial rng".split()


@dataclass
class Box:
    """One box of a drawing."""

    key: int
    title: str
    kind: str
    lines: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    tooltip: str = ""
    phase: str = ""


@dataclass
class Drawing:
    """Boxes in an order that respects the edges, and the edges as pairs of keys with what flows along them."""

    boxes: list[Box]
    edges: dict[tuple[int, int], str]


def draw(
    graph: fx.GraphModule | StepGraph,
    path: str | Path,
    *,
    collapse: bool | int | str = "auto",
    title: str = "fx_graph",
    shapes: bool = True,
    program: str | Sequence[str] = "dot",
    source_lines: bool = False,
    node_shape: str = "box",
) -> Path:
    """Write a drawing of a graph to a file: .svg (also without a suffix), .dot or .png. Returns the file's path.

    `collapse`: False draws each node; a number draws one box per module to that depth of its path; "auto" picks the
    depth that is readable. `title`: the name of the drawing inside the file. `shapes`: show dtypes and shapes.
    `program`: the graphviz program that renders a PNG, or it and its options. `source_lines`: show the line of code of
    each node. `node_shape`: graphviz's shape of a box in DOT and PNG.
    """
    command = [program] if isinstance(program, str) else list(program)
    target = Path(path)
    target = target if target.suffix else target.with_name(target.name + ".svg")
    names = {spec.name: spec.path for spec in graph.signature.inputs} if isinstance(graph, StepGraph) else {}
    if target.suffix not in SUFFIXES:
        raise OptionError(f"a drawing cannot be written to {target.name!r}.", fix="use a name in .svg, .dot or .png.")
    if target.suffix == ".png" and shutil.which(command[0]) is None:
        raise OptionError(
            f"a PNG needs graphviz, and there is no program `{command[0]}` here.", fix="draw an .svg instead."
        )
    gm = graph.gm if isinstance(graph, StepGraph) else graph
    if not isinstance(gm, fx.GraphModule):
        raise OptionError(
            f"draw got {called(gm)}.",
            fix="give a graph: ws.capture(train_step, batch), or step.last of a compiled step.",
        )
    found = drawing(gm, collapse, names)
    if not shapes:
        found = Drawing([replace(box, lines=[]) for box in found.boxes], dict.fromkeys(found.edges, ""))
    if source_lines:
        found = Drawing([_with_source_line(box, gm.graph) for box in found.boxes], found.edges)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".svg":
        target.write_text(svg(found, title), encoding="utf-8")
    elif target.suffix == ".dot":
        target.write_text(dot(found, title, node_shape), encoding="utf-8")
    else:
        text = dot(found, title, node_shape).encode()
        subprocess.run([*command, "-Tpng", "-o", str(target)], input=text, check=True, timeout=300)
    return target


def _with_source_line(box: Box, graph: fx.Graph) -> Box:
    """A box of one node with the line of code that the node comes from."""
    if len(box.nodes) != 1:
        return box
    node = next((each for each in graph.nodes if each.name == box.nodes[0]), None)
    location = None if node is None else location_of_node(node)
    return box if location is None else replace(box, lines=[*box.lines, str(location)])


def kind_of_node(node: fx.Node) -> str:
    """The kind of a node, which gives it its colour."""
    if node.op in ("placeholder", "get_attr", "output", "call_module"):
        return {"placeholder": "input", "get_attr": "constant", "output": "output", "call_module": "module"}[node.op]
    target = node.target
    name = op_name(target) if isinstance(target, OpOverload) else describe_target(target)
    if "c10d" in name:
        return "communication"
    words = name.split("::")[-1].split(".")[0]
    if isinstance(target, OpOverload) and words.endswith("_") and not words.startswith("__"):
        return "write"
    for kind, known in (("random", _RANDOM), ("matmul", _MATMUL), ("reduction", _REDUCTION), ("view", _VIEW)):
        if any(part == words or part in words.split("_") or words.startswith(part + "_") for part in known):
            return kind
    return "pointwise" if name.startswith(("aten::", "prims::", "_operator", "operator")) else "other"


def drawing(gm: fx.GraphModule, collapse: bool | int | str = "auto", names: Mapping[str, str] | None = None) -> Drawing:
    """What to draw. `collapse`: False for each node, the depth of module paths, or "auto". `names`: of placeholders."""
    return _Drawer(list(gm.graph.nodes), names or {}).draw(collapse)


class _Drawer:
    """Draws the nodes of one graph."""

    def __init__(self, nodes: list[fx.Node], names: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._names = names

    def draw(self, collapse: bool | int | str) -> Drawing:
        each: list[tuple[int, ...]] = [(i,) for i in range(len(self._nodes))]
        if collapse is False or (collapse == "auto" and len(each) <= MOST_BOXES // 2):
            return self._drawn(each, fold_inputs=False)
        if collapse != "auto":
            return self._collapsed(1000 if collapse is True else int(collapse))
        deepest = max((module_path(node).count(".") + 1 for node in self._nodes), default=1)
        found = self._collapsed(deepest)
        for adopt, depth in ((adopt, depth) for adopt in (False, True) for depth in range(deepest, 0, -1)):
            if len(found.boxes) <= MOST_BOXES:
                break
            found = self._collapsed(depth, adopt=adopt)
        if len(found.boxes) > MOST_BOXES:
            found = self._collapsed(1, adopt=True, run=-(-2 * len(found.boxes) // MOST_BOXES))
        return found

    def _collapsed(self, depth: int, *, adopt: bool = False, run: int = 1) -> Drawing:
        """One box per module to a depth of its path; the optimizer is a box too.

        `adopt`: nodes without a module join those of the same phase before them, in very large graphs. `run`: how many
        nodes without a module form one box, where modules are not recorded.
        """
        groups: list[list[int]] = []
        last: tuple[str, str] | None = None
        for i, node in enumerate(self._nodes):
            path = ".".join(module_path(node).split(".")[:depth])
            is_work = node.op in ("call_function", "get_attr", "call_module")
            is_named = bool(path) or phase(node) not in ("forward", "backward")
            key = (path, phase(node)) if is_named and is_work else None
            is_like_last = adopt and last is not None and last[1] == phase(node)
            if not is_named and is_work and (is_like_last or node.op == "get_attr"):
                key = last
            elif not is_named and is_work and run > 1:
                key = ("", phase(node))
            if key is not None and key == last and key[0] == "" and is_work and 1 < run <= len(groups[-1]):
                groups.append([i])
            elif key is not None and key == last:
                groups[-1].append(i)
            else:
                groups.append([i])
            last = key
        return self._drawn([tuple(group) for group in groups], fold_inputs=True, depth=depth)

    def _drawn(self, groups: list[tuple[int, ...]], *, fold_inputs: bool, depth: int = 0) -> Drawing:
        owner = {self._nodes[i]: key for key, group in enumerate(groups) for i in group}
        folded: dict[int, list[str]] = {}
        hidden: set[int] = set()
        inputs = [node for node in self._nodes if node.op == "placeholder"] if fold_inputs else []
        for node in inputs:
            readers = sorted({owner[user] for user in node.users if user.op != "output"})
            if len(readers) == 1 or (len(inputs) > MOST_INPUTS and readers) or not node.users:
                hidden.add(owner[node])
                others = f" → {len(readers) - 1} more" if len(readers) > 1 else ""
                text = f"{self._name(node)}: {describe_value(node.meta.get('val'))}{others}"
                for reader in readers[:1]:
                    folded.setdefault(reader, []).append(text)
        boxes = []
        for key, group in enumerate(groups):
            if key not in hidden:
                members = [self._nodes[i] for i in group]
                box = self._box_of_node(key, members[0]) if len(members) == 1 else _box_of_nodes(key, members, depth)
                given = folded.get(key, [])
                box.lines += given[:4] + ([f"and {_count(len(given) - 4, 'input')} more"] if len(given) > 4 else [])
                boxes.append(box)
        edges: dict[tuple[int, int], str] = {}
        for node, key in owner.items():
            for user in node.users:
                if owner[user] != key and key not in hidden:
                    edges.setdefault((key, owner[user]), describe_value(node.meta.get("val")))
        return Drawing(boxes, edges)

    def _box_of_node(self, key: int, node: fx.Node) -> Box:
        value = node.meta.get("val")
        title = self._name(node) if node.op in ("placeholder", "get_attr", "output") else _short_target(node)
        lines = [describe_value(value)] if value is not None and node.op != "output" else []
        where = [part for part in (module_path(node), str(location_of_node(node) or "")) if part]
        strides = f" stride {tuple(value.stride())}" if isinstance(value, Tensor) and not value.is_sparse else ""
        tooltip = "\n".join([f"{node.name}{strides}", *where])
        return Box(key, title, kind_of_node(node), lines, [node.name], tooltip, phase(node))

    def _name(self, node: fx.Node) -> str:
        return self._names.get(node.name, node.name)


def _box_of_nodes(key: int, members: list[fx.Node], depth: int) -> Box:
    path = ".".join(module_path(members[0]).split(".")[:depth])
    counts = Counter(_short_target(node) for node in members)
    shown = [f"{name} ×{count}" if count > 1 else name for name, count in counts.most_common(3)]
    more = [f"and {_count(len(counts) - 3, 'operator')} more"] if len(counts) > 3 else []
    title = " · ".join([*([path] if path else []), phase(members[0]), f"{len(members)} nodes"])
    kinds = [kind_of_node(node) for node in members]
    kind = next((each for each in ("communication", "random", "matmul", "write") if each in kinds), "module")
    names = [node.name for node in members]
    return Box(key, title, kind, [", ".join(shown), *more], names, "\n".join(_wrapped(names)), phase(members[0]))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _wrapped(names: Iterable[str], width: int = 8) -> list[str]:
    names = list(names)
    return [", ".join(names[i : i + width]) for i in range(0, len(names), width)][:20]


def _short_target(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return op_name(node.target).split("::")[-1].split(".")[0]
    return str(node.target) if isinstance(node.target, str) else describe_target(node.target).rsplit(".", 1)[-1]


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


def dot(found: Drawing, name: str = "fx_graph", node_shape: str = "box") -> str:
    """The drawing as DOT text, for graphviz and everything that reads it."""
    lines = [
        f'digraph "{_quoted(name)}" {{',
        f'  node [shape="{_quoted(node_shape)}", style="filled,rounded", fontname="monospace", fontsize=10];',
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
            # An edge over half of the drawing would hide it: both ends name the other one instead.
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            x = left + width / 2 + 8 if width > _WIDE else left
            length = max(int((left + width - x) / _SMALL_CHARACTER) - len(more), 8)
            note = f"{sign} {_cut(titles[keys[0]].rsplit(' · ', 1)[0], length)}{more}"
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
    """The end of a text: the end of a module path says more than its beginning."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


def _clean(text: str) -> str:
    return "\n".join(clean(line) for line in text.split("\n"))


def _quoted(text: str) -> str:
    return clean(text).replace("\\", "\\\\").replace('"', '\\"')
