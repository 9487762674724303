"""Which node is in which stage: a stage is a run of nodes between two marks, in the order of the trace.

So in-place writes, random numbers and regions keep their order. Marks with nothing between them are one cut, and marks
before the first or after the last operator are none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from wholestep.pipelining.build.functions import is_mark
from wholestep.pipelining.build.markers import is_split


def is_work(node: fx.Node) -> bool:
    """Whether a node computes something; marks, inputs, state and the picking of results do not."""
    return node.op == "call_function" and node.target is not operator.getitem and not is_mark(node)


def stages_by_marks(graph: fx.Graph, is_work: Callable[[fx.Node], bool] = is_work) -> dict[fx.Node, int]:
    """The stage of every node but placeholders, state, marks and the output. Marks without work between are one."""
    stage, waiting, seen_work = 0, False, False
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if is_split(node):
            waiting = seen_work
            continue
        if is_work(node):
            stage, waiting, seen_work = stage + waiting, False, True
        found[node] = stage
    return found
