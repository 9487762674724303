"""Give a schedule back the order of the graph where it does not matter.

    scheduled     issue a7, mm1, wait a2, mm2, view(mm1), view(mm2)
    settled       issue a7, mm1, view(mm1), wait a2, mm2, view(mm2)

What matters are anchors: collectives, waits, and computation that takes time. They keep the order of the schedule. All
other nodes go where they are in the graph, between the anchors that did not move. Fewer nodes move, operators that are
fused stay together, and memory is what it was. Cost: one topological sort.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from wholestep.passes.overlap.task_graph import TaskGraph
from wholestep.simulate.step_index import COMPUTE, INPUT, ISSUE, READ, WAIT, Order

_ANCHOR_US = 10.0


def settle(graph: TaskGraph, order: Order) -> list[int]:
    """The order of all nodes: anchors as scheduled, the others as in the graph."""
    index = graph.index
    kind, cost = index.kind, graph.cost
    fixed = set(graph.end)
    anchors = [
        i
        for i in order
        if i not in fixed and (kind[i] in (ISSUE, WAIT) or (kind[i] in (COMPUTE, READ) and cost[i] > _ANCHOR_US))
    ]
    key = _keys(graph, anchors)
    missing = [0] * len(graph)
    then: list[list[int]] = [[] for _ in range(len(graph))]
    for i, sources in enumerate(index.sources):
        for source in (*sources, *graph.after.get(i, ())):
            missing[i] += 1
            then[source].append(i)
    for before, later in pairwise(anchors):
        missing[later] += 1
        then[before].append(later)
    ready = [(key[i], i) for i in range(len(graph)) if not missing[i]]
    heapq.heapify(ready)
    found = []
    while ready:
        i = heapq.heappop(ready)[1]
        if i not in fixed:
            found.append(i)
        for later in then[i]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (key[later], later))
    return [*found, *graph.end]


def _keys(graph: TaskGraph, anchors: Sequence[int]) -> list[float]:
    """Where each node would stand: at its place, before the first anchor that needs it, or where its anchor went."""
    index = graph.index
    key = [float(i) for i in range(len(graph))]
    stays = increasing(anchors)
    place = float(len(graph))
    for i in reversed(anchors):
        if i in stays:
            place = float(i)
        else:
            key[i] = place - 0.5
    for i in range(len(graph) - 1, -1, -1):
        if index.kind[i] == INPUT and index.nodes[i].op == "placeholder":
            key[i] = float(i) - len(graph)
            continue
        for source in index.sources[i]:
            if key[i] < key[source]:
                key[source] = key[i]
    return key


def increasing(numbers: Sequence[int]) -> set[int]:
    """The longest increasing part of some different numbers."""
    tails: list[int] = []
    before: dict[int, int] = {}
    for number in numbers:
        at = bisect_left(tails, number)
        tails[at : at + 1] = [number]
        if at:
            before[number] = tails[at - 1]
    found = set[int]()
    last = tails[-1] if tails else None
    while last is not None:
        found.add(last)
        last = before.get(last)
    return found
