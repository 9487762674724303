"""Validation and queries shared by the partitioners: malformed graphs, tuple unpacking, bytes of a value."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.errors import PartitionError, called
from wholestep.ir.io.node_values import hint_of
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.operators import OpOverload, schema_of

Cuttable = fx.GraphModule | fx.Graph | StepGraph


def graph_of(what: Cuttable) -> fx.Graph:
    """The graph of a GraphModule, Graph or StepGraph."""
    if isinstance(what, StepGraph):
        return what.gm.graph
    if isinstance(what, fx.GraphModule):
        return what.graph
    if isinstance(what, fx.Graph):
        return what
    raise PartitionError(
        f"{called(what)} has no graph to cut.", fix="pass a GraphModule, a torch.fx.Graph or a StepGraph."
    )


def sound_nodes(graph: fx.Graph) -> list[fx.Node]:
    """All nodes in order; raises PartitionError if the graph is malformed."""
    nodes, seen, names = list(graph.nodes), set[fx.Node](), set[str]()
    for node in nodes:
        if node.graph is not graph:
            raise error_at(node, f"{node.name} belongs to another graph.")
        for source in node.all_input_nodes:
            if source not in seen:
                raise error_at(node, f"{node.name} uses {source.name}, which is not defined before it.")
        if node.name in names:
            raise error_at(node, f"two nodes are called {node.name}.")
        if node.op == "call_function" and not callable(node.target):
            raise error_at(node, f"{node.name} calls {node.target!r}, which is not a function.")
        seen.add(node)
        names.add(node.name)
    if not nodes or nodes[-1].op != "output":
        raise PartitionError("the graph does not end in an output node.", fix="call graph.output(...) first.")
    return nodes


def error_at(node: fx.Node, what: str, fix: str = "") -> PartitionError:
    """An error about a node, with the user's line if it is known."""
    return PartitionError(what, fix=fix, node=format_node(node), location=node_meta(node).location)


def value_of(node: fx.Node) -> Any:
    """The recorded value of a node: a fake tensor, a tuple of them, a number; None if there is no metadata."""
    for key in ("val", "example_value", "tensor_meta"):
        if key in node.meta:
            return node.meta[key]
    return None


def bytes_of(value: Any) -> int:
    """The bytes of the tensors in a value; symbolic sizes take their hints."""
    if isinstance(value, Tensor):
        return _elements(value.shape) * value.dtype.itemsize
    if isinstance(value, list | tuple) and not hasattr(value, "shape"):
        return sum(bytes_of(item) for item in value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)  # torch.fx's TensorMetadata
    return _elements(shape) * dtype.itemsize if shape is not None and isinstance(dtype, torch.dtype) else 0


def unpacked_from(node: fx.Node) -> fx.Node | None:
    """The producer of the tuple that a `getitem` node unpacks; None for every other node.

    Without metadata, a producer that is only indexed by integers is assumed to return a tuple.
    """
    if node.target is not operator.getitem or node.op != "call_function" or type(node.args[1]) is not int:
        return None
    producer = node.args[0]
    if not isinstance(producer, fx.Node):
        return None
    known = makes_tuple(producer)
    if known is None:
        known = all(user.target is operator.getitem and type(user.args[1]) is int for user in producer.users)
    return producer if known else None


def is_body(node: fx.Node) -> bool:
    """True for a get_attr of a module: the body of a `cond` or `while_loop`, which cannot be passed as a value."""
    value: Any = node.graph.owning_module if node.op == "get_attr" else None
    for atom in str(node.target).split(".") if value is not None else ():
        value = getattr(value, atom, None)
    return isinstance(value, nn.Module)


def makes_tuple(node: fx.Node) -> bool | None:
    """True if a node returns a list or tuple; None if neither its value nor its schema is known."""
    value = value_of(node)
    if value is not None:
        return isinstance(value, list | tuple) and not isinstance(getattr(value, "dtype", None), torch.dtype)
    if isinstance(node.target, OpOverload):
        results = schema_of(node.target).returns
        return len(results) > 1 or (len(results) == 1 and str(results[0].type).startswith("List"))
    return None


def _elements(shape: Any) -> int:
    count = 1
    for size in shape:
        known = size if type(size) is int else hint_of(size)
        count *= int(known) if known is not None else 1
    return count
