"""What a split module consists of, as values that can be compared with torch's."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module as torchs_split_module

TORCHS_OPTIONS = set(inspect.signature(torchs_split_module).parameters)
"""`tuple_return` came with torch 2.12."""


def torchs(gm: fx.GraphModule, callback: Callable[[fx.Node], int], **options: Any) -> fx.GraphModule:
    """The result of torch's split_module on a copy of a graph."""
    theirs = copy.deepcopy(gm)
    same = dict(zip(theirs.graph.nodes, gm.graph.nodes, strict=True))
    return torchs_split_module(theirs, None, lambda node: callback(same[node]), **options)


def lines(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """All properties of a graph; placeholders first, because torch puts nodes that enter a mode before them."""
    nodes = sorted(graph.nodes, key=lambda node: node.op != "placeholder")
    return [
        (n.op, n.name, str(n.target), str(n.args), str(n.kwargs), n.type, sorted(n.meta) if n.op != "output" else [])
        for n in nodes
    ]


def children(split: fx.GraphModule) -> dict[str, fx.GraphModule]:
    return {name: split.get_submodule(name) for name in sorted(split.meta["partition_names"])}


def call_order(split: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in split.graph.nodes if node.op == "call_module"]


def wiring(split: fx.GraphModule) -> tuple[Any, ...]:
    """What flows into each child and into the output, whatever the order of the calls."""
    meaning: dict[fx.Node, Any] = {}
    calls: dict[str, Any] = {}
    for node in split.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            meaning[node] = (node.op, node.name, node.target, str(node.args), node.type)
        elif node.op == "call_module":
            meaning[node] = node.target
            calls[node.target] = [meaning[arg] for arg in node.args]
        elif node.op == "call_function":
            assert node.target is operator.getitem
            meaning[node] = (meaning[node.args[0]], node.args[1])
    inputs = [value for node, value in meaning.items() if node.op in ("placeholder", "get_attr")]
    output = str(fx.map_arg(split.graph.output_node().args, lambda node: str(meaning[node])))
    return inputs, calls, output


def assert_like_torchs(ours: fx.GraphModule, theirs: fx.GraphModule) -> None:
    """The same children, wired in the same way."""
    assert ours.meta["partition_names"] == theirs.meta.get("partition_names", ours.meta["partition_names"])
    assert wiring(ours) == wiring(theirs)
    for name, child in children(ours).items():
        assert lines(child.graph) == lines(theirs.get_submodule(name).graph)
        assert dict(child.named_modules()).keys() == dict(theirs.get_submodule(name).named_modules()).keys()
        child.graph.lint()
    ours.graph.lint()


def snapshot(gm: fx.GraphModule) -> list[Any]:
    return [
        (line, dict(node.meta), sorted(vars(node))) for line, node in zip(lines(gm.graph), gm.graph.nodes, strict=True)
    ]


def by_name(**numbers: int) -> Callable[[fx.Node], int]:
    """A callback that knows nodes by name; the others are in partition 0."""
    return lambda node: numbers.get(node.name, 0)


def tensors(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*(shape or (4, 2)), generator=generator) for _ in range(count)]
