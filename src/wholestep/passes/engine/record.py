"""What each pass did to a graph, recorded on the graph module: counts of operators, and a readable diff.

    @ after relu_3                      the last node before that neither moved nor changed
    - all_reduce_4 = ..                 gone
    + cat = ..                          new
    < wait_tensor_7 = ..                moved away from here
    > wait_tensor_7 = ..                moved to here
    ~ mm_2 = ..                         has other arguments

Cost: near-linear, and text only for what changed, up to a limit. A pass that changed nothing costs nothing.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from wholestep.ir.readable import call_text
from wholestep.torch_private.fx_graphs import NodeParts, NodeTable
from wholestep.torch_private.operators import OpOverload

_KEY = "wholestep_pass_records"
_MOST_LINES = 600
_LONGEST = 220


@dataclass(frozen=True)
class PassRecord:
    """One application of a pass."""

    name: str
    numerics: str
    """Its contract: `exact`, `reassociates`, `approximates(2)` or `changes`."""
    level: int
    """How the graph was verified afterwards (0: not at all)."""
    seconds: float
    changed: bool
    nodes: tuple[int, int] = (0, 0)
    """Before and after; also those of `operators`."""
    operators: tuple[tuple[str, int, int], ...] = ()
    """Operators whose number changed."""
    displaced: int = 0
    """Nodes that were moved."""
    diff: tuple[str, ...] = ()
    left_out: int = 0
    """Lines of the diff beyond the limit."""


def pass_records(gm: fx.GraphModule) -> tuple[PassRecord, ...]:
    """What the passes that ran on a graph did to it, in order."""
    found: tuple[PassRecord, ...] = gm.meta.get(_KEY, ())
    return found


def note_unchanged(gm: fx.GraphModule, name: str, numerics: str, level: int, seconds: float = 0.0) -> None:
    """Record a pass that left the graph as it was."""
    gm.meta[_KEY] = (*pass_records(gm), PassRecord(name, numerics, level, seconds, False))


def note_changed(gm: fx.GraphModule, name: str, numerics: str, level: int, seconds: float, before: NodeTable) -> None:
    """Record a pass that may have changed the graph. `before`: what its nodes were."""
    old, new = list(before), list(gm.graph.nodes)
    known = {id(each): each for each in (*map(_called, old), *map(_called, new))}
    was, now = (Counter(map(id, map(_called, nodes))) for nodes in (old, new))  # operators hash slowly
    operators = tuple(sorted((_title(known[key]), was[key], now[key]) for key in known if was[key] != now[key]))
    lines, displaced = _diff(old, new, before)
    record = PassRecord(
        name,
        numerics,
        level,
        seconds,
        bool(lines),
        (len(old), len(new)),
        operators,
        displaced,
        tuple(lines[:_MOST_LINES]),
        max(len(lines) - _MOST_LINES, 0),
    )
    gm.meta[_KEY] = (*pass_records(gm), record)


def _called(node: NodeParts | fx.Node) -> Any:
    """What a node calls, or its kind."""
    return node.target if node.op == "call_function" else sys.intern(node.op)


def _title(key: Any) -> str:
    """The name of an operator, a function or a kind of node."""
    return str(key) if isinstance(key, str | OpOverload) else str(getattr(key, "__name__", key))


def _diff(old: Sequence[NodeParts], new: Sequence[fx.Node], before_it: NodeTable) -> tuple[list[str], int]:
    """The lines, and how many nodes moved. A node is the same if name and target are."""
    place = {parts.name: i for i, parts in enumerate(old)}
    found = [place.get(node.name, -1) for node in new]
    found = [i if i >= 0 and old[i].target == node.target else -1 for i, node in zip(found, new, strict=True)]
    anchors = _longest_increasing(found)
    fixed = {found[i] for i in anchors}
    stays = set(found)
    rewired = before_it.changed()
    lines: list[str] = []
    before, after = 0, 0
    for anchor in (*anchors, len(new)):
        end = found[anchor] if anchor < len(new) else len(old)
        hunk: list[str] = []
        for i in range(before, end):
            hunk.append(_line("<" if i in stays else "-", old[i]))
        for i in range(after, anchor):
            hunk.append(_line("+" if found[i] < 0 else ">", new[i]))
        if hunk:
            lines += [f"@ after {new[after - 1].name}" if after else "@ at the beginning", *hunk]
        if anchor < len(new):
            node = new[anchor]
            is_copy = before_it.nodes[end] is not node  # the pass returned another graph
            if node in rewired or (is_copy and _line("~", node) != _line("~", old[end])):
                lines.append(_line("~", node))
        before, after = end + 1, anchor + 1
    displaced = sum(place >= 0 and place not in fixed for place in found)
    return lines, displaced


def _line(sign: str, node: NodeParts | fx.Node) -> str:
    target, arguments = call_text(node.op, node.target, node.args, node.kwargs)
    return f"{sign} {node.name} = {target}({arguments})"[:_LONGEST]


def _longest_increasing(places: Sequence[int]) -> list[int]:
    """The positions of a longest increasing sequence of places; -1 is no place."""
    tails: list[int] = []
    ends: list[int] = []
    behind: list[int] = [-1] * len(places)
    for i, place in enumerate(places):
        if place < 0:
            continue
        at = bisect_left(tails, place)
        behind[i] = ends[at - 1] if at else -1
        tails[at : at + 1] = [place]
        ends[at : at + 1] = [i]
    chosen: list[int] = []
    i = ends[-1] if ends else -1
    while i >= 0:
        chosen.append(i)
        i = behind[i]
    return chosen[::-1]
