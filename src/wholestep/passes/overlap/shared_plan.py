"""One plan for all ranks: what one rank decided, as text, and how the graph of another rank follows it.

    buckets       of how many MiB, or none
    order         of all nodes: for graphs with the same operators and edges
    issued        of the collectives alone: for the graphs of ranks that compute otherwise in between
                  (a rank with a shorter shard pads where others do not)

Ranks whose collectives are the same before the pass share a plan (`plan_key`), so they issue the same ones in the same
order after it, whatever each of them knows of costs.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from torch import fx

from wholestep.ir.collectives import communication
from wholestep.passes.overlap.task_graph import TaskGraph
from wholestep.simulate.step_index import Order, StepIndex

OnePlan = Callable[[str, Callable[[], str], bool], str]
"""Given a key and a function that makes a plan: the plan that all ranks with this key use. The third argument: whether
it should be that of the first rank; False: the first one that is there, as no bit of the result depends on it."""


@dataclass(frozen=True)
class SharedPlan:
    """What a rank decided. Nodes and collectives are numbered as they stand after buckets were formed."""

    bucket: float | None
    """MiB of the buckets."""
    graph: str
    """Hash of operators and edges after that."""
    order: tuple[int, ...]
    """All nodes in their order; empty: they stay."""
    issued: tuple[int, ...]
    """Collectives in the order of issue."""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SharedPlan:
        """The inverse of `to_json`."""
        given = json.loads(text)
        return cls(given["bucket"], given["graph"], tuple(given["order"]), tuple(given["issued"]))

    @classmethod
    def of(cls, index: StepIndex, order: Order, bucket: float | None) -> SharedPlan:
        """The plan that gives a graph this order."""
        number = {c: k for k, c in enumerate(index.collectives)}
        stays = all(i == place for place, i in enumerate(order))
        issued = tuple(number[i] for i in order if i in number)
        return cls(bucket, structure(index), () if stays else tuple(order), issued)


def plan_key(gm: fx.GraphModule) -> str:
    """A hash of the collectives of a graph, in order."""
    return hashlib.sha256("\n".join(each.digest for each in communication(gm)).encode()).hexdigest()[:24]


def structure(index: StepIndex) -> str:
    """A hash of the operators of a graph and of what they read."""
    parts = [
        f"{node.op if node.op in ('placeholder', 'get_attr') else node.target}{sources}"
        for node, sources in zip(index.nodes, index.sources, strict=True)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def with_issue_order(graph: TaskGraph, order: Order, issued: Sequence[int]) -> list[int]:
    """An order with its collectives in another order; all other nodes stay as near to their places as they can.

    Empty if that is not possible: what a collective sends depends on one that it would come before.
    """
    index = graph.index
    place = {i: at for at, i in enumerate(order)}
    chain = [index.collectives[k] for k in issued]
    missing = [0] * len(graph)
    then: list[list[int]] = [[] for _ in range(len(graph))]
    fixed = set(graph.end)
    for i, sources in enumerate(index.sources):
        for source in (*sources, *graph.after.get(i, ())):
            missing[i] += 1
            then[source].append(i)
    for before, later in pairwise(chain):
        missing[later] += 1
        then[before].append(later)
    ready = [(place[i], i) for i in range(len(graph)) if not missing[i]]
    heapq.heapify(ready)
    found = []
    while ready:
        i = heapq.heappop(ready)[1]
        found.append(i)
        for later in then[i]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (place[later], later))
    if len(found) < len(graph):
        return []
    return [*(i for i in found if i not in fixed), *graph.end]
