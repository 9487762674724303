"""Which nodes of two graphs correspond, in nearly linear time.

1. Inputs by their path.
2. Nodes with the same hash of all that they are computed from: everything that an edit did not touch.
3. The same without values and constants: what computes the same from inputs of other sizes or dtypes.
4. What is left, in sequences of the same module and phase, aligned as the lines of two texts are: by operator,
   constants and value, then by operator alone.
5. What is left, by operator and value in its phase: modules that were renamed.

Alignment splits two sequences at elements that occur once in both (patience), so that long sequences cost little more
than reading them; short pieces without such elements are aligned by difflib, and long ones by the n-th occurrence of
each element.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from wholestep.inspect.differences.graph_nodes import ComparedGraph, ComparedNode

_MOST_PRODUCT = 40_000
"""Pieces of sequences are aligned by difflib up to this product of their lengths, which is quadratic."""

NodeKey = Callable[[ComparedNode], Hashable]


class Correspondence:
    """Pairs of nodes, by their numbers in the two graphs."""

    def __init__(self, a: ComparedGraph, b: ComparedGraph) -> None:
        self.a, self.b = a, b
        self.to_b: dict[int, int] = {}
        self.to_a: dict[int, int] = {}
        self._pair([(a.nodes[-1].i, b.nodes[-1].i)] if a.nodes and b.nodes else [])
        for key in (_input, lambda node: node.whole, lambda node: node.form):
            self._pair_by(key)
        for key in (_same_call, lambda node: (node.operator, node.recomputed)):
            self._align(lambda node: (node.phase, node.module), key)
        self._align(lambda node: node.phase, lambda node: (node.operator, node.value))

    @property
    def only_in_a(self) -> list[ComparedNode]:
        """Nodes of the first graph without a counterpart."""
        return [node for node in self.a.nodes if node.i not in self.to_b]

    @property
    def only_in_b(self) -> list[ComparedNode]:
        """Nodes of the second graph without a counterpart."""
        return [node for node in self.b.nodes if node.i not in self.to_a]

    def moved(self) -> list[int]:
        """Nodes of the second graph, by number, that come at another place: as few as explain the order."""
        order = [self.to_a[node.i] for node in self.b.nodes if node.i in self.to_a and node.node.op == "call_function"]
        stay = set(longest_increasing(order))
        return sorted(self.to_b[i] for i in order if i not in stay)

    def _pair(self, pairs: Iterable[tuple[int, int]]) -> None:
        for i, j in pairs:
            self.to_b[i] = j
            self.to_a[j] = i

    def _pair_by(self, key: NodeKey) -> None:
        """The first of a kind with the first, and so on."""
        free: dict[Hashable, deque[int]] = defaultdict(deque)
        for node in self.only_in_b:
            found = key(node)
            if found is not None:
                free[found].append(node.i)
        pairs = []
        for node in self.only_in_a:
            queue = free.get(key(node))
            if queue:
                pairs.append((node.i, queue.popleft()))
        self._pair(pairs)

    def _align(self, place: NodeKey, key: NodeKey) -> None:
        left, right = _by(self.only_in_a, place), _by(self.only_in_b, place)
        for where, ours in left.items():
            theirs = right.get(where, [])
            pairs = aligned([key(node) for node in ours], [key(node) for node in theirs])
            self._pair((ours[i].i, theirs[j].i) for i, j in pairs)


def _input(node: ComparedNode) -> Hashable:
    return node.operator if node.node.op == "placeholder" else None


def _same_call(node: ComparedNode) -> Hashable:
    return node.operator, node.constants, node.value, node.recomputed


def _by(nodes: Iterable[ComparedNode], place: NodeKey) -> dict[Hashable, list[ComparedNode]]:
    found: dict[Hashable, list[ComparedNode]] = defaultdict(list)
    for node in nodes:
        if node.node.op in ("call_function", "get_attr", "call_module"):
            found[place(node)].append(node)
    return found


def aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs of positions with equal elements, increasing in both sequences."""
    pairs: list[tuple[int, int]] = []
    pieces = [(0, len(a), 0, len(b))]
    while pieces:
        low_a, high_a, low_b, high_b = pieces.pop()
        while low_a < high_a and low_b < high_b and a[low_a] == b[low_b]:
            pairs.append((low_a, low_b))
            low_a, low_b = low_a + 1, low_b + 1
        while low_a < high_a and low_b < high_b and a[high_a - 1] == b[high_b - 1]:
            high_a, high_b = high_a - 1, high_b - 1
            pairs.append((high_a, high_b))
        if low_a == high_a or low_b == high_b:
            continue
        anchors = _anchors(a, b, (low_a, high_a, low_b, high_b))
        if anchors:
            for i, j in (*anchors, (high_a, high_b)):
                pieces.append((low_a, i, low_b, j))
                low_a, low_b = i, j
                # the anchor itself is the common prefix of the piece that begins with it
            continue
        pairs += _short(a, b, (low_a, high_a, low_b, high_b))
    return sorted(pairs)


def _anchors(a: Sequence[Hashable], b: Sequence[Hashable], piece: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    """Elements that occur once in both pieces, in the longest order that both have."""
    low_a, high_a, low_b, high_b = piece
    in_a, in_b = Counter(a[low_a:high_a]), Counter(b[low_b:high_b])
    at = {b[j]: j for j in range(low_b, high_b) if in_b[b[j]] == 1}
    single = [(i, at[a[i]]) for i in range(low_a, high_a) if in_a[a[i]] == 1 and a[i] in at]
    keep = set(longest_increasing([j for _, j in single]))
    return [(i, j) for i, j in single if j in keep]


def _short(a: Sequence[Hashable], b: Sequence[Hashable], piece: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    low_a, high_a, low_b, high_b = piece
    if (high_a - low_a) * (high_b - low_b) <= _MOST_PRODUCT:
        matcher = SequenceMatcher(None, a[low_a:high_a], b[low_b:high_b], autojunk=False)
        blocks = matcher.get_matching_blocks()
        return [(low_a + block.a + k, low_b + block.b + k) for block in blocks for k in range(block.size)]
    places: dict[Hashable, deque[int]] = defaultdict(deque)
    for j in range(low_b, high_b):
        places[b[j]].append(j)
    single = [(i, places[a[i]].popleft()) for i in range(low_a, high_a) if places.get(a[i])]
    keep = set(longest_increasing([j for _, j in single]))
    return [(i, j) for i, j in single if j in keep]


def longest_increasing(values: Sequence[int]) -> list[int]:
    """The longest increasing part of distinct numbers."""
    tails: list[int] = []
    places: list[int] = []
    before = [-1] * len(values)
    for n, value in enumerate(values):
        k = bisect_left(tails, value)
        before[n] = places[k - 1] if k else -1
        if k == len(tails):
            tails.append(value)
            places.append(n)
        else:
            tails[k], places[k] = value, n
    found = []
    n = places[-1] if places else -1
    while n >= 0:
        found.append(values[n])
        n = before[n]
    return found[::-1]
