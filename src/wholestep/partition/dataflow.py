"""Which values cross from one partition to another, and which nodes need their order kept across partitions.

relu (0) -> add (1)        add needs relu: partition 0 comes before partition 1 and returns relu
add_(x) (0), mul(x) (1)    no value flows, but mul reads what add_ wrote: partition 0 comes before partition 1
"""

from __future__ import annotations

from torch import fx

from wholestep.partition.assign import OUTSIDE, Assignment
from wholestep.partition.node_effects import EffectReader
from wholestep.partition.order_edges import order_edges
from wholestep.partition.shapes import Symbols
from wholestep.torch_private.autograd import EXIT_AUTOCAST


class Flow:
    """For each partition, those that must come after it; as places in the list of partitions."""

    __slots__ = ("_known", "after", "has_symbols")

    def __init__(self, count: int) -> None:
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.has_symbols = False
        """Whether an edge is there only because a partition is told a symbolic size that another one computes."""
        self._known: set[int] = set()

    def add(self, first: int, second: int) -> bool:
        """Let `first` come before `second`; False if that was known."""
        edge = first * len(self.after) + second
        if edge in self._known:
            return False
        self._known.add(edge)
        self.after[first].append(second)
        return True


def find_flow(assignment: Assignment, computed_sizes: bool = True) -> Flow:
    """Fill in what partitions need and give. `computed_sizes`: also sizes that some other partition computes."""
    place, partitions = assignment.place, assignment.partitions
    flow, symbols = Flow(len(partitions)), Symbols()

    def cross(source: fx.Node, start: int, end: int) -> None:
        partitions[end].needs.setdefault(source)
        if start != OUTSIDE:
            partitions[start].gives.setdefault(source)
            if flow.add(start, end):
                partitions[start].uses.setdefault(partitions[end])
                partitions[end].sources.setdefault(partitions[start])

    for node in assignment.nodes:
        symbols.bind(node)
        end = place.get(node, OUTSIDE)
        if end == OUTSIDE:
            continue
        # Autocast is entered wherever it is needed, so that nothing has to be passed on to leave it.
        if node.target is EXIT_AUTOCAST:
            continue
        for source in node.all_input_nodes:
            start = place[source]
            if start == end:
                continue
            cross(source, start, end)
            for size in symbols.needed_for(source):
                start = place[size]
                if start == OUTSIDE:
                    cross(size, start, end)
                elif start != end and computed_sizes:
                    flow.has_symbols = True
                    cross(size, start, end)
    if assignment.output is not None:
        for source in assignment.output.all_input_nodes:
            if (start := place[source]) != OUTSIDE:
                partitions[start].gives.setdefault(source)
    return flow


def forget_flow(assignment: Assignment) -> None:
    """Undo `find_flow`."""
    for partition in assignment.partitions:
        partition.needs, partition.gives, partition.sources, partition.uses = {}, {}, {}, {}


def order_pairs(assignment: Assignment, effects: EffectReader) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes in different partitions that must keep their order although no value flows between them."""
    if len(assignment.partitions) < 2 or not (effects.tokens or effects.written or effects.fences):
        return []
    place = assignment.place
    pairs = []
    for node, earlier in order_edges(assignment.nodes, around_switches=False, reader=effects).items():
        end = place.get(node, OUTSIDE)
        if end != OUTSIDE:
            pairs += [(other, node) for other in earlier if place.get(other, OUTSIDE) not in (OUTSIDE, end)]
    return pairs
