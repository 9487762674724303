"""The modules of the stages: each a graph with the state it reads, under the names of the model.

A stage takes the values of `routing.inputs[i]`, one argument each, and returns those of `routing.outputs[i]`: a tuple,
or the tensor itself if it is only one. Values that are passed on go through `aten.alias`, so that each output has a
gradient function of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.pipelining.routing import Routing


def build_stage(
    index: int, nodes: Sequence[fx.Node], routing: Routing, states: Mapping[str, tuple[torch.nn.Module, str]]
) -> fx.GraphModule:
    """The module of one stage. `nodes` are its nodes in the flat graph; `states` says where a get_attr is found."""
    graph = fx.Graph()
    root = torch.nn.Module()
    new: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    for name in routing.inputs[index]:
        by_name[name] = graph.placeholder(name)
        value = routing.values[name].meta
        if value is not None:
            by_name[name].meta["val"] = value

    def look(node: fx.Node) -> fx.Node:
        if node in new:
            return new[node]
        if node.name in by_name:
            return by_name[node.name]
        assert node.op == "get_attr", f"{node} is neither computed in stage {index} nor received by it"
        place_state(root, str(node.target), *states[str(node.target)])
        new[node] = graph.create_node("get_attr", node.target, name=node.name)
        new[node].meta = dict(node.meta)
        return new[node]

    by_value = {node.name: node for node in nodes}
    for node in nodes:
        new[node] = graph.node_copy(node, look)
    results: list[fx.Node] = []
    for name in routing.outputs[index]:
        if name in by_value:
            results.append(new[by_value[name]])
        else:
            passed_on = graph.call_function(torch.ops.aten.alias.default, (by_name[name],))
            passed_on.meta["val"] = by_name[name].meta.get("val")
            results.append(passed_on)
    graph.output(results[0] if len(results) == 1 else tuple(results))
    return fx.GraphModule(root, graph, class_name=f"Stage{index}")


def place_state(root: torch.nn.Module, name: str, owner: torch.nn.Module, attribute: str) -> None:
    """Put a parameter or buffer under its name into a stage, with empty modules on the way."""
    *path, last = name.split(".")
    for atom in path:
        if not hasattr(root, atom):
            root.add_module(atom, torch.nn.Module())
        root = getattr(root, atom)
    value: Any = getattr(owner, attribute)
    if isinstance(value, torch.nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value, persistent=attribute in owner.state_dict())
