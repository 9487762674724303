"""Replay an order of nodes on one compute stream, one stream per process group, and the host.

    compute   mm ──── mm ────────┐ stands still      ┌ add ──
    group 0        └ all_gather ─────────────────────┘
                   issued                            wait

Computation runs in order. A collective starts when the compute stream has come to its place and the collectives issued
before it in its group are done; a wait holds the compute stream until its collective is done. What started before the
graph is done. The host is ahead of the device unless it dispatches slower than that runs, or reads a value.

With contention, computation beside a collective is slower, and collectives that share a link share its bandwidth: the
state then changes where something starts or ends, and nothing in between. Cost: one step for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from wholestep.simulate.step_index import COMPUTE, ISSUE, READ, WAIT, Order, StepIndex

_EPS = 1e-9


@dataclass(frozen=True)
class StreamRules:
    """What streams do to each other."""

    contention: float = 0.0
    """How much longer computation takes beside a collective."""
    links: tuple[frozenset[str], ...] = ()
    """Of each group, the links that its collectives use; empty: none is shared."""
    dispatch: float = 0.0
    """Microseconds of the host for each operator."""

    @property
    def are_independent(self) -> bool:
        """Whether no stream slows another one."""
        shared = [link for links in self.links for link in links]
        return not self.contention and len(set(shared)) == len(shared)


@dataclass(frozen=True)
class StepReplay:
    """When each node ran, in microseconds, by its number."""

    order: list[int]
    start: list[float]
    end: list[float]
    """Of a wait: when computation went on."""
    issue: list[float]
    """Of a collective, when the compute stream came to it; `start` is later if its stream was busy."""
    step: float
    compute: float
    """Time that the compute stream computes."""
    dispatch: float
    """Time that the compute stream waits for the host."""


def replay(
    index: StepIndex,
    cost: Sequence[float],
    order: Order | None = None,
    rules: StreamRules | None = None,
    *,
    own_stream: Collection[int] = (),
    issued_at: dict[int, float] | None = None,
) -> StepReplay:
    """Times of all nodes. `own_stream`, `issued_at`: collectives that are freed of their queue, or of their place."""
    rules = rules or StreamRules()
    kind, issued, group = index.kind, index.issued, index.group
    nodes = len(index)
    start, end, issue = [0.0] * nodes, [0.0] * nodes, [0.0] * nodes
    streams = _Independent(len(index.groups)) if rules.are_independent else _Shared(len(index.groups), rules)
    host = compute = behind = 0.0
    chosen = list(range(nodes)) if order is None else list(order)
    early = issued_at or {}
    for i in chosen:
        what = kind[i]
        now = streams.now
        if what in (COMPUTE, READ):
            host += rules.dispatch
            if host > now:
                behind += host - now
                streams.idle(host - now)
            start[i] = streams.now
            streams.compute(cost[i])
            end[i] = streams.now
            compute += end[i] - start[i]
            if what == READ:
                host = max(host, streams.now)
        elif what == ISSUE:
            host += rules.dispatch
            issue[i] = min(early.get(i, now), now)
            streams.issue(i, -1 if i in own_stream else group[i], cost[i], issue[i])
        elif what == WAIT:
            start[i] = now
            if issued[i] >= 0:
                streams.until(issued[i])
            end[i] = streams.now
        else:
            start[i] = end[i] = now
    last = streams.now
    step = max(streams.finish(), last)
    for i, (began, ended) in streams.spans.items():
        start[i], end[i] = began, ended
    return StepReplay(chosen, start, end, issue, step, compute, behind)


class _Independent:
    """Streams that do not slow each other: ends are known when a collective is issued."""

    def __init__(self, groups: int) -> None:
        self.now = 0.0
        self.spans: dict[int, tuple[float, float]] = {}
        self._free = [0.0] * groups
        self._last = 0.0

    def compute(self, length: float) -> None:
        self.now += length

    idle = compute

    def issue(self, i: int, group: int, length: float, at: float) -> None:
        begin = at if group < 0 else max(at, self._free[group])
        self.spans[i] = (begin, begin + length)
        self._last = max(self._last, begin + length)
        if group >= 0:
            self._free[group] = begin + length

    def until(self, i: int) -> None:
        self.now = max(self.now, self.spans[i][1])

    def finish(self) -> float:
        """When the last collective is done."""
        return self._last


class _Shared:
    """Streams that slow each other: time moves from one start or end of a collective to the next."""

    def __init__(self, groups: int, rules: StreamRules) -> None:
        self.now = 0.0
        self.spans: dict[int, tuple[float, float]] = {}
        self._links = rules.links or (frozenset(),) * groups
        self._slower = 1.0 + rules.contention
        self._queues: dict[int, deque[tuple[int, float]]] = {g: deque() for g in range(groups)}
        self._begun: dict[int, float] = {}
        self._left: dict[int, list[float]] = {}
        """Of each running collective: what is left of its time alone, and its group."""

    def compute(self, length: float) -> None:
        left = length
        while left > _EPS:
            slower = self._slower if self._left else 1.0
            passed = self._advance(left * slower)
            left -= passed / slower

    def idle(self, length: float) -> None:
        until = self.now + length
        while self.now < until - _EPS:
            self._advance(until - self.now)

    def issue(self, i: int, group: int, length: float, at: float) -> None:
        if group < 0:  # alone on streams and links
            self.spans[i] = (at, at + length)
        elif self._queues[group]:
            self._queues[group].append((i, length))
        else:
            self._queues[group].append((i, length))
            self._begin(group)

    def until(self, i: int) -> None:
        while i not in self.spans and self._left:
            self._advance(float("inf"))
        self.now = max(self.now, self.spans[i][1])

    def finish(self) -> float:
        while self._left:
            self._advance(float("inf"))
        return max((end for _, end in self.spans.values()), default=0.0)

    def _begin(self, group: int) -> None:
        i, length = self._queues[group][0]
        self._begun[i] = self.now
        self._left[i] = [length, group]

    def _rates(self) -> dict[int, float]:
        if len(self._left) == 1:
            return dict.fromkeys(self._left, 1.0)
        users: dict[str, int] = {}
        for _, group in self._left.values():
            for link in self._links[int(group)]:
                users[link] = users.get(link, 0) + 1
        return {
            i: 1.0 / max((users[link] for link in self._links[int(group)]), default=1)
            for i, (_, group) in self._left.items()
        }

    def _advance(self, most: float) -> float:
        """Let time pass until the next collective ends, at most so much; how much it was."""
        rates = self._rates()
        passed = min([most, *(left / rates[i] for i, (left, _) in self._left.items())])
        self.now += passed
        ended = []
        for i, state in self._left.items():
            state[0] -= passed * rates[i]
            if state[0] <= _EPS:
                ended.append(i)
        for i in ended:
            group = int(self._left.pop(i)[1])
            self.spans[i] = (self._begun[i], self.now)
            self._queues[group].popleft()
            if self._queues[group]:
                self._begin(group)
        return passed
