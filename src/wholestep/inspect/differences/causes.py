"""What two graphs differ by, in the words of a training step, and which differences only follow from others.

First what has no counterpart: inputs, written state, collectives, and clusters of nodes of one module, which are called
what they are (another attention backend, a cast, a recomputation, updates that are not in place, a fused operator in
parts). Then pairs of nodes in the order of the second graph: a pair that differs follows from the cause of what it
reads, or of sizes that changed by the same ratio (`expand(.., [16, 8])` reads nothing of that size); if there is none,
it is a cause itself.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import fx

from wholestep.errors import Location
from wholestep.inspect.differences.correspondence import Correspondence
from wholestep.inspect.differences.graph_diff import ChangeCause, GraphChange
from wholestep.inspect.differences.graph_nodes import ComparedGraph, ComparedNode, without_device_index
from wholestep.ir.collectives import communication
from wholestep.ir.effects import is_collective, written_inputs
from wholestep.ir.io.result_tree import render
from wholestep.ir.meta import location_of_node
from wholestep.ir.signature import InputSpec, TensorSpec
from wholestep.ir.step_graph import shown
from wholestep.simulate.cost_model import sent_bytes

_CASTS = frozenset({"_to_copy", "to", "convert_element_type", "type_as"})
_PACKING = frozenset(
    "cat split split_with_sizes view reshape getitem slice constant_pad_nd flatten chunk narrow copy_ as_strided t "
    "empty new_empty clone wait_tensor div".split()
)
_MINOR = _PACKING | {"_unsafe_view", "transpose", "expand", "permute", "unsqueeze", "squeeze", "constant", "detach"}
"""Named last."""
_TAIL = frozenset({"optimizer", "epilogue"})
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_DTYPE = re.compile(r"\b(?:b?f|i|u|c|b)\d+(?:e\d+m\d+\w*)?(?=\[)")
_SHOWN = 6
_SAME_BYTES = 0.1
"""By how much the bytes of the same data may differ in buckets: they are padded."""


@dataclass(eq=False)
class _Cause:
    """A cause under construction."""

    kind: ChangeCause
    text: str
    a: list[ComparedNode] = field(default_factory=list)
    b: list[ComparedNode] = field(default_factory=list)
    module: str = ""
    phase: str = ""
    follows: int = 0
    us: float = 0.0
    dtypes: Counter[tuple[str, str]] = field(default_factory=Counter)


def find_causes(
    found: Correspondence, us_a: Sequence[float], us_b: Sequence[float], labels: tuple[str, str]
) -> list[GraphChange]:
    """The causes of all differences, the most important first. `us_a`, `us_b`: predicted time of each node."""
    return _Causes(found, us_a, us_b, labels).all()


class _Causes:
    def __init__(
        self, found: Correspondence, us_a: Sequence[float], us_b: Sequence[float], labels: tuple[str, str]
    ) -> None:
        self.found, self.us_a, self.us_b = found, us_a, us_b
        self.a, self.b = found.a, found.b
        self.first, self.second = labels
        self.causes: list[_Cause] = []
        self.of_a: dict[int, _Cause] = {}
        self.of_b: dict[int, _Cause] = {}
        self.ratios: dict[Fraction, _Cause] = {}
        """By how much sizes of inputs changed."""
        self.symbolic: _Cause | None = None
        """The input of which a size became symbolic, or fixed."""

    def all(self) -> list[GraphChange]:
        self._inputs()
        self._state()
        self._collectives()
        self._clusters()
        self._pairs()
        self._order()
        self._result()
        return _merged(self.causes)

    def _add(
        self, kind: ChangeCause, text: str, a: Iterable[ComparedNode] = (), b: Iterable[ComparedNode] = ()
    ) -> _Cause:
        made = _Cause(kind, text, list(a), list(b))
        made.module = next((node.module for node in (*made.b, *made.a) if node.module), "")
        made.phase = ", ".join(dict.fromkeys(node.phase for node in (*made.a, *made.b)))
        made.us = sum(self.us_b[node.i] for node in made.b) - sum(self.us_a[node.i] for node in made.a)
        self.of_a.update((node.i, made) for node in made.a)
        self.of_b.update((node.i, made) for node in made.b)
        self.causes.append(made)
        return made

    def _apart(self, one: str, other: str) -> str:
        return f"{one or 'nothing'} in {self.first}, {other or 'nothing'} in {self.second}"

    def _inputs(self) -> None:
        specs = [{spec.path: spec for spec in graph.signature.inputs} for graph in (self.a, self.b)]
        nodes = [_placeholders(self.a), _placeholders(self.b)]
        alone: dict[tuple[bool, str], list[str]] = defaultdict(list)
        for path in dict.fromkeys((*nodes[0], *nodes[1])):
            x, y = nodes[0].get(path), nodes[1].get(path)
            one, other = specs[0].get(path), specs[1].get(path)
            if x is None or y is None:
                spec = one or other
                alone[x is not None, spec.kind.value if spec is not None else "input"].append(path)
                continue
            texts = [without_device_index(_spec(spec)) if spec else node.value for spec, node in ((one, x), (other, y))]
            if texts[0] != texts[1] or x.value != y.value:
                if texts[0] == texts[1]:
                    texts = [x.value, y.value]
                named = path if one is None or one.kind.value == path else f"{one.kind.value} {path}"
                self._sizes(self._add(ChangeCause.INPUT, f"{named}: {self._apart(*texts)}", [x], [y]), x, y)
        for (in_a, kind), paths in alone.items():
            here = nodes[0] if in_a else nodes[1]
            who = self.first if in_a else self.second
            text = f"only {who} reads {_listed(paths)} ({kind})"
            found = [here[path] for path in paths]
            self._add(ChangeCause.INPUT, text, found if in_a else (), () if in_a else found)

    def _sizes(self, cause: _Cause, x: ComparedNode, y: ComparedNode) -> None:
        for old, new in zip(_shape(x.node), _shape(y.node), strict=False):
            if type(old) is int and type(new) is int:
                if old != new and old and new:
                    self.ratios.setdefault(Fraction(new, old), cause)
            elif str(old) != str(new):
                self.symbolic = self.symbolic or cause

    def _state(self) -> None:
        written = [_written(graph) for graph in (self.a, self.b)]
        for which, graph, who in ((0, self.a, self.first), (1, self.b, self.second)):
            paths = [path for path in written[which] if path not in written[1 - which]]
            if not paths:
                continue
            text = f"only {who} writes {_listed(paths)}"
            left = self.found.to_b if which == 0 else self.found.to_a
            copies = [
                node
                for node in graph.nodes
                if node.i not in left and node.node.op == "call_function" and _input_of(node.node, graph) in paths
            ]
            self._add(ChangeCause.STATE, text, copies if which == 0 else (), copies if which == 1 else ())
        changes = [{(c.path, c.kind.value) for c in graph.signature.state_changes} for graph in (self.a, self.b)]
        alone = (self.first, changes[0] - changes[1]), (self.second, changes[1] - changes[0])
        for who, only in alone:
            paths = [f"{path} ({kind})" for path, kind in sorted(only)]
            if paths:
                self._add(ChangeCause.STATE, f"only {who} changes {_listed(paths)}")

    def _collectives(self) -> None:
        """Buckets first, by kind and group: as many bytes in another number of collectives."""
        sides = [[n for n in g.nodes if _communicates(n)] for g in (self.a, self.b)]
        by_kind: list[dict[tuple[str, str], list[ComparedNode]]] = [defaultdict(list), defaultdict(list)]
        for which, side in enumerate(sides):
            for node in side:
                by_kind[which][_kind(node), _scalars(node)].append(node)
        for key in dict.fromkeys((*by_kind[0], *by_kind[1])):
            one, other = by_kind[0].get(key, []), by_kind[1].get(key, [])
            moved = [sum(sent_bytes(node.node) for node in side) for side in (one, other)]
            if one and other and len(one) != len(other) and abs(moved[0] - moved[1]) <= _SAME_BYTES * max(moved):
                texts = [f"{len(s)} of {shown(count)} in all" for s, count in zip((one, other), moved, strict=True)]
                text = f"{key[0]} ({key[1]}): {self._apart(*texts)}"
                mine = [n for n in one if self._is_apart(n, self.found.to_b, self.b)]
                theirs = [n for n in other if self._is_apart(n, self.found.to_a, self.a)]
                self._with_packing(self._add(ChangeCause.BUCKET, text, mine, theirs))
        missing = [n for n in sides[0] if n.i not in self.found.to_b and n.i not in self.of_a]
        new = [n for n in sides[1] if n.i not in self.found.to_a and n.i not in self.of_b]
        for graph, who, nodes in ((self.a, self.first, missing), (self.b, self.second, new)):
            said = {each.node: each.text for each in communication(graph.gm, graph.signature)} if nodes else {}
            for node in nodes:
                text = f"only {who} has {said.get(node.node.name, node.short)}"
                in_a = [node] if graph is self.a else []
                self._with_packing(self._add(ChangeCause.COLLECTIVE, text, in_a, [] if in_a else [node]))

    def _is_apart(self, node: ComparedNode, pairs: dict[int, int], graph: ComparedGraph) -> bool:
        other = pairs.get(node.i)
        return other is None or graph.nodes[other].value != node.value

    def _with_packing(self, cause: _Cause) -> None:
        """Casts, views, cat and split around collectives without a counterpart belong to them."""
        for graph, start, of, pairs in (
            (self.a, cause.a, self.of_a, self.found.to_b),
            (self.b, cause.b, self.of_b, self.found.to_a),
        ):
            queue = list(start)
            seen = {node.i for node in queue}
            for node in queue:
                near = [graph.number[user] for user in node.node.users] + list(node.sources)
                for i in near:
                    other = graph.nodes[i]
                    if i in seen or other.short not in _PACKING or (i in pairs and other.short != "wait_tensor"):
                        continue
                    seen.add(i)
                    queue.append(other)
                    if i not in pairs:
                        of[i] = cause

    def _clusters(self) -> None:
        left = [n for n in self.found.only_in_a if n.i not in self.of_a and n.node.op != "placeholder"]
        right = [n for n in self.found.only_in_b if n.i not in self.of_b and n.node.op != "placeholder"]
        if self.symbolic is not None:
            left, right = self._without_sizes(left, self.of_a), self._without_sizes(right, self.of_b)
        groups: dict[tuple[str, str], tuple[list[ComparedNode], list[ComparedNode]]] = {}
        for which, nodes in enumerate((left, right)):
            for node in nodes:
                groups.setdefault(_place(node), ([], []))[which].append(node)
        for (module, _), (one, other) in list(groups.items()):
            # A fused operator is often a module of its own, and its parts are code of the module around it.
            above = groups.get((module.rpartition(".")[0], "")) if module else None
            if above is not None and ((not other and not above[0]) or (not one and not above[1])):
                above[0].extend(one)
                above[1].extend(other)
                one.clear()
                other.clear()
        made_twice = Counter(n.meaning for n in self.a.nodes), Counter(n.meaning for n in self.b.nodes)
        for one, other in groups.values():
            self._cluster(one, other, made_twice)

    def _without_sizes(self, nodes: list[ComparedNode], of: dict[int, _Cause]) -> list[ComparedNode]:
        """Without the arithmetic on sizes, which comes with a size that became symbolic."""
        sizes = [node for node in nodes if node.value.startswith("int") or node.short.startswith("sym_")]
        assert self.symbolic is not None
        of.update((node.i, self.symbolic) for node in sizes)
        self.symbolic.follows += len(sizes)
        return [node for node in nodes if node.i not in of]

    def _cluster(
        self, one: list[ComparedNode], other: list[ComparedNode], meanings: tuple[Counter[bytes], Counter[bytes]]
    ) -> None:
        """Name what became of the nodes of one module."""
        again = _recomputed(one, *meanings), _recomputed(other, *reversed(meanings))
        if any(again):
            text = self._apart(*map(_operators, again))
            self._add(ChangeCause.RECOMPUTE, f"recomputed in the backward: {text}", *again)
            one, other = _without(one, again[0]), _without(other, again[1])
        names = [Counter(node.short for node in side) for side in (one, other)]
        if not names[0] and not names[1]:
            return
        text = self._apart(_operators(one), _operators(other))
        if any("attention" in name for side in names for name in side) or self._is_attention(one, other):
            self._add(ChangeCause.ATTENTION, text, one, other)
            return
        if _in_place(*names) or _in_place(*names[::-1]):
            who = self.first if _in_place(*names) else self.second
            self._add(ChangeCause.IN_PLACE, f"only {who} updates without a copy: {text}", one, other)
            return
        casts = [n for n in one if n.short in _CASTS], [n for n in other if n.short in _CASTS]
        if any(casts):
            self._add(ChangeCause.DTYPE, f"casts {self._apart(*map(_casts, casts))}", *casts)
            one, other = _without(one, casts[0]), _without(other, casts[1])
            text = self._apart(_operators(one), _operators(other))
        if not one and not other:
            return
        few, many = sorted(sum(node.short not in _MINOR for node in side) for side in (one, other))
        fused = few and many >= 2 * few and many > 2
        self._add(ChangeCause.FUSION if fused else ChangeCause.OPERATORS, text, one, other)

    def _is_attention(self, *sides: Sequence[ComparedNode]) -> bool:
        """Whether the nodes are a softmax between two batched products of one module."""
        for nodes, graph in zip(sides, (self.a, self.b), strict=True):
            for node in nodes:
                if "softmax" in node.short:
                    near = [graph.number[user] for user in _behind(node.node)] + list(_before(node, graph))
                    if sum(graph.nodes[i].short in ("bmm", "matmul", "baddbmm") for i in near) > 1:
                        return True
        return False

    def _pairs(self) -> None:
        for y in self.b.nodes:
            i = self.found.to_a.get(y.i)
            if i is None or y.i in self.of_b or y.node.op in ("placeholder", "output"):
                continue
            x = self.a.nodes[i]
            edges = tuple(self.found.to_b.get(s, -1) for s in x.sources) != y.sources
            if x.constants == y.constants and x.value == y.value and not edges and x.operator == y.operator:
                continue
            found = [self.of_b[s] for s in y.sources if s in self.of_b]
            found += [self.of_a[s] for s in x.sources if s in self.of_a]
            own = x.constants != y.constants and not self._is_resized(x.constants, y.constants)
            if own and (x.value == y.value or not found) and not (edges and found):
                self._constant(x, y)
            elif found or self._resized_by(x, y) is not None:
                self._follows(found[0] if found else self._resized_by(x, y), x, y)  # type: ignore[arg-type]
            elif (cast := self._cast_near(x, y)) is not None:
                self._follows(cast, x, y)
            elif edges:
                reads = [_reads(side, graph) for side, graph in ((x, self.a), (y, self.b))]
                self._add(ChangeCause.EDGE, f"{y.short} reads {self._apart(*reads)}", [x], [y])
            else:
                kind = ChangeCause.DTYPE if _dtypes(x) != _dtypes(y) else ChangeCause.SHAPE
                self._add(kind, f"{y.short} gives {self._apart(x.value, y.value)}", [x], [y])

    def _cast_near(self, x: ComparedNode, y: ComparedNode) -> _Cause | None:
        """The casts of the same module or of the one around it: which of several casts is gone cannot be told."""
        if _dtypes(x) == _dtypes(y):
            return None
        casts = [cause for cause in self.causes if cause.kind is ChangeCause.DTYPE and (cause.a or cause.b)]
        around = y.module.rpartition(".")[0]
        return next((cause for cause in casts if cause.module and cause.module in (y.module, around)), None)

    def _constant(self, x: ComparedNode, y: ComparedNode) -> None:
        kind = ChangeCause.REDUCE_OP if _communicates(x) else ChangeCause.CONSTANT
        self._add(kind, f"{y.short}: {self._apart(*_differing(x.constants, y.constants))}", [x], [y])

    def _follows(self, cause: _Cause, x: ComparedNode, y: ComparedNode) -> None:
        cause.follows += 1
        cause.us += self.us_b[y.i] - self.us_a[x.i]
        if _dtypes(x) != _dtypes(y):
            cause.dtypes[", ".join(_dtypes(x)), ", ".join(_dtypes(y))] += 1
        self.of_b[y.i] = cause

    def _is_resized(self, one: str, other: str) -> bool:
        """Whether constants differ only by sizes that changed as those of an input."""
        if self.symbolic is not None and "%" in one + other:
            return True
        return self._ratio(one, other) is not None

    def _resized_by(self, x: ComparedNode, y: ComparedNode) -> _Cause | None:
        if self.symbolic is not None and (
            re.search(r"\bs\d+\b", x.value + y.value) or "%" in x.constants + y.constants
        ):
            return self.symbolic
        return self._ratio(x.constants, y.constants) or self._ratio(x.value, y.value)

    def _ratio(self, one: str, other: str) -> _Cause | None:
        numbers = [_NUMBER.findall(text) for text in (one, other)]
        if one == other or len(numbers[0]) != len(numbers[1]) or _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
            return None
        found = None
        for old, new in zip(*numbers, strict=True):
            if old != new:
                x, y = Fraction(old), Fraction(new)
                found = self.ratios.get(y / x) if x else None
                found = found or (self.ratios.get(x / y) if y else None)
                if found is None:
                    return None
        return found

    def _order(self) -> None:
        moved = [self.b.nodes[j] for j in self.found.moved()]
        issues = [n for n in self.b.nodes if _communicates(n) and n.i in self.found.to_a and n.i not in self.of_b]
        before = sorted(issues, key=lambda n: self.found.to_a[n.i])
        swapped = next(((k, x, y) for k, (x, y) in enumerate(zip(before, issues, strict=True)) if x is not y), None)
        texts = {each.node: each.text for each in communication(self.b.gm, self.b.signature)} if issues else {}
        if swapped is not None:
            k, x, y = swapped
            names = [texts.get(n.node.name, n.short) for n in (x, y)]
            text = f"collectives are issued in another order: number {k} is {self._apart(*names)}"
            self._add(ChangeCause.ORDER, text, [self.a.nodes[self.found.to_a[y.i]]], [y])
            return
        talks = [n for n in moved if n.communicates]
        bucketed = any(cause.kind is ChangeCause.BUCKET for cause in self.causes)
        if moved and not bucketed and (talks or not self.causes):
            named = _listed([n.node.name for n in (talks or moved)])
            text = f"{len(moved)} nodes run at another place, {len(talks)} of them communication: {named}"
            self._add(ChangeCause.ORDER, text, [self.a.nodes[self.found.to_a[n.i]] for n in moved], moved)

    def _result(self) -> None:
        texts = [render(g.signature.result) if g.signature.result is not None else "" for g in (self.a, self.b)]
        kinds = [[(o.kind.value, o.path) for o in g.signature.outputs] for g in (self.a, self.b)]
        if texts[0] != texts[1]:
            self._add(ChangeCause.OUTPUT, f"the step returns {self._apart(*texts)}")
        elif kinds[0] != kinds[1]:
            counts = [", ".join(f"{n} {kind}" for kind, n in Counter(k for k, _ in side).items()) for side in kinds]
            if counts[0] != counts[1]:
                self._add(ChangeCause.OUTPUT, f"outputs of the graph: {self._apart(*counts)}")


def lowering_change(a: Any, b: Any, labels: tuple[str, str]) -> list[GraphChange]:
    """What compiled steps differ by in their regions."""
    found: list[Any] = [getattr(each, "lowering", None) for each in (a, b)]
    if found[0] is None or found[1] is None or a is b:
        return []
    counts = [
        f"{len(each.regions)} compiled regions with {sum(r.operators for r in each.regions)} operators in all and "
        f"{len(each.outside)} nodes outside"
        for each in found
    ]
    if counts[0] == counts[1]:
        return []
    reasons = [Counter(reason for _, _, reason in each.outside) for each in found]
    sides = ((labels[1], reasons[1] - reasons[0]), (labels[0], reasons[0] - reasons[1]))
    more = [f"{n} more outside in {who}: {why}" for who, extra in sides for why, n in extra.most_common(2)]
    text = f"{counts[0]} in {labels[0]}, {counts[1]} in {labels[1]}"
    return [GraphChange(ChangeCause.LOWERING, "; ".join([text, *more]))]


_IMPORTANCE = list(ChangeCause)


def _merged(causes: Iterable[_Cause]) -> list[GraphChange]:
    """Equal causes in several layers as one."""
    groups: dict[Any, list[_Cause]] = {}
    for cause in causes:
        key = cause.kind, cause.text, re.sub(r"\b\d+\b", "*", cause.module), cause.phase, cause.dtypes.keys()
        groups.setdefault((*key[:4], tuple(sorted(key[4]))), []).append(cause)
    found = []
    for (kind, text, module, stage, _), each in groups.items():
        dtypes: Counter[tuple[str, str]] = Counter()
        for cause in each:
            dtypes.update(cause.dtypes)
        changed = [f"{n} nodes behind it are {new} instead of {old}" for (old, new), n in dtypes.most_common(2)]
        if dtypes and kind in (ChangeCause.OPERATORS, ChangeCause.FUSION) and not each[0].a:
            kind = ChangeCause.DTYPE
        modules = dict.fromkeys(cause.module for cause in each)
        found.append(
            GraphChange(
                kind,
                "; ".join([text, *changed]),
                tuple(node.node.name for cause in each for node in cause.a),
                tuple(node.node.name for cause in each for node in cause.b),
                module if len(modules) > 1 else each[0].module,
                stage,
                _location(each[0]),
                len(modules),
                sum(cause.follows for cause in each),
                sum(cause.us for cause in each),
            )
        )
    return sorted(found, key=lambda change: (_IMPORTANCE.index(change.kind), -change.follows))


def _location(cause: _Cause) -> Location | None:
    nodes = (node.node for node in (*cause.b, *cause.a))
    return next((found for node in nodes if (found := location_of_node(node, user_only=True)) is not None), None)


def _placeholders(graph: ComparedGraph) -> dict[str, ComparedNode]:
    return {node.operator: node for node in graph.nodes if node.node.op == "placeholder"}


def _spec(spec: InputSpec) -> str:
    tensor = spec.tensor
    text = "a number" if tensor is None else _tensor(tensor)
    return f"{text}, {spec.placement}" if spec.placement else text


def _tensor(spec: TensorSpec) -> str:
    expected, packed = 1, True
    for size, step in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        packed = packed and (step == expected or size == 1 or not isinstance(size, int) or not isinstance(step, int))
        expected *= size if isinstance(size, int) else 1
    strides = "" if packed else f" stride {spec.stride}"
    grad = " requires grad" if spec.requires_grad else ""
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}]{strides} on {spec.device}{grad}"


def _shape(node: fx.Node) -> Sequence[Any]:
    return getattr(node.meta.get("val"), "shape", ())


def _written(graph: ComparedGraph) -> dict[str, None]:
    """The paths of inputs that a graph writes: in its epilogue, or in place anywhere."""
    found = {graph.paths.get(write.target, write.target): None for write in graph.signature.write_backs}
    for node in graph.nodes:
        if node.node.op == "call_function":
            for written in written_inputs(node.node):
                path = _root(written, graph)
                if path:
                    found[path] = None
    return found


def _root(node: fx.Node, graph: ComparedGraph) -> str:
    """The input that a node is, through views and earlier updates in place."""
    for _ in range(64):
        if node.op == "placeholder":
            return graph.paths.get(node.name, node.name)
        if node.op != "call_function" or not node.all_input_nodes:
            return ""
        node = node.all_input_nodes[0]
    return ""


def _input_of(node: fx.Node, graph: ComparedGraph) -> str:
    written = written_inputs(node)
    return _root(written[0], graph) if written else ""


def _communicates(node: ComparedNode) -> bool:
    return node.node.op == "call_function" and is_collective(node.node.target)


def _kind(node: ComparedNode) -> str:
    return node.short.removesuffix("_coalesced")


def _scalars(node: ComparedNode) -> str:
    parts = [part for part in re.split(r", |[\[\]]", node.constants) if part and part != "%"]
    return ", ".join(part for part in parts if not part.isdigit())


def _place(node: ComparedNode) -> tuple[str, str]:
    """Nodes of one module belong together in forward and backward; those of no module by their phase."""
    if node.phase in _TAIL:
        return "", "tail"
    return (node.module, "") if node.module else ("", node.phase)


_REACH = 6
"""How many nodes lie between a softmax and the products around it, at most: scaling, masks, views, casts."""


def _behind(node: fx.Node) -> dict[fx.Node, None]:
    found = {node: None}
    edge = [node]
    for _ in range(_REACH):
        edge = [user for each in edge for user in each.users if user not in found]
        found.update(dict.fromkeys(edge))
    return found


def _recomputed(nodes: list[ComparedNode], own: Counter[bytes], others: Counter[bytes]) -> list[ComparedNode]:
    """Those that the backward computes although the graph, and only this one, has the same value already."""
    return [
        node
        for node in nodes
        if node.recomputed or (node.phase == "backward" and own[node.meaning] > max(1, others[node.meaning]))
    ]


def _without(nodes: list[ComparedNode], gone: list[ComparedNode]) -> list[ComparedNode]:
    left = set(gone)
    return [node for node in nodes if node not in left]


def _before(node: ComparedNode, graph: ComparedGraph) -> dict[int, None]:
    found = {node.i: None}
    edge = [node]
    for _ in range(_REACH):
        edge = [graph.nodes[i] for each in edge for i in each.sources if i not in found]
        found.update((each.i, None) for each in edge)
    return found


def _operators(nodes: Sequence[ComparedNode]) -> str:
    counts = Counter(node.short for node in nodes)
    in_order = sorted(counts.items(), key=lambda item: (item[0] in _MINOR, -item[1]))
    names = [f"{name} ×{count}" if count > 1 else name for name, count in in_order[:_SHOWN]]
    return ", ".join(names) + (f" and {len(counts) - _SHOWN} others" if len(counts) > _SHOWN else "")


def _casts(nodes: Sequence[ComparedNode]) -> str:
    counts = Counter(next(iter(_dtypes(node)), "?") for node in nodes)
    return ", ".join(f"{count} to {dtype}" for dtype, count in counts.most_common())


def _in_place(one: Counter[str], other: Counter[str]) -> bool:
    updates = [name for name in one if name.endswith("_") and name != "copy_"]
    return bool(updates) and all(name.removesuffix("_") in other for name in updates)


def _dtypes(node: ComparedNode) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_DTYPE.findall(node.value)))


def _reads(node: ComparedNode, graph: ComparedGraph) -> str:
    return ", ".join(graph.nodes[s].operator for s in node.sources)


def _differing(one: str, other: str) -> tuple[str, str]:
    """Where two lists of constants differ."""
    left, right = one.split(", "), other.split(", ")
    if len(left) != len(right):
        return one, other
    pairs = [(x, y) for x, y in zip(left, right, strict=True) if x != y]
    return ", ".join(x for x, _ in pairs), ", ".join(y for _, y in pairs)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
