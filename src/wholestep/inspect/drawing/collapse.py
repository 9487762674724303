"""What a drawing of a graph shows: boxes of nodes and the edges between them.

    aten.addmm, aten.gelu, aten.addmm        ->        [ layers.0.mlp · forward · 3 nodes ]

Nodes that follow each other in the graph and belong to the same module (to some depth of its path) and phase become one
box. Runs of an order that respects the edges cannot depend on each other in a circle, so neither can boxes. An input
with one reader, or one of very many, is drawn as a line of its first reader's box when boxes are collapsed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from wholestep.compilers.origin import location_of_node, module_path, phase
from wholestep.ir.io.targets import describe_target
from wholestep.ir.readable import describe_value
from wholestep.torch_private.operators import OpOverload, op_name

MOST_BOXES = 150
"""A drawing with more boxes than this is collapsed further, as long as module paths allow it."""

MOST_INPUTS = 24
"""Where there are more, each is a line of the first box that reads it, in a drawing that is collapsed."""

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
    """One thing that is drawn."""

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
        """Boxes of modules to a depth; what optimizers do is one of its own.

        `adopt`: nodes of no module go with those of the same phase before them, in very large graphs. `run`: so many
        nodes of no module go together, where nobody knows modules.
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
