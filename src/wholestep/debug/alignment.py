"""Which nodes of two graphs correspond.

Graphs of one step, before and after passes, have names in common (`by_name`). Two functions that were written by hand
have not: one more operator gives all that follow it another number. Their nodes are aligned as the lines of two texts
are (`by_order`): by what they compute, with which numbers, of which shape and in which module.
"""

from __future__ import annotations

from collections import defaultdict
from difflib import SequenceMatcher
from typing import Any

from torch import fx

from wholestep.ir.meta import node_meta
from wholestep.ir.readable import describe_value

_MOST_ALIGNED = 5000
"""Aligning takes time that grows with the square; larger graphs correspond by name."""


def by_name(a: fx.Graph, b: fx.Graph) -> dict[str, str]:
    """Names of the second graph to those of the first: the same, or the only ones of their kind that were replaced."""
    there = {node.name: node for node in a.nodes if node.op != "output"}
    here = {node.name: node for node in b.nodes if node.op != "output"}
    pairs = {name: name for name in here if name in there}
    lost, new = defaultdict[Any, list[str]](list), defaultdict[Any, list[str]](list)
    for nodes, kinds, others in ((there, lost, here), (here, new, there)):
        for name, node in nodes.items():
            if name not in others and node.op != "placeholder":
                kinds[node.op, node.target].append(name)
    for kind, names in new.items():
        if len(names) == len(lost[kind]):
            pairs.update(zip(names, lost[kind], strict=True))
    return pairs


def by_order(a: fx.Graph, b: fx.Graph) -> dict[str, str]:
    """Names of the second graph to those of the first, by what nodes are; inputs by their names."""
    if max(len(a.nodes), len(b.nodes)) > _MOST_ALIGNED:
        return by_name(a, b)
    there, here = _calls(a), _calls(b)
    pairs = {node.name: node.name for node in b.nodes if node.op == "placeholder"}
    matcher = SequenceMatcher(None, [_key(node) for node in there], [_key(node) for node in here], autojunk=False)
    for tag, start, stop, first, last in matcher.get_opcodes():
        if tag == "equal" or (tag == "replace" and stop - start == last - first):
            for old, new in zip(there[start:stop], here[first:last], strict=True):
                # An operator with another number in it is the same one, changed.
                if _kind(old) == _kind(new):
                    pairs[new.name] = old.name
    return pairs


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _kind(node: fx.Node) -> tuple[str, ...]:
    meta = node_meta(node)
    return node.op, str(node.target), describe_value(node.meta.get("val")), meta.module_path, meta.phase


def _key(node: fx.Node) -> tuple[str, ...]:
    numbers = fx.map_arg((node.args, node.kwargs), lambda source: None)
    return *_kind(node), repr(numbers)
