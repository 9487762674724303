"""Cut a compiled region into pieces that run one after the other, each with its own views; tell which are equal.

    graph     a, view, b, c, view, d, copy_(p, d)
    pieces    [a, b] -> b -> [view, c, d, copy_]      views and constants are recomputed where they are read

Only whole tensors go from piece to piece, so no two inputs of a piece share memory that inputs of the graph did not
share. Pieces are equal if their keys are: the same operators with the same constants, wired alike, on tensors of the
same dtype, device, sizes and strides, with the same results read by others and the same inputs written. Elements of a
one-dimensional tensor, such as `scalars[3]` or the third seed of a step's random numbers, are given to a piece as a
row with those that it reads: which ones they are does not make two pieces differ.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import writes
from wholestep.ir.graph_walks import epilogue, postorder
from wholestep.lower.regions import elements_after_their_tuple, is_ordered, is_view
from wholestep.remat.problem import is_fused
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.operators import OpOverload, plain_name
from wholestep.torch_private.symbolic_shapes import symbols_in

aten = torch.ops.aten

_CONSTANTS = frozenset({aten.full.default, aten.scalar_tensor.default, torch.ops.prims.iota.default})
_NOT_READ = frozenset(
    "val tensor_meta mutation_region_id autograd_backward original_aten desc output_stack_traces stack_trace seq_nr "
    "nn_module_stack fwd_nn_module_stack source_fn_stack fwd_source_fn_stack from_node torch_fn".split()
)
"""Metadata that has no influence on compiled code. Nodes with any other are equal only if it is."""


@dataclass(eq=False)
class GraphPiece:
    """Nodes that are compiled together."""

    nodes: list[fx.Node]
    """Without those that are recomputed."""
    steps: list[fx.Node] = field(default_factory=list)
    """With them, in order."""
    inputs: list[fx.Node] = field(default_factory=list)
    elements: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """By the one-dimensional tensor: the nodes that take an element of it. The piece gets a row of them."""
    outputs: list[fx.Node] = field(default_factory=list)


class PieceGraph:
    """A graph of operators, with its nodes in the order in which pieces are cut from it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        graph = gm.graph
        copies = set(epilogue(graph))
        body = elements_after_their_tuple(graph.nodes)
        self._elements = _elements(graph)
        self._free = _recomputed(body, self._elements)
        self._results = list(graph.output_node().all_input_nodes)
        self._roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in body:
            if node in self._free:
                found = (root for source in node.all_input_nodes for root in self._behind(source))
                self._roots[node] = tuple(dict.fromkeys(found))
        body = [node for node in body if self._is_kept(node) and node not in copies]
        self.sources = {node: self._sources(node) for node in (*body, *copies)}
        self.fused = {node: _is_fused(node) for node in body}
        body = elements_after_their_tuple(_updates_early(body, self.sources, self.fused))
        self.order = self._with_copies(body, copies)
        self.fused.update(dict.fromkeys(copies, True))
        self.position = {node: i for i, node in enumerate(self.order)}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node in self.order:
            for source in self.sources[node]:
                self.readers.setdefault(source, []).append(node)
        self.returned = set(self._results)
        self._attached = self._attach_results()

    def _is_kept(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self._free and node not in self._elements

    def _behind(self, value: fx.Node) -> tuple[fx.Node, ...]:
        """What a value is made of, behind views: inputs of the graph and nodes that are not recomputed."""
        if value in self._elements:
            return (self._elements[value][0],)
        return self._roots[value] if value in self._free else (value,)

    def _sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(root for source in node.all_input_nodes for root in self._behind(source)))

    def _with_copies(self, body: list[fx.Node], copies: Collection[fx.Node]) -> list[fx.Node]:
        """Write-backs as soon as nothing reads the old contents any more, which a view among the results does."""
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(body):
            for source in (node, *self.sources[node]):
                last[source] = i
        viewed = {root for value in self._results if value in self._free for root in self._behind(value)}
        after: dict[int, list[fx.Node]] = {}
        for node in (node for node in self.gm.graph.nodes if node in copies):
            needs = self.sources[node]
            late = not viewed.isdisjoint(needs) or not any(source in self.fused for source in needs)
            at = len(body) if late else max(last.get(source, 0) for source in needs)
            after.setdefault(at, []).append(node)
        found = [each for i, node in enumerate(body) for each in (node, *after.get(i, ()))]
        return found + after.get(len(body), [])

    def _attach_results(self) -> dict[fx.Node, list[fx.Node]]:
        """For results that are recomputed: by the node with which they are."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for value in self._results if self.order else ():
            if value in self._free or value in self._elements:
                roots = self._behind(value)
                made = [self.position[root] for root in roots if root in self.position]
                readers = [self.position[self.readers[root][0]] for root in roots if root in self.readers]
                at = max(made) if made else min(readers, default=0)
                found.setdefault(self.order[at], []).append(value)
        return found

    def piece(self, nodes: list[fx.Node]) -> GraphPiece:
        """The piece of some consecutive nodes of `order`."""
        inside = set(nodes)
        piece = GraphPiece(nodes)
        known: set[fx.Node] = set()
        attached = [value for node in nodes for value in self._attached.get(node, ())]

        def missing(node: fx.Node) -> list[fx.Node]:
            return node.all_input_nodes if node in self._free and node not in known else []

        def take(values: Sequence[fx.Node]) -> None:
            for node in postorder(values, missing):
                if node in known or node in inside:
                    continue
                known.add(node)
                if node in self._free:
                    piece.steps.append(node)
                elif node in self._elements:
                    piece.elements.setdefault(self._elements[node][0], []).append(node)
                else:
                    piece.inputs.append(node)

        for node in nodes:
            take(node.all_input_nodes)
            piece.steps.append(node)
        take(attached)
        piece.outputs = [node for node in nodes if node in self.returned or self._is_read_outside(node, inside)]
        piece.outputs += attached
        return piece

    def _is_read_outside(self, node: fx.Node, inside: Collection[fx.Node]) -> bool:
        return any(reader not in inside for reader in self.readers.get(node, ()))

    def places(self, piece: GraphPiece, base: fx.Node) -> list[int]:
        """Which elements of a tensor a piece reads."""
        return [self._elements[node][1] for node in piece.elements[base]]

    def key(self, piece: GraphPiece, given_away: Collection[fx.Node] = ()) -> tuple[Any, ...]:
        """Equal for pieces whose compiled form is the same. `given_away`: inputs whose memory it may use."""
        number: dict[fx.Node, Any] = {}
        lines: list[Any] = []
        for node in piece.inputs:
            number[node] = len(number)
            lines.append((_layout(node.meta.get("val"), offset=True), node in given_away))
        for i, (base, elements) in enumerate(piece.elements.items()):
            val = base.meta["val"]
            lines.append((str(val.dtype), str(val.device), len(elements)))
            number.update({node: (i, j) for j, node in enumerate(elements)})
        for node in piece.steps:
            number[node] = len(number)
            if node.op == "get_attr":
                lines.append(("get_attr", id(_attribute(self.gm, str(node.target)))))
                continue
            meta = tuple(_plain(name, value) for name, value in node.meta.items() if name not in _NOT_READ)
            form = (argument_form(node.args, number), argument_form(dict(node.kwargs), number))
            lines.append((node.target, form, _layout(node.meta.get("val")), meta))
        lines.append(tuple(number[node] for node in piece.outputs))
        return tuple(lines)

    def module(self, piece: GraphPiece) -> tuple[fx.GraphModule, list[Any]]:
        """A piece as a graph module, and examples of its inputs: tensors, then rows of elements."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        given: list[fx.Node] = []
        for i, node in enumerate(piece.inputs):
            env[node] = graph.placeholder(f"given_{i}")
            env[node].meta["val"] = node.meta["val"]
            given.append(env[node])
        for i, (base, elements) in enumerate(piece.elements.items()):
            row = graph.placeholder(f"row_{i}")
            with base.meta["val"].fake_mode:
                row.meta["val"] = base.meta["val"].new_empty(row_size(len(elements)))
            given.append(row)
        for row, elements in zip(given[len(piece.inputs) :], piece.elements.values(), strict=True):
            for i, node in enumerate(elements):
                env[node] = graph.call_function(aten.select.int, (row, 0, i))
                with row.meta["val"].fake_mode:
                    env[node].meta["val"] = row.meta["val"].select(0, i)
        for node in piece.steps:
            made = graph.create_node(node.op, node.target, *fx.map_arg((node.args, node.kwargs), env.__getitem__))
            made.meta = dict(node.meta)
            env[node] = made
        graph.output(tuple(env[node] for node in piece.outputs))
        gm = lazy_graph_module(self.gm, graph, "Body")
        return gm, [node.meta["val"] for node in given]

    def constants(self, piece: GraphPiece) -> list[Any]:
        """What the key of a piece has only the ids of."""
        return [_attribute(self.gm, str(node.target)) for node in piece.steps if node.op == "get_attr"]


def can_be_cut(gm: fx.GraphModule) -> bool:
    """True if all is a function of tensors of known sizes, except for write-backs at the end, one for each tensor."""
    copies = set(epilogue(gm.graph))
    if len({node.args[0] for node in copies}) < len(copies):
        return False
    results: Any = gm.graph.output_node().args[0]
    if not all(isinstance(value, fx.Node | None) for value in results):
        return False
    for node in gm.graph.nodes:
        if node.op in ("output", "get_attr") or node in copies:
            continue
        val = node.meta.get("val")
        values = val if isinstance(val, list | tuple) else [val]
        if not all(isinstance(value, Tensor) or value is None for value in values) or any(map(symbols_in, values)):
            return False
        if node.op == "placeholder":
            continue
        known = node.target is operator.getitem or isinstance(node.target, OpOverload)
        if node.op != "call_function" or not known or writes(node):
            return False
    return True


def _elements(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, int]]:
    """The nodes that take an element of a one-dimensional tensor: of which, and which."""
    found: dict[fx.Node, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.args:
            continue
        base, place = node.args[0], node.args[-1]
        val = base.meta.get("val") if isinstance(base, fx.Node) else None
        if not isinstance(base, fx.Node) or not isinstance(val, Tensor) or val.dim() != 1 or type(place) is not int:
            continue
        is_seed = plain_name(node.target).endswith("inductor_lookup_seed")
        if is_seed or (node.target is aten.select.int and base.op == "placeholder" and place >= 0):
            found[node] = (base, place)
    return found


def _recomputed(body: Sequence[fx.Node], elements: Collection[fx.Node]) -> set[fx.Node]:
    """Views, constants, and masks that are computed from constants only."""
    found: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    for node in body:
        if node.op == "get_attr" or (node.op == "call_function" and node.target in _CONSTANTS):
            constant.add(node)
        elif node.op != "call_function" or node in elements:
            continue
        else:
            sources, view = node.all_input_nodes, is_view(node) or _is_no_op(node)
            if sources and constant.issuperset(sources) and (view or _is_mask(node)):
                constant.add(node)
            elif not view:
                continue
        found.add(node)
    return found


def _is_no_op(node: fx.Node) -> bool:
    """True for a cast to the same dtype: compiled, its result is its input, so that others may not write into that."""
    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    source, val = node.args[0], node.meta.get("val")
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    return isinstance(val, Tensor) and isinstance(before, Tensor) and val.dtype == before.dtype


def _is_mask(node: fx.Node) -> bool:
    val = node.meta.get("val")
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return isinstance(val, Tensor) and val.dtype == torch.bool and pointwise


def _is_fused(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and is_fused(source.target)


def _updates_early(
    body: list[fx.Node], sources: dict[fx.Node, tuple[fx.Node, ...]], fused: dict[fx.Node, bool]
) -> list[fx.Node]:
    """Nodes after the last matrix product: each as soon as what it reads is there, those of one parameter together.

    dw1, dx1, dw0, sq1, sq0, new1, new0     ->     dw1, sq1, new1, dx1, dw0, sq0, new0
    """
    start = max((i + 1 for i, node in enumerate(body) if not fused[node]), default=0)
    place = {node: i for i, node in enumerate(body)}
    chain = _Groups()
    ready: dict[fx.Node, int] = {}
    for node in body[start:]:
        before = [source for source in sources[node] if source in place]
        ready[node] = max((ready.get(source, place[source]) for source in before), default=-1)
        chain.join(node, [source for source in before if source in ready and _is_large(source)])
    waits: dict[fx.Node, int] = {}
    followers: dict[fx.Node, list[fx.Node]] = {}
    for node in body[start:]:
        for source in sources[node]:
            if source in ready:
                followers.setdefault(source, []).append(node)
    for node in reversed(body[start:]):
        if ready[node] < 0:  # of inputs of the graph only: not before another node reads it
            ready[node] = min((ready[follower] for follower in followers.get(node, ())), default=len(body))
    last: fx.Node | None = None
    for node in body[start:]:
        before = [source for source in sources[node] if source in ready]
        if is_ordered(node):
            if last is not None:
                before.append(last)
                followers.setdefault(last, []).append(node)
            last = node
        waits[node] = len(before)
    ordered_before = max((i for i in range(start) if is_ordered(body[i])), default=-1)
    heap: list[tuple[int, int, int]] = []

    def push(node: fx.Node) -> None:
        first = max(ready[node], ordered_before) if is_ordered(node) else ready[node]
        heapq.heappush(heap, (first, place[chain.first(node)], place[node]))

    for node in body[start:]:
        if not waits[node]:
            push(node)
    found: list[fx.Node] = []

    def run(until: int) -> None:
        while heap and heap[0][0] <= until:
            node = body[heapq.heappop(heap)[2]]
            found.append(node)
            for follower in followers.get(node, ()):
                waits[follower] -= 1
                if not waits[follower]:
                    push(follower)

    for i, node in enumerate(body[:start]):
        found.append(node)
        following = body[i + 1] if i + 1 < start else None
        if following is None or following.target is not operator.getitem:
            run(i)
    run(len(body))
    return found


def _is_large(node: fx.Node) -> bool:
    """False for what the updates of all parameters read: a norm, a step size."""
    val = node.meta.get("val")
    return not isinstance(val, Tensor) or val.numel() > 1


class _Groups:
    """Sets of nodes that are joined (union-find); each has a first node."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def first(self, node: fx.Node) -> fx.Node:
        parent = self._parent
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, node: fx.Node, others: Sequence[fx.Node]) -> None:
        """Add a node, and join it with nodes that were added before."""
        self._parent[node] = node
        for other in others:
            first, second = self.first(other), self.first(node)
            self._parent[second] = first


def row_size(count: int) -> int:
    """The size of a row of so many elements: rows lie one after the other, and each begins at an aligned address."""
    return -(-count // 16) * 16


def _layout(val: Any, *, offset: bool = False) -> Any:
    if isinstance(val, list | tuple):
        return tuple(_layout(item) for item in val)
    if not isinstance(val, Tensor):
        return str(val)
    found = (str(val.dtype), str(val.device), tuple(val.shape), tuple(val.stride()))
    return (*found, val.storage_offset()) if offset else found


def argument_form(value: Any, number: Mapping[fx.Node, Any]) -> Any:
    """An argument as a value that can be compared and hashed; `number`: what stands for a node."""
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(argument_form(item, number) for item in value))
    if isinstance(value, dict):
        return tuple((key, argument_form(item, number)) for key, item in value.items())
    return (type(value).__name__, repr(value))


def _plain(name: str, value: Any) -> Any:
    plain = isinstance(value, bool | int | float | str | torch.dtype | None)
    return (name, repr(value)) if plain else (name, id(value))


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name)
    return found
