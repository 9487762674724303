"""Which nodes must keep their order although no value flows between them.

    drawn = rand(3);  again = rand(3)          random draws, in the order in which the generator is asked
    all_reduce(a);  all_reduce(b)              collectives, in the order that all ranks agree on
    y = x + 1;  x.add_(2);  z = x * 3          a write and every read of the same memory, through any view
    print(a);  print(b)                       other side effects, among themselves
    _set_grad_enabled(False);  ...             a switch of grad mode or autocast, and everything before and after it
    norm(x);  mean = norm.running_mean * 2     a module that updates its state, and reads of that state

Nodes without such effects have no edges, and a graph without any costs one walk. Of Python functions that we do not
know we assume that their result may share memory with every argument, and that they write nothing.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from wholestep.partition.node_effects import EffectReader
from wholestep.torch_private.operators import OpOverload, op_name

_POINTERS = frozenset(
    "view view_as t transpose swapaxes swapdims permute movedim moveaxis expand expand_as squeeze unsqueeze select "
    "slice narrow diagonal unbind split split_with_sizes chunk tensor_split as_strided detach alias unfold "
    "view_as_real view_as_complex size dim numel stride sym_size sym_numel sym_stride is_contiguous".split()
)
"""Operators, functions and methods whose result is always a view or a size: unlike `reshape`, which may copy."""

_FACTS = frozenset("shape dtype device ndim is_cuda requires_grad T mT".split())
"""Attributes that tell something else than contents."""

Edges = dict[fx.Node, list[fx.Node]]


def order_edges(nodes: list[fx.Node], around_switches: bool = True, reader: EffectReader | None = None) -> Edges:
    """For each node, the earlier ones (besides its arguments) after which it must come. `nodes`: all of a graph.

    Without `around_switches` nothing is said of grad mode and autocast, for callers who repeat them where needed.
    """
    reader = EffectReader(nodes) if reader is None else reader
    before: Edges = {}
    _chain(nodes, reader, before)
    if reader.written:
        _around_writes(nodes, reader, before)
    fences = reader.fences | reader.switches if around_switches else reader.fences
    if fences:
        _around_fences(nodes, fences, before)
    return before


def _chain(nodes: list[fx.Node], reader: EffectReader, before: Edges) -> None:
    last: dict[str, fx.Node] = {}
    for node in nodes:
        for token in reader.tokens.get(node, ()):
            if token in last:
                before.setdefault(node, []).append(last[token])
            last[token] = node


def _around_writes(nodes: list[fx.Node], reader: EffectReader, before: Edges) -> None:
    """Reads since the last write come before the next one, and reads after a write after it."""
    memory = _Memory()
    same: dict[str, fx.Node] = {}
    for node in nodes:
        if node.op == "get_attr":
            memory.join(node, same.setdefault(str(node.target), node))
            memory.join(node, reader.same.get(node, node))
        for source in reader.shares(node):
            memory.join(node, source)
    written = {memory.find(value) for values in reader.written.values() for value in values}
    last_write: dict[fx.Node, fx.Node] = {}
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output") or _only_points(node):
            continue
        writes_to = {memory.find(value) for value in reader.written.get(node, ())}
        touched = dict.fromkeys(map(memory.find, (*node.all_input_nodes, *reader.held.get(node, ()))))
        for place in touched:
            if place not in written:
                continue
            if place in last_write:
                before.setdefault(node, []).append(last_write[place])
            if place in writes_to:
                before.setdefault(node, []).extend(reads.pop(place, ()))
                last_write[place] = node
            else:
                reads.setdefault(place, []).append(node)


def _around_fences(nodes: list[fx.Node], fences: set[fx.Node], before: Edges) -> None:
    last: fx.Node | None = None
    since: list[fx.Node] = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if last is not None:
            before.setdefault(node, []).append(last)
        if node in fences:
            before.setdefault(node, []).extend(since)
            last, since = node, []
        else:
            since.append(node)


def _only_points(node: fx.Node) -> bool:
    """Whether a node is an index into a list or tensor by constants, or a view: it reads no contents."""
    target = node.target
    if target is operator.getitem:
        return len(node.all_input_nodes) <= 1
    if target is getattr:
        return node.args[1] in _FACTS
    if isinstance(target, OpOverload):
        namespace, _, name = op_name(target).partition("::")
        return namespace == "aten" and name.partition(".")[0] in _POINTERS
    if node.op == "call_method":
        return target in _POINTERS
    name = getattr(target, "__name__", "")
    return name in _POINTERS and getattr(torch, name, None) is target


class _Memory:
    """Nodes whose results may share memory (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while node is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def join(self, node: fx.Node, other: fx.Node) -> None:
        node, other = self.find(node), self.find(other)
        if node is not other:
            self._parent[node] = other
