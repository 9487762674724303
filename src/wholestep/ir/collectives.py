"""The collectives of a graph: each with the nodes behind it (`comm_block`), and all of them in order (`communication`).

    started = all_reduce_coalesced([a, b], 'sum', '0')     collective
    part = started[0]; flat = view(part, [-1])             parts: views of results that have not arrived
    done = wait_tensor(flat)                               waits
    n = sym_size(started, 0)                               measures: read a size, which is known before the result
    started + 1                                            misused: reads a result without waiting (verify refuses it)

What a graph communicates is the part of a step that all ranks must agree on even where batches differ:

    all_gather_into_tensor(dp of 4) of model.fc.weight: f32[4, 8] -> f32[16, 8], train.py:12 in step
    reduce_scatter_tensor(avg, dp of 4) of model.fc.weight: f32[16, 8] -> f32[4, 8], train.py:13 in step
    all_reduce(sum, dp of 4): f32[] -> f32[], train.py:14 in step

Sends and receives between single peers rightly differ from rank to rank and are left out. Cost: two walks.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from wholestep.ir.call_arguments import arguments_by_name, operator_of
from wholestep.ir.effects import communicates, is_collective, is_measure, is_wait, keeps_elements, shared_inputs, writes
from wholestep.ir.groups import GroupNumbers, group_of, group_table
from wholestep.ir.io.arguments import ArgumentWriter
from wholestep.ir.io.node_values import SymbolWriter
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import clean, describe_value
from wholestep.ir.signature import Signature
from wholestep.torch_private.operators import op_name


@dataclass(frozen=True)
class CollectiveBlock:
    """A collective and the nodes behind it, each in the order in which it is found."""

    collective: fx.Node
    parts: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]
    misused: tuple[fx.Node, ...]
    measures: tuple[fx.Node, ...] = ()

    @property
    def is_dead(self) -> bool:
        """Whether no node uses the result of the collective."""
        return not self.misused and not self.measures and not any(wait.users for wait in self.waits)


def comm_block(collective: fx.Node) -> CollectiveBlock:
    """The block of one collective. Costs its users."""
    parts: list[fx.Node] = []
    waits: list[fx.Node] = []
    misused: list[fx.Node] = []
    measures: list[fx.Node] = []
    stack = [collective]
    while stack:
        for user in stack.pop().users:
            if is_wait(user.target):
                waits.append(user)
            elif is_part(user):
                parts.append(user)
                stack.append(user)
            elif is_measure(user.target):
                measures.append(user)
            else:
                misused.append(user)
    return CollectiveBlock(collective, tuple(parts), tuple(waits), tuple(misused), tuple(measures))


def collective_of(wait: fx.Node) -> fx.Node:
    """The collective that a wait waits for; there may be views and parts of lists in between."""
    node = wait
    while node.all_input_nodes and not is_collective(node.target):
        node = node.all_input_nodes[0]
    return node


def is_part(node: fx.Node) -> bool:
    """Whether a node only gives another form to its one input: an element of a list, a view."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    return node.target is operator.getitem or (bool(shared_inputs(node)) and not writes(node))


_GROUP_ARGUMENTS = frozenset({"group_name", "group_size"})


@dataclass(frozen=True)
class Communication:
    """One collective of a graph."""

    node: str
    """The name of its node."""
    digest: str
    """Hash of the operator, the reduce op and all other scalars, the group (number in the order of first appearance,
    axis, size), the parameter, and the shapes and dtypes of operands and results."""
    text: str
    """The same for people."""


def communication(gm: fx.GraphModule, signature: Signature | None = None) -> list[Communication]:
    """Every collective (not its wait) in the order in which the graph issues them.

    The signature knows the paths of inputs and the axes of groups; without it, inputs are called what their
    placeholders are called, and only what torch.distributed knows of the groups is said.
    """
    writer = _CommunicationWriter(gm, signature or Signature())
    return [writer.write(node) for node in gm.graph.nodes if communicates(node)]


class _CommunicationWriter:
    def __init__(self, gm: fx.GraphModule, signature: Signature) -> None:
        self._groups = GroupNumbers((*group_table(gm), *signature.groups))
        self._paths: Mapping[str, str] = {spec.name: spec.path for spec in signature.inputs}
        self._parameters: dict[fx.Node, str] = {}
        self._symbols = SymbolWriter()
        self._arguments = ArgumentWriter(lambda node: describe_value(node.meta.get("val")))

    def write(self, node: fx.Node) -> Communication:
        """One collective; they must come in order."""
        group = group_of(node)
        assert group is not None
        name, arguments = _call(node)
        operands = [value for value in arguments.values() if _is_tensors(value)]
        scalars = {
            key: self._arguments.write(value)
            for key, value in arguments.items()
            if key not in _GROUP_ARGUMENTS and not _is_tensors(value)
        }
        parameter = self._parameter(node, operands)
        shapes = [self._shape(_values(operand)) for operand in operands], self._shape(node.meta.get("val"))
        content = [name, scalars, self._groups.write(group), parameter, shapes]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        return Communication(node.name, digest, clean(self._text(node, name, scalars, group, parameter, operands)))

    def _text(
        self, node: fx.Node, name: str, scalars: dict[str, Any], group: str, parameter: str, operands: list[Any]
    ) -> str:
        number, axis, size = self._groups.write(group)
        shown = [value if isinstance(value, str) else f"{key}={_plain(value)}" for key, value in scalars.items()]
        shown.append(f"{axis or f'group {number}'}" + (f" of {size}" if size else ""))
        operator = name.split("::")[-1]
        of = f" of {parameter}" if parameter else ""
        given = ", ".join(describe_value(_values(operand)) for operand in operands)
        where = node_meta(node).location
        line = f", {where}" if where is not None else ""
        return f"{operator}({', '.join(shown)}){of}: {given} -> {describe_value(node.meta.get('val'))}{line}"

    def _parameter(self, node: fx.Node, operands: list[Any]) -> str:
        """The parameter that capture noted, or the input that the operand comes from."""
        known = node_meta(node).parameter
        if not known:
            sources = [self._source(item) for operand in operands for item in _nodes(operand)]
            known = ", ".join(sources) if all(sources) else ""
        self._parameters[node] = known
        return known

    def _source(self, node: fx.Node) -> str:
        """Back through views, casts, padding and earlier collectives; every node is looked at once."""
        path: list[fx.Node] = []
        while node not in self._parameters:
            path.append(node)
            if node.op == "placeholder":
                self._parameters[node] = self._paths.get(node.name, node.name)
            elif (keeps_elements(node) or is_wait(node.target)) and node.all_input_nodes:
                node = node.all_input_nodes[0]
            else:
                self._parameters[node] = ""
        found = self._parameters[node]
        self._parameters.update(dict.fromkeys(path, found))
        return found

    def _shape(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            dims: Any = value.shape
            return [str(value.dtype), *(d if type(d) is int else self._symbols.write(d) for d in dims)]
        return [self._shape(item) for item in value] if isinstance(value, list | tuple) else None


def _call(node: fx.Node) -> tuple[str, dict[str, Any]]:
    """The operator's name and its arguments by name."""
    op = operator_of(node)
    assert op is not None
    return op_name(op), arguments_by_name(node)


def _is_tensors(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return isinstance(value.meta.get("val"), Tensor | list | tuple | None)
    return isinstance(value, list | tuple) and bool(value) and all(_is_tensors(item) for item in value)


def _nodes(operand: Any) -> list[fx.Node]:
    return [operand] if isinstance(operand, fx.Node) else list(operand)


def _values(operand: Any) -> Any:
    return operand.meta.get("val") if isinstance(operand, fx.Node) else [item.meta.get("val") for item in operand]


def _plain(value: Any) -> Any:
    return value["node"] if isinstance(value, dict) and "node" in value else value
