"""Choose where to cut a graph so that pieces which occur often are compiled once.

    cut         at places that cost least        a b | c d | e f | c d | e f | c d | e f | g
    number      equal pieces alike               A     B     C     B     C     B     C     D
    join        neighbours                       A     BC          BC          BC          D

A seam costs the time of a call, and the bytes that fused kernels would not have moved: values that a kernel computed
and read at once are written and read again. Two neighbours are joined where the seams that go away, over `_STEPS`
steps, take longer than it takes to compile what is then compiled once more. So pieces that always follow each other
become one (a layer, with its updates), and a piece that occurs elsewhere as well stays by itself if it is large.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, fx

from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.lower.pieces import GraphPiece, PieceGraph

_CONVOLUTION = torch.ops.aten.convolution.default
_STEPS = 10_000
"""How many steps the compile time is spread over."""
_OPERATOR = 0.03
_BODY = 1.0
"""Seconds of Inductor for an operator, and for a graph."""
_CALL = 1e-5
"""Seconds of a call of compiled code: its arguments are gathered in Python."""
_BANDWIDTH = {"cpu": 2e10, "cuda": 2e12}
"""Bytes in a second."""
_SMALL = 24
"""Operators of a piece that is not worth a call of its own, if its neighbour is equal."""
LEAST_SAVED = 200
LEAST_PART = 0.6
"""`auto` shares where at least so many operators, and this part of all, are not compiled, and where that saves more
time than more graphs cost: in a shallow model what is repeated shares its kernels anyway."""
MOST_MOVED = 0.01
"""and where the seams move at most this part of all bytes."""


@dataclass(frozen=True)
class RepeatPlan:
    """The pieces of a graph."""

    pieces: list[GraphPiece]
    bodies: int
    """How many of them differ."""
    operators: int
    saved: int
    """Operators that are not compiled, because an equal piece is."""
    seam_bytes: int
    """Bytes that are moved at the seams, beside those that one compiled graph moves."""
    moved: int
    """Bytes that one compiled graph moves, estimated."""
    may_be_chosen: bool
    """False where it has not been measured: on other devices than the CPU, and where Inductor chooses the layout of
    convolutions, which seams would undo."""

    @property
    def is_worth_it(self) -> bool:
        """The rule of `repeat="auto"`."""
        is_much = self.saved >= max(LEAST_SAVED, LEAST_PART * self.operators)
        is_faster = self.saved * _OPERATOR > self.bodies * _BODY + len(self.pieces) * _CALL * _STEPS
        return self.may_be_chosen and is_much and is_faster and self.seam_bytes <= MOST_MOVED * self.moved


def plan_repeats(graph: PieceGraph) -> RepeatPlan:
    """The pieces of a graph, in order; one if nothing in it is repeated."""
    order = graph.order
    price, moved = _seam_bytes(graph)
    starts = _candidates(graph, price)
    parts = [order[a:b] for a, b in zip(starts, [*starts[1:], len(order)], strict=True)]
    device = next((t.device.type for node in order for t in tensors_in(node.meta.get("val"))), "cpu")
    seams = [_CALL + price[start] / _BANDWIDTH.get(device, _BANDWIDTH["cuda"]) for start in starts]
    joined = _joined([graph.key(graph.piece(part)) for part in parts], list(map(len, parts)), seams)
    pieces = [graph.piece([node for part in parts[a:b] for node in part]) for a, b in joined]
    known: set[Hashable] = set()
    saved = 0
    for piece in pieces:
        key = graph.key(piece)
        saved += len(piece.nodes) if key in known else 0
        known.add(key)
    measured = device == "cpu" and not any(node.target is _CONVOLUTION for node in order)
    return RepeatPlan(
        pieces, len(known), len(order), saved, sum(price[starts[a]] for a, _ in joined[1:]), moved, measured
    )


def _seam_bytes(graph: PieceGraph) -> tuple[list[int], int]:
    """For each place in the order the bytes that a cut there moves in addition; and what is moved without cuts."""
    level: dict[fx.Node, int] = {}
    for node in graph.order:
        level[node] = max((level.get(s, 0) + (not graph.fused.get(s, True)) for s in graph.sources[node]), default=0)
    steps = [0] * (len(graph.order) + 1)
    moved = 0

    def add(first: int, last: int, count: int) -> None:
        steps[first + 1] += count
        steps[last + 1] -= count

    for value, readers in graph.readers.items():
        size = _bytes(value)
        made = graph.position.get(value)
        own = level.get(value, -1) if graph.fused.get(value, False) else -1
        by_level: dict[int, list[int]] = {}
        for reader in readers:
            at = level[reader] if graph.fused[reader] else -2 - graph.position[reader]
            by_level.setdefault(at, []).append(graph.position[reader])
        stored = value in graph.returned or set(by_level) != {own}
        moved += size * (len(by_level) - (own in by_level) + (stored and made is not None))
        for at, places in by_level.items():
            if at == own and made is not None:
                add(made, max(places), size if stored else 2 * size)
            elif len(places) > 1:
                add(min(places), max(places), size)
    return list(accumulate(steps))[: len(graph.order)], moved


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    return tensor_bytes(val) if isinstance(val, Tensor) else 0


def _candidates(graph: PieceGraph, price: Sequence[int]) -> list[int]:
    """The fifth of all places where a cut costs least, and the begin; the elements of a tuple stay with it."""
    allowed = [i for i, node in enumerate(graph.order) if i and _may_begin(node)]
    most = sorted(price[i] for i in allowed)[len(allowed) // 5] if allowed else 0
    return [0, *(i for i in allowed if price[i] <= most)]


def _may_begin(node: fx.Node) -> bool:
    return node.target is not operator.getitem and node.target is not torch.ops.aten.copy_.default


def _compile_time(size: int) -> float:
    return _BODY + _OPERATOR * size


def _joined(keys: Sequence[Hashable], sizes: Sequence[int], seams: Sequence[float]) -> list[tuple[int, int]]:
    """Each piece as its first part and the one after its last. Pieces that are too small to be compiled by themselves
    are joined with each other, also where others follow elsewhere."""
    joining = _Joining(keys, sizes, seams)
    first = joining.run()
    kinds = [joining.kind(a) for a, _ in first]
    count = Counter(kinds)
    small = {kind for kind, n in count.items() if n * joining.size(kind) * _OPERATOR < _BODY}
    again = [("alone", i) if kind in small else kind for i, kind in enumerate(kinds)]
    second = _Joining(again, list(map(joining.size, kinds)), [seams[a] for a, _ in first]).run()
    return [(first[a][0], first[b - 1][1]) for a, b in second]


class _Joining:
    """Joins neighbours in a sequence of numbered pieces, the pair with the largest gain first (as in Re-Pair)."""

    def __init__(self, keys: Sequence[Hashable], sizes: Sequence[int], seams: Sequence[float]) -> None:
        """`seams`: seconds of a step for the seam before each piece."""
        number: dict[Hashable, int] = {}
        self._kind = [number.setdefault(key, len(number)) for key in keys]
        self._size = dict(zip(self._kind, sizes, strict=True))
        self._count = Counter(self._kind)
        self._seams = seams
        self._after = list(range(1, len(keys) + 1))
        self._before = list(range(-1, len(keys) - 1))
        self._pairs: dict[tuple[int, int], dict[int, None]] = {}
        for i in range(len(keys) - 1):
            self._pairs.setdefault((self._kind[i], self._kind[i + 1]), {})[i] = None

    def run(self) -> list[tuple[int, int]]:
        """Each joined piece as the first of its pieces, and the one after its last."""
        heap = self._all()
        while heap:
            gain, pair = heapq.heappop(heap)
            now = -self._gain(pair)
            if now > gain:  # it became worse
                if now < 0:
                    heapq.heappush(heap, (now, pair))
            elif now < 0:
                for changed in self._join(pair):
                    if (other := self._gain(changed)) > 0:
                        heapq.heappush(heap, (-other, changed))
            if not heap:
                heap = self._all()  # a pair may have become better since it was looked at
        found, i = [], 0
        while i < len(self._kind):
            found.append((i, self._after[i]))
            i = self._after[i]
        return found

    def kind(self, i: int) -> int:
        """The number of the piece that begins with a part."""
        return self._kind[i]

    def size(self, kind: int) -> int:
        return self._size[kind]

    def _all(self) -> list[tuple[float, tuple[int, int]]]:
        heap = [(-gain, pair) for pair in self._pairs if (gain := self._gain(pair)) > 0]
        heapq.heapify(heap)
        return heap

    def _gain(self, pair: tuple[int, int]) -> float:
        """Seconds that joining a pair wherever it occurs saves in all."""
        a, b = pair
        places = self._pairs.get(pair)
        if not places or (a == b and self._size[a] >= _SMALL):
            return 0.0
        count = len(places) if a != b else self._count[a] // 2
        uses = 2 * count if a == b else count
        compiled = _compile_time(self._size[a] + self._size[b])
        compiled -= sum(_compile_time(self._size[each]) for each in {a, b} if self._count[each] == uses)
        seam = self._seams[self._after[next(iter(places))]]
        return _STEPS * count * seam - compiled

    def _join(self, pair: tuple[int, int]) -> set[tuple[int, int]]:
        kind = len(self._size)
        self._size[kind] = self._size[pair[0]] + self._size[pair[1]]
        changed: set[tuple[int, int]] = set()
        for i in sorted(self._pairs.pop(pair)):
            j = self._after[i]
            if (self._kind[i], self._kind[j] if j < len(self._kind) else -1) != pair:
                continue  # a, a, a: the second pair overlaps the first
            left, right = self._before[i], self._after[j]
            if left >= 0:
                self._pairs.get((self._kind[left], pair[0]), {}).pop(left, None)
            if right < len(self._kind):
                self._pairs.get((pair[1], self._kind[right]), {}).pop(j, None)
                self._before[right] = i
            self._after[i] = right
            self._kind[i], self._kind[j] = kind, -1
            self._count.update({pair[0]: -1, kind: 1})
            self._count[pair[1]] -= 1
            if left >= 0:
                changed.add((self._kind[left], kind))
                self._pairs.setdefault((self._kind[left], kind), {})[left] = None
            if right < len(self._kind):
                changed.add((kind, self._kind[right]))
                self._pairs.setdefault((kind, self._kind[right]), {})[i] = None
        return changed
