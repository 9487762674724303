"""Assign nodes to partitions: the callback is called once per node, and the graph is validated on the same walk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from wholestep.errors import SplitError
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.torch_private.autograd import MODE_SWITCHES

CALLS = frozenset({"call_function", "call_method", "call_module"})
OUTSIDE = -1
"""The index of placeholders and attributes, which are in no partition."""


class Partition:
    """The nodes that become one child, the values they need from outside, and those that others need from them.

    `inputs`, `outputs` etc. are by name, as in torch's class of this name.
    """

    __slots__ = ("environment", "gives", "graph", "name", "needs", "nodes", "sources", "submod_name", "targets", "uses")

    def __init__(self, name: str) -> None:
        self.name = name
        self.submod_name = f"submod_{name}"
        self.nodes: list[fx.Node] = []
        self.needs: dict[fx.Node, None] = {}
        self.gives: dict[fx.Node, None] = {}
        self.sources: dict[Partition, None] = {}
        """The partitions that this one takes values from."""
        self.uses: dict[Partition, None] = {}
        """The partitions that take values from this one."""
        self.graph: fx.Graph | None = None
        self.environment: dict[fx.Node, fx.Node] = {}
        self.targets: dict[str, Any] = {}

    @property
    def node_names(self) -> list[str]:
        """The names of the nodes, in graph order."""
        return [node.name for node in self.nodes]

    @property
    def inputs(self) -> dict[str, None]:
        """The values from outside, in the order of their first use."""
        return dict.fromkeys(node.name for node in self.needs)

    @property
    def outputs(self) -> dict[str, None]:
        """The values that others use, in the order in which they first do."""
        return dict.fromkeys(node.name for node in self.gives)

    @property
    def dependencies(self) -> dict[str, None]:
        """The partitions that this one takes values from."""
        return dict.fromkeys(partition.name for partition in self.sources)

    @property
    def dependents(self) -> dict[str, None]:
        """The partitions that take values from this one."""
        return dict.fromkeys(partition.name for partition in self.uses)

    def __repr__(self) -> str:
        return (
            f"name: {self.name},\n nodes: {self.node_names},\n inputs: {self.inputs},\n outputs: {self.outputs},\n"
            f" partitions depended on: {self.dependencies},\n partition dependents: {self.dependents}"
        )


class Assignment:
    """The partitions of a graph in the order of their first nodes, and the index of each node's partition."""

    __slots__ = ("has_switches", "nodes", "output", "partitions", "place")

    def __init__(self) -> None:
        self.partitions: list[Partition] = []
        self.place: dict[fx.Node, int] = {}
        self.nodes: list[fx.Node] = []
        self.output: fx.Node | None = None
        self.has_switches = False

    def of(self, node: fx.Node) -> Partition | None:
        """The partition of a node; None for placeholders, attributes and the output."""
        place = self.place.get(node, OUTSIDE)
        return None if place == OUTSIDE else self.partitions[place]


def assign(
    m: fx.GraphModule, split_callback: Callable[[fx.Node], int], affix: str | None, attributes: ModuleAttributes
) -> Assignment:
    """Call the callback for each call node, in graph order."""
    found = Assignment()
    place, nodes, partitions = found.place, found.nodes, found.partitions
    by_id: dict[int, int] = {}
    names: set[str] = set()
    for node in m.graph.nodes:
        op = node.op
        nodes.append(node)
        names.add(node.name)
        if len(names) != len(nodes):
            raise error_at(node, f"two nodes are called {node.name}.")
        for source in node.all_input_nodes:
            if source not in place:
                raise error_at(node, f"{node.name} uses {source.name}, which is not defined before it in this graph.")
        if op in CALLS:
            if found.output is not None:
                raise error_at(node, f"{node.name} comes after the output of the graph.")
            if op == "call_module":
                attributes.module_at(node)
            elif op == "call_function" and node.target in MODE_SWITCHES:
                found.has_switches = True
            number = _number(split_callback, node)
            index = by_id.get(number)
            if index is None:
                index = by_id[number] = len(partitions)
                partitions.append(Partition(str(number) if affix is None else f"{affix}_{number}"))
            partitions[index].nodes.append(node)
            place[node] = index
        elif op == "placeholder":
            place[node] = OUTSIDE
        elif op == "get_attr":
            attributes.value_at(node)
            place[node] = OUTSIDE
        elif op == "output":
            if found.output is not None:
                raise error_at(node, "the graph has two outputs.")
            found.output = node
        else:
            raise error_at(node, f"{node.name} has the op {op!r}, which torch.fx does not define.")
    return found


class ModuleAttributes:
    """The attributes that get_attr and call_module nodes refer to, each looked up once."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._found: dict[str, Any] = {}

    def __getitem__(self, target: str) -> Any:
        return self._found[target]

    def value_at(self, node: fx.Node) -> Any:
        """The object that a `get_attr` or `call_module` node refers to."""
        target = node.target
        if not isinstance(target, str):
            raise error_at(node, f"{node.name} has the target {target!r}, which is not a string.")
        if target in self._found:
            return self._found[target]
        value: Any = self._root
        for atom in target.split("."):
            if not hasattr(value, atom):
                raise error_at(node, f"{node.name} refers to {target}, and the module has no such attribute.")
            value = getattr(value, atom)
        self._found[target] = value
        return value

    def module_at(self, node: fx.Node) -> Any:
        """The module that a `call_module` node calls."""
        value = self.value_at(node)
        if not callable(value):
            raise error_at(node, f"{node.name} calls {node.target}, which is a {type(value).__name__}.")
        return value

    def is_module(self, target: Any) -> bool:
        """True if a name that was looked up refers to a module: children own those, they are not arguments."""
        return isinstance(self._found[target], nn.Module)

    def owner_of(self, target: str) -> nn.Module | None:
        """The module that holds an attribute."""
        prefix, _, _ = target.rpartition(".")
        owner: Any = self._root
        for atom in prefix.split(".") if prefix else ():
            owner = getattr(owner, atom)
        return owner if isinstance(owner, nn.Module) else None


def error_at(
    node: fx.Node, what: str, fix: str = "", cls: type[SplitError] = SplitError, around: Iterable[str] = ()
) -> SplitError:
    """An error about a node, with the user's line if it is known."""
    return cls(what, fix=fix, node=format_node(node), location=node_meta(node).location, around=tuple(around))


def _number(split_callback: Callable[[fx.Node], int], node: fx.Node) -> int:
    try:
        number = split_callback(node)
    except Exception as error:
        raise error_at(node, f"the callback raised {type(error).__name__} for {node.name}: {error}") from error
    number = _as_int(number, node)
    if number < 0:
        raise error_at(
            node, f"the callback returned {number} for {node.name}.", fix="number partitions from 0 upwards."
        )
    return number


def _as_int(number: Any, node: fx.Node) -> int:
    if type(number) is int:
        return number
    # NumPy integers are accepted; True is nearly always a condition, and a symbolic size has no value here.
    if not isinstance(number, bool | torch.SymInt) and hasattr(number, "__index__") and not hasattr(number, "layout"):
        return int(number.__index__())
    raise error_at(
        node,
        f"the callback returned {number!r} for {node.name}, which is not an int.",
        fix="return the partition number of each node, such as int(condition).",
    )
