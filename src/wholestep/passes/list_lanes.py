"""Which elements of which list operators belong to the same parameter.

    steps = _foreach_add([s0, s1], 1)                          lane 0    lane 1
    a0, a1 = steps[0], steps[1]                                a0        a1
    new = _fused_adam([p0, p1], [g0, g1], .., [a0, a1])        new[0][0] new[0][1]

A list operator (`_foreach_*`, fused optimizers) computes element i of its results from element i of its arguments: it
is many independent operators in one. Elements that data flows between are one lane, also where numbers are computed in
between (`beta ** step.item()`). A value that depends on several lanes (the norm of all gradients) belongs to none, and
lanes end where another phase begins: clipping and moving averages are not the optimizer.  Cost: one walk.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from wholestep.ir.effects import declares_writes
from wholestep.ir.meta import node_meta
from wholestep.torch_private.operators import OpOverload, op_name, schema_of

_AFTERWARDS = (torch.ops.aten.copy_.default, torch.ops.aten.where.self)
"""Results that end a lane in any phase: a value is written back, or a gradient scaler selects the old one."""
_PREFIXES = ("aten::_foreach_", "aten::_fused_")
_LISTS = frozenset({"List[Tensor]", "List[number]", "List[Optional[Tensor]]"})


def is_list_op(node: fx.Node) -> bool:
    """Whether a node computes lists element by element, without writing."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and bool(_list_positions(node.target))


def base_name(node: fx.Node) -> str:
    """`_foreach_add` of a node that calls `aten._foreach_add.Scalar`."""
    target = node.target
    return op_name(target).split("::")[1].split(".")[0] if isinstance(target, OpOverload) else ""


def width(op: fx.Node) -> int:
    """How many elements a list operator computes."""
    return max((len(values) for _, values in list_arguments(op)), default=0)


def list_arguments(op: fx.Node) -> Iterator[tuple[int | str, Sequence[Any]]]:
    """The arguments of a list operator that are lists, with their position or keyword."""
    assert isinstance(op.target, OpOverload)
    for position, name in _list_positions(op.target):
        where: int | str = position if position < len(op.args) else name
        value = op.args[position] if isinstance(where, int) else op.kwargs.get(name)
        if isinstance(value, list | tuple):
            yield where, value  # not copied: asked for once per element


def returns_several_lists(op: fx.Node) -> bool:
    """Whether results are reached by two `getitem`s: first the list, then its element."""
    assert isinstance(op.target, OpOverload)
    return len(schema_of(op.target).returns) > 1


def element_of(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """For an element of a result of a list operator: the operator, which of its lists, and the index."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return None
    source, index, which = node.args[0], node.args[1], 0
    if not isinstance(source, fx.Node):
        return None
    if source.target is operator.getitem:
        above, outer = source.args[0], source.args[1]
        if not isinstance(above, fx.Node) or not isinstance(outer, int):
            return None
        source, which = above, outer
        if not (is_list_op(source) and returns_several_lists(source)):
            return None
    elif not is_list_op(source) or returns_several_lists(source):
        return None
    return source, which, index % width(source)


@lru_cache(maxsize=1024)
def _list_positions(op: OpOverload) -> tuple[tuple[int, str], ...]:
    schema = schema_of(op)
    if not op_name(op).startswith(_PREFIXES) or declares_writes(op) or not schema.returns:
        return ()
    if any(str(result.type) != "List[Tensor]" for result in schema.returns):
        return ()
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if str(a.type) in _LISTS)


class Lanes:
    """The lanes of all list operators of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._lanes, self._ops = _Sets(), _Sets()
        self._first: dict[fx.Node, int] = {}
        self._number: dict[fx.Node, int] = {}
        self._op_of: list[fx.Node] = []
        self._owner: dict[fx.Node, int] = {}
        self._members: dict[fx.Node, tuple[fx.Node, int | None]] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                self._meet(node)

    def lane(self, op: fx.Node, index: int) -> int:
        """An id that is the same for all elements of a lane."""
        return self._lanes.find(self._first[op] + index)

    def blocks(self) -> list[list[fx.Node]]:
        """List operators that share lanes, in graph order."""
        found: dict[int, list[fx.Node]] = {}
        for op, number in self._number.items():
            found.setdefault(self._ops.find(number), []).append(op)
        return list(found.values())

    def members(self) -> Iterator[tuple[fx.Node, fx.Node, int | None]]:
        """Every node that belongs to list operators, in graph order: (node, one of them, its lane or None for all)."""
        for node, (op, lane) in self._members.items():
            yield node, op, None if lane is None else self._lanes.find(lane)

    def _meet(self, node: fx.Node) -> None:
        if is_list_op(node):
            self._enter(node)
            return
        if node.target is operator.getitem and node.args[0] in self._first:
            op = node.args[0]
            assert isinstance(op, fx.Node)
            if returns_several_lists(op):
                self._members[node] = op, None
                return
        element = element_of(node)
        if element is not None:
            self._own(node, self._first[element[0]] + element[2])
            return
        lanes = {self._lanes.find(self._owner[s]) for s in node.all_input_nodes if self._belongs(s, node)}
        if len(lanes) == 1:
            self._own(node, lanes.pop())

    def _own(self, node: fx.Node, lane: int) -> None:
        self._owner[node] = lane
        self._members[node] = self._op_of[lane], lane

    def _enter(self, op: fx.Node) -> None:
        first = self._first[op] = len(self._op_of)
        self._number[op] = self._ops.add()
        self._members[op] = op, None
        for _ in range(width(op)):
            self._lanes.add()
            self._op_of.append(op)
        for _, values in list_arguments(op):
            repeated = _repeated(values)
            for i, value in enumerate(values):
                if isinstance(value, fx.Node) and value not in repeated and self._belongs(value, op):
                    lane = self._owner[value]
                    self._ops.join(self._number[self._op_of[lane]], self._number[op])
                    self._lanes.join(lane, first + i)

    def _belongs(self, source: fx.Node, node: fx.Node) -> bool:
        if source not in self._owner:
            return False
        return node.target in _AFTERWARDS or node_meta(source).phase == node_meta(node).phase


def _repeated(values: Sequence[Any]) -> set[fx.Node]:
    """Elements that several lanes read, such as the flag of a gradient scaler."""
    seen: set[fx.Node] = set()
    again: set[fx.Node] = set()
    for value in values:
        if isinstance(value, fx.Node):
            (again if value in seen else seen).add(value)
    return again


class _Sets:
    """Disjoint sets of integers."""

    def __init__(self) -> None:
        self._parent: list[int] = []

    def add(self) -> int:
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def find(self, number: int) -> int:
        parent = self._parent
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self._parent[max(a, b)] = min(a, b)
