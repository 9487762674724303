"""A graph with its inputs, and the edits that make it smaller; every edit is data that can be sent and stored.

    outputs    other nodes are the results           suffix: what comes after them is dead
    given      nodes become inputs, with their values     prefix and nodes: what they were computed from is dead
    dropped    effects without users are removed
    shorter    a list argument loses items           cat([a, b, c, d]) -> cat([a, b])
    size       a dimension becomes smaller, in all inputs that have it (and in constants of the graph)

Nodes keep their names through all edits: edits refer to nodes by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import is_needed
from wholestep.ir.graph_walks import reachable
from wholestep.ir.propagate import fill_values
from wholestep.torch_private.fake_tensors import FakeTensorMode
from wholestep.torch_private.fx_graphs import lazy_graph_module

_VALUES = ("val", "tensor_meta", "example_value")


@dataclass(frozen=True)
class Edit:
    """One way to make a case smaller; empty: only dead code is removed."""

    outputs: tuple[str, ...] | None = None
    given: tuple[str, ...] = ()
    before: str | None = None
    """Values of `given` are those right before this node runs; None: right after each was computed."""
    dropped: tuple[str, ...] = ()
    shorter: tuple[str, int, int] | None = None
    """A node, and the range of items that stays in its lists."""
    size: tuple[int, int, bool] | None = None
    """Old size, new size, and whether constants of the graph follow."""

    @property
    def digest(self) -> str:
        """The same for the same edit, in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Case:
    """A graph module that takes its inputs one by one."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in order."""
        return list(self.gm.graph.nodes)

    @cached_property
    def effects(self) -> tuple[fx.Node, ...]:
        """Nodes that are live for their effects, with or without users."""
        return tuple(effects_of(self.nodes))

    @property
    def size(self) -> tuple[int, int]:
        """What is minimised: nodes, then elements of the inputs."""
        elements = sum(value.numel() for value in self.inputs if isinstance(value, Tensor))
        return len(self.gm.graph.nodes), elements


def results_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the output names, each once."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(graph.output_node().args, lambda node: found.setdefault(node))
    return list(found)


def effects_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes that are live for their effects, with or without users."""
    return [n for n in nodes if n.op not in ("placeholder", "output") and is_needed(n)]


def apply_edit(case: Case, edit: Edit, values: Mapping[str, Any]) -> Case:
    """The smaller case. `values`: of the nodes that become inputs; one that is missing stays as it is."""
    nodes = case.nodes
    given = {name for name in edit.given if name in values}
    ends = _ends(case, edit)
    live = _live(case.effects, ends, given, set(edit.dropped))
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs: list[Any] = []
    known = dict(zip((n for n in nodes if n.op == "placeholder"), case.inputs, strict=True))
    for node in nodes:
        if node in live and (node.op == "placeholder" or node.name in given):
            env[node] = graph.create_node("placeholder", node.name, name=node.name, type_expr=node.type)
            inputs.append(values[node.name] if node.name in given else known[node])
    for node in nodes:
        if node in live and node not in env and node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    _write_output(graph, case.gm.graph.output_node(), edit, [env[node] for node in ends], env)
    for old, new in env.items():
        new.name, new.meta = old.name, dict(old.meta)
    if edit.shorter is not None:
        _shorten(graph, *edit.shorter)
    if edit.size is not None:
        inputs = _resize(graph, inputs, *edit.size)
    gm = lazy_graph_module(case.gm, graph, "Case")
    if edit.size is not None:
        _refresh_values(gm, inputs)
    return Case(gm, tuple(inputs))


def _ends(case: Case, edit: Edit) -> list[fx.Node]:
    if edit.outputs is None:
        return results_of(case.gm.graph)
    by_name = {node.name: node for node in case.gm.graph.nodes}
    return [by_name[name] for name in edit.outputs]


def _live(effects: Sequence[fx.Node], ends: list[fx.Node], given: set[str], dropped: set[str]) -> set[fx.Node]:
    effects = [node for node in effects if node.name not in dropped]
    return set(reachable([*ends, *effects], lambda node: () if node.name in given else node.all_input_nodes))


def _write_output(
    graph: fx.Graph, old: fx.Node, edit: Edit, ends: list[fx.Node], env: Mapping[fx.Node, fx.Node]
) -> None:
    [results] = old.args
    if edit.outputs is None:
        graph.output(fx.map_arg(results, env.__getitem__))
    elif isinstance(results, fx.Node) and len(ends) == 1:
        graph.output(ends[0])
    else:
        graph.output(list(ends) if isinstance(results, list) else tuple(ends))


def _shorten(graph: fx.Graph, name: str, start: int, stop: int) -> None:
    node = next(node for node in graph.nodes if node.name == name)
    size = longest_list(node)

    def keep(arg: Any) -> Any:
        return arg[start:stop] if isinstance(arg, list | tuple) and len(arg) == size else arg

    node.args = tuple(keep(arg) for arg in node.args)
    node.kwargs = {key: keep(arg) for key, arg in node.kwargs.items()}
    used = {source for each in graph.nodes for source in each.all_input_nodes}
    for each in reversed(graph.nodes):
        if each.op != "placeholder" and each not in used and not each.users and each.op != "output":
            graph.erase_node(each)


def longest_list(node: fx.Node) -> int:
    """The length of the longest list of nodes among the arguments."""
    lists = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, list | tuple)]
    return max((len(arg) for arg in lists if any(isinstance(item, fx.Node) for item in arg)), default=0)


def _resize(graph: fx.Graph, inputs: list[Any], old: int, new: int, constants: bool) -> list[Any]:
    if constants:
        for node in graph.nodes:
            if node.op not in ("placeholder", "output"):
                node.args, node.kwargs = _replaced(node.args, old, new), _replaced(node.kwargs, old, new)
    return [_smaller(value, old, new) for value in inputs]


def _replaced(value: Any, old: int, new: int) -> Any:
    if type(value) is int:
        return new if value == old else value
    if isinstance(value, list | tuple):
        items = [_replaced(item, old, new) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return value


def _smaller(value: Any, old: int, new: int) -> Any:
    if type(value) is int:
        return new if value == old else value
    if not isinstance(value, Tensor) or old not in value.shape:
        return value
    part = value.detach()[tuple(slice(0, new) if size == old else slice(None) for size in value.shape)]
    return part.clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)


def _refresh_values(gm: fx.GraphModule, inputs: list[Any]) -> None:
    """Metadata of a graph whose sizes have changed, where it had any."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    places = gm.graph.find_nodes(op="placeholder")
    had = [bool(node.meta.get("val") is not None) for node in places]
    for node in gm.graph.nodes:
        for key in _VALUES:
            node.meta.pop(key, None)
    if all(had):
        for node, value in zip(places, inputs, strict=True):
            node.meta["val"] = mode.from_tensor(value) if isinstance(value, Tensor) else value
        fill_values(gm)
