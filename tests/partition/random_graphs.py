"""Random graphs for the tests of cuts, and what must be true of every partition."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import fx, nn

UNARY = (torch.sin, torch.cos, torch.neg, torch.abs)
BINARY = (torch.add, torch.mul, operator.sub)


@dataclass(frozen=True)
class Drawn:
    """A graph module of `inputs` tensors, and the nodes that a backend would support."""

    gm: fx.GraphModule
    supported: frozenset[fx.Node]
    inputs: int

    def run(self, seed: int = 0) -> object:
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        return self.gm(*(torch.randn(4, 2, generator=generator) for _ in range(self.inputs)))


@st.composite
def drawn_graphs(draw: st.DrawFn, largest: int = 24, tuples: bool = False, effects: bool = False) -> Drawn:
    """Chains, diamonds and independent parts; nodes may return tuples, write, alias, or be random."""
    graph = fx.Graph()
    inputs = draw(st.integers(1, 3))
    values = [graph.placeholder(f"x{i}") for i in range(inputs)]
    owned: list[fx.Node] = []
    for _ in range(draw(st.integers(1, largest))):
        pick = st.sampled_from(values[-6:])
        kinds = ["unary", "binary", "unary"] + ["tuple"] * tuples + ["write", "draw", "view"] * effects
        kind = draw(st.sampled_from(kinds))
        if kind == "write" and not owned:
            kind = "unary"
        if kind == "unary":
            values.append(graph.call_function(draw(st.sampled_from(UNARY)), (draw(pick),)))
            owned.append(values[-1])
        elif kind == "binary":
            values.append(graph.call_function(draw(st.sampled_from(BINARY)), (draw(pick), draw(pick))))
            owned.append(values[-1])
        elif kind == "view":
            values.append(graph.call_method("view_as", (draw(pick), values[0])))
        elif kind == "draw":
            values.append(graph.call_function(torch.rand_like, (draw(pick),)))
        elif kind == "write":
            values.append(graph.call_method("add_", (draw(st.sampled_from(owned[-6:])), draw(pick))))
        else:
            made = graph.call_function(torch.chunk, (draw(pick), 2))
            parts = [graph.call_function(operator.getitem, (made, i)) for i in range(2)]
            values.append(graph.call_function(torch.cat, (parts,)))
    graph.output(tuple(values[inputs:]))
    gm = fx.GraphModule(nn.Module(), graph)
    calls = [node for node in graph.nodes if node.op.startswith("call")]
    supported = frozenset(node for node in calls if draw(st.integers(0, 2)))
    return Drawn(gm, supported, inputs)


def quotient_has_cycle(graph: fx.Graph, group_of: Mapping[fx.Node, object] | Callable[[fx.Node], object]) -> bool:
    """True if groups, with every other node as a group of its own, form a cycle."""
    get = group_of if callable(group_of) else lambda node: group_of.get(node, node)
    before: dict[object, set[object]] = {}
    for node in graph.nodes:
        own = get(node)
        before.setdefault(own, set()).update({get(source) for source in node.all_input_nodes} - {own})
    while True:
        ready = {group for group, sources in before.items() if not sources}
        if not ready:
            return bool(before)
        before = {group: sources - ready for group, sources in before.items() if group not in ready}
