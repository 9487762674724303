"""The order in which partitions are called: the one that comes first in the graph, of those that are ready, is next.

    nodes       a(2)  b(0)  c(1, needs b)  d(0)         numbers in brackets: the partition
    order       2     0     1                           by first node, not by number

If numbers follow the graph this is the order of the graph. Where a partition needs one whose first node comes later, it
waits for that one and nothing else moves. torch takes the latest that is ready, which turns independent parts around.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch import fx

from wholestep.errors import SplitCycleError, SplitError, SplitOrderError
from wholestep.partition.assign import CALLS, Assignment, error_at
from wholestep.partition.dataflow import Flow

_SHOWN = 8


def stable_order(after: Sequence[Sequence[int]]) -> list[int]:
    """The places of partitions in a legal order; shorter than the list if there is a cycle."""
    waits = [0] * len(after)
    for following in after:
        for end in following:
            waits[end] += 1
    ready = [place for place, count in enumerate(waits) if count == 0]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for end in after[place]:
            waits[end] -= 1
            if waits[end] == 0:
                heapq.heappush(ready, end)
    return order


def find_cycle(after: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Places that follow one another in a circle, given the order that does not reach them. The first is the least."""
    left = set(range(len(after))).difference(order)
    # Each place that is left waits for another one that is left, so going backwards must come around.
    waits_for: dict[int, int] = {}
    for place in sorted(left, reverse=True):
        for end in after[place]:
            if end in left:
                waits_for[end] = place
    place = min(left)
    seen: dict[int, int] = {}
    path: list[int] = []
    while place not in seen:
        seen[place] = len(path)
        path.append(place)
        place = waits_for[place]
    cycle = path[seen[place] :][::-1]
    least = cycle.index(min(cycle))
    return cycle[least:] + cycle[:least]


def cycle_error(assignment: Assignment, flow: Flow, order: Sequence[int]) -> SplitError:
    """The error for partitions that need each other's values: one cycle, with the nodes that make it."""
    cycle = find_cycle(flow.after, order)
    pairs = [_value_between(assignment, a, b) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    names = [assignment.partitions[place].submod_name for place in cycle]
    lines = [
        f"{names[i]}: {made.name} -> {used.name} in {names[(i + 1) % len(names)]}"
        for i, (made, used) in enumerate(pairs)
    ]
    if len(lines) > _SHOWN:
        lines[_SHOWN - 1 : -1] = [f"... {len(lines) - _SHOWN} more ..."]
    return error_at(
        pairs[-1][1],
        f"cycle exists between partitions! {_shortened([*names, names[0]])} need each other's results.",
        fix="give one of these nodes the number of another partition, or one of its own.",
        cls=SplitCycleError,
        around=lines,
    )


def order_error(
    assignment: Assignment, flow: Flow, order: Sequence[int], pairs: Sequence[tuple[fx.Node, fx.Node]]
) -> SplitError:
    """The error for effects that would change places: the two nodes, and the partitions that force it."""
    cycle = find_cycle(flow.after, order)
    edges = set(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    place, partitions = assignment.place, assignment.partitions
    first, second = next((a, b) for a, b in pairs if (place[a], place[b]) in edges)
    names = [partitions[i].submod_name for i in cycle]
    return error_at(
        second,
        f"{first.name} must run before {second.name}, and the partitions do not allow it: "
        f"{partitions[place[first]].submod_name} has the first, {partitions[place[second]].submod_name} the second, "
        f"and {_shortened([*names, names[0]])} each come before the next.",
        fix=f"put {first.name} and {second.name} into one partition, or {second.name} into one of its own.",
        cls=SplitOrderError,
        around=[f"%{first.name} in {partitions[place[first]].submod_name}"],
    )


def _value_between(assignment: Assignment, start: int, end: int) -> tuple[fx.Node, fx.Node]:
    place = assignment.place
    for node in assignment.partitions[end].nodes:
        for source in node.all_input_nodes:
            if source.op in CALLS and place[source] == start:
                return source, node
    # Only a symbolic size goes from one to the other; the user of the size is the partition as a whole.
    gives, needs = assignment.partitions[start].gives, assignment.partitions[end].needs
    return next(node for node in gives if node in needs), assignment.partitions[end].nodes[0]


def _shortened(names: list[str]) -> str:
    if len(names) > _SHOWN:
        names = [*names[: _SHOWN - 2], "...", names[-1]]
    return " -> ".join(names)
