"""A list scheduler: from the start to the end of a step, what computation and communication do next.

    compute     next in order │ chain first, side work is kept for stalls │ stall: side work
    stream      what compute made, as soon as it is there; gathers of weights when they are due, the first needed first

Computation follows the order of the graph, except where a task on the longest chain is ready: that goes first as long
as the tasks left behind take no longer than `reserve`. They fill the time in which the chain waits for a collective.
A collective that frees more memory than it takes is issued at once. One that takes memory is issued as late as its
stream allows: with everything behind it on that stream it must be done before it is needed.
Waits stand where their collective is done if that frees memory, and otherwise before the first reader.

One run costs a few heap operations for each task. Times are those of `simulate.step_replay`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from wholestep.passes.overlap.task_graph import TaskGraph
from wholestep.simulate.step_index import COMPUTE, INPUT, ISSUE, READ, WAIT

_BOUNDARY_US = 10.0
"""Gathers are issued before tasks that take longer, so that they do not stand between operators that are fused."""
_MOST_FILLERS = 6


@dataclass(frozen=True)
class ListPolicy:
    """The choices of one run."""

    reserve: float = 0.0
    """Microseconds of work that may be left behind for a chain."""
    early: float = 0.0
    """Microseconds by which gathers are issued earlier than needed."""
    ahead: float = 0.0
    """Microseconds of work within which tasks may fill a stall although they take memory."""
    limit: float = float("inf")
    """Bytes that may be alive."""


@dataclass(frozen=True)
class ListSchedule:
    """An order of all nodes, and what it costs."""

    order: list[int]
    time: float
    peak: int
    start: list[float]
    """When each node runs, or is issued."""
    stalls: dict[int, float]
    """How long computation stood still for each collective."""
    progress: list[tuple[float, float]]
    """How much was computed, and when."""
    policy: ListPolicy


class NeededTimes:
    """When collectives are needed, by the times of an earlier run."""

    def __init__(self, graph: TaskGraph, when: Sequence[float], progress: Sequence[tuple[float, float]] = ()) -> None:
        """`when`: the start of each node; `progress`: how much was computed when (without: all without a stall)."""
        self.of: dict[int, float] = {}
        """When a collective must be done."""
        self.issue: dict[int, float] = {}
        """When it must be issued for that, with all that is behind it on its stream."""
        self._progress, self._at = progress, 0
        index = graph.index
        last = max((when[i] for i in graph.tasks), default=0.0)
        streams: dict[int, list[tuple[float, int]]] = {}
        for c in index.collectives:
            needed = min((when[reader] for reader in graph.readers.get(c, ())), default=2 * last)
            self.of[c] = needed
            by = needed if graph.is_pull[c] else when[c] + 2 * graph.cost[c]
            streams.setdefault(index.group[c], []).append((by, c))
        for queue in streams.values():
            queue.sort(reverse=True)
            latest = float("inf")
            for by, c in queue:
                latest = min(by, latest) - graph.cost[c]
                self.issue[c] = latest

    def time_of(self, computed: float) -> float:
        """When so much was computed; asked with growing amounts."""
        progress, at = self._progress, self._at
        if not progress:
            return computed
        while at + 1 < len(progress) and progress[at + 1][0] <= computed:
            at += 1
        self._at = at
        return progress[at][1] + max(computed - progress[at][0], 0.0)


def in_order(graph: TaskGraph) -> list[float]:
    """The start of each node if nothing ever waited."""
    index, cost = graph.index, graph.cost
    clock, found = 0.0, [0.0] * len(graph)
    for i, kind in enumerate(index.kind):
        found[i] = clock
        if kind in (COMPUTE, READ):
            clock += cost[i]
    return found


class ListScheduler:
    """One run of the scheduler."""

    def __init__(
        self, graph: TaskGraph, policy: ListPolicy, need: NeededTimes, growth: MemoryGrowth | None = None
    ) -> None:
        index = graph.index
        self._graph, self._policy, self._need, self._growth = graph, policy, need, growth
        self._kind, self._cost, self._sources, self._after = index.kind, graph.cost, index.sources, graph.after
        self._missing = dict(graph.needs)
        self._done = [kind == INPUT for kind in index.kind]
        self._sizes: list[int] = index.sizes.tolist()
        self._uses = [0] * len(self._sizes)
        for touched in graph.touch:
            for s in touched:
                self._uses[s] += 1
        self._persistent = index.persistent
        for s in self._persistent:
            self._uses[s] = 1 << 60
        self.live = self.peak = sum(self._sizes[s] for s in self._persistent)
        self.clock = self._now = self._computed = 0.0
        self._due = in_order(graph)
        self._frontier = 0
        self._progress: list[tuple[float, float]] = []
        self.order = [i for i, kind in enumerate(index.kind) if kind == INPUT]
        self.start = [0.0] * len(graph)
        self.end = dict[int, float]()
        self.stalls = dict[int, float]()
        self._free = [0.0] * max(len(index.groups), 1)
        self._events: list[tuple[float, int]] = []
        self._by_place: list[int] = []
        self._by_chain: list[tuple[float, int]] = []
        self._ready = [False] * len(graph)
        self._left = _PrefixSums(graph)
        self._push: list[list[tuple[float, int]]] = [[] for _ in self._free]
        self._pull: list[list[tuple[float, int]]] = [[] for _ in self._free]

    def run(self) -> ListSchedule:
        """Place everything."""
        graph = self._graph
        for i in graph.tasks:
            if not graph.needs[i]:
                self._is_ready(i)
        left = len(graph.tasks)
        while len(self.order) < len(graph) - len(graph.end):
            self._arrive()
            chosen = self._choose()
            if chosen < 0:
                if not self._feed_idle():
                    break
                continue
            length = self._cost[chosen]
            if length > _BOUNDARY_US:
                self._feed(length, self._policy.early)
            self._compute(chosen)
            left -= 1
        self._finish()
        time = max([self.clock, *self._free])
        return ListSchedule(self.order, time, self.peak, self.start, self.stalls, self._progress, self._policy)

    def _is_ready(self, i: int) -> None:
        if self._kind[i] == ISSUE:
            group = max(self._graph.index.group[i], 0)
            if self._graph.is_pull[i]:
                heapq.heappush(self._pull[group], (self._need.issue[i], i))
            else:
                heapq.heappush(self._push[group], (self._need.of[i], i))
                self._feed_stream(group, 0.0, 0.0)
            return
        self._ready[i] = True
        self._left.add(i, self._cost[i])
        heapq.heappush(self._by_place, i)
        heapq.heappush(self._by_chain, (-self._graph.tail[i], i))

    def _choose(self) -> int:
        """The next task to compute; -1 if none is ready."""
        place, chain, ready = self._by_place, self._by_chain, self._ready
        while place and not ready[place[0]]:
            heapq.heappop(place)
        if not place:
            return -1
        first = place[0]
        reserve = self._policy.reserve
        if reserve > 0.0:
            while not ready[chain[0][1]]:
                heapq.heappop(chain)
            urgent = chain[0][1]
            if urgent > first and self._is_near(urgent) and self._left.before(urgent) <= reserve and self._fits(urgent):
                return urgent
            first = self._oldest_of_longest_chain()
        if self._is_near(first) and self._fits(first):
            return first
        return self._smaller(first)

    def _oldest_of_longest_chain(self) -> int:
        """Of the oldest tasks that are ready the one that most comes after."""
        tail, oldest = self._graph.tail, self._few_oldest()
        return max(oldest, key=lambda i: (tail[i], -i))

    def _few_oldest(self) -> list[int]:
        found: list[int] = []
        while self._by_place and len(found) < _MOST_FILLERS:
            i = heapq.heappop(self._by_place)
            if self._ready[i]:
                found.append(i)
        for i in found:
            heapq.heappush(self._by_place, i)
        return found

    def _smaller(self, first: int) -> int:
        """A task that the limit allows; the first one if there is nothing to wait for."""
        for i in self._few_oldest():
            if (self._is_near(i) or self._frees(i)) and self._fits(i):
                return i
        return -1 if self._events else first

    def _is_near(self, i: int) -> bool:
        """Whether a task comes soon in the order of the graph."""
        return self._due[i] <= self._computed + self._policy.ahead

    def _frees(self, i: int) -> bool:
        """Whether a task frees what it takes."""
        freed = sum(self._sizes[s] for s in self._graph.touch[i] if self._uses[s] == 1)
        return self._graph.made_bytes[i] <= freed

    def _fits(self, i: int) -> bool:
        """Whether the limit allows to compute a task now, with what is to come before its own place."""
        growth = self._growth
        if growth is None or i <= growth.reached:
            return True
        peak: int = self.live + self._graph.made_bytes[i] + growth.until(i)
        return peak <= self._policy.limit

    def _compute(self, i: int) -> None:
        self._ready[i] = False
        self._left.add(i, -self._cost[i])
        self._place(i)
        self._computed += self._cost[i]
        self._progress.append((self._computed, self.clock))
        self._now = self._need.time_of(self._computed)
        self._reach()
        for follower in self._graph.followers.get(i, ()):
            self._satisfied(follower)

    def _reach(self) -> None:
        """Where the graph itself would be after as much computation."""
        tasks, due, at = self._graph.tasks, self._due, self._frontier
        while at + 1 < len(tasks) and due[tasks[at + 1]] <= self._computed:
            at += 1
        self._frontier = at
        if self._growth is not None:
            self._growth.reached = max(self._growth.reached, tasks[at])

    def _satisfied(self, i: int) -> None:
        self._missing[i] -= 1
        if not self._missing[i]:
            self._is_ready(i)

    def _place(self, i: int) -> None:
        """Put a node with all that is computed on demand for it."""
        done, sources, after = self._done, self._sources, self._after
        stack = [i]
        while stack:
            node = stack[-1]
            if done[node]:
                stack.pop()
                continue
            missing = [source for source in sources[node] if not done[source]]
            if node in after:
                missing += [source for source in after[node] if not done[source]]
            if missing:
                stack += sorted(missing, reverse=True)
                continue
            stack.pop()
            self._put(node)

    def _put(self, i: int) -> None:
        kind = self._kind[i]
        self._done[i] = True
        if kind == WAIT:
            c = self._graph.index.issued[i]
            if c >= 0 and self.end[c] > self.clock:
                self.stalls[c] = self.stalls.get(c, 0.0) + self.end[c] - self.clock
                self.clock = self.end[c]
        self.start[i] = self.clock
        if kind in (COMPUTE, READ):
            self.clock += self._cost[i]
        elif kind == ISSUE:
            group = max(self._graph.index.group[i], 0)
            begin = max(self.clock, self._free[group])
            self._free[group] = self.end[i] = begin + self._cost[i]
            heapq.heappush(self._events, (self.end[i], i))
        self.order.append(i)
        self._account(i)

    def _account(self, i: int) -> None:
        self.live += self._graph.made_bytes[i]
        if self.live > self.peak:
            self.peak = self.live
        uses = self._uses
        for s in self._graph.touch[i]:
            uses[s] -= 1
            if not uses[s]:
                self.live -= self._sizes[s]

    def _arrive(self) -> None:
        """What is done by now."""
        while self._events and self._events[0][0] <= self.clock:
            c = heapq.heappop(self._events)[1]
            self._wait_early(c)
            for reader in self._graph.readers.get(c, ()):
                self._satisfied(reader)

    def _wait_early(self, c: int) -> None:
        """Wait for what frees memory."""
        if self._graph.held_bytes[c] > 0 and not self._graph.is_pull[c]:
            for wait in self._graph.index.waits.get(c, ()):
                self._place(wait)

    def _feed(self, length: float, early: float) -> None:
        for group in range(len(self._free)):
            self._feed_stream(group, length, early)

    def _feed_stream(self, group: int, length: float, early: float) -> None:
        """Issue what has to be issued before the next task, that takes so long, is computed."""
        push, pull = self._push[group], self._pull[group]
        while push or pull:
            if pull:
                issue, c = pull[0]
                behind = self._cost[push[0][1]] if push else 0.0
                is_due = issue <= self._now + length + early + behind
                if (
                    is_due
                    and (not push or self._need.of[c] <= push[0][0])
                    and (self._may_take(c) or issue + self._cost[c] < self._now)
                ):
                    heapq.heappop(pull)
                    self._issue(c)
                    continue
            if not push:
                return
            self._issue(heapq.heappop(push)[1])

    def _may_take(self, c: int) -> bool:
        growth = self._growth
        if growth is None:
            return True
        until = min(self._graph.readers.get(c, (growth.reached,)))
        peak: int = self.live + self._graph.made_bytes[c] + growth.until(until)
        return peak <= self._policy.limit

    def _issue(self, c: int) -> None:
        self._place(c)
        for follower in self._graph.followers.get(c, ()):
            self._satisfied(follower)

    def _feed_idle(self) -> bool:
        """Nothing can be computed: issue what is due, then let time pass; False if nothing is left."""
        if not self._events:
            waiting = [(self._need.of[queue[0][1]], g) for g, queue in enumerate(self._pull) if queue]
            if not waiting:
                return False
            self._issue(heapq.heappop(self._pull[min(waiting)[1]])[1])
            return True
        until, c = self._events[0]
        self._feed(until - self.clock, self._policy.early)
        until, c = self._events[0]
        if until > self.clock:
            self.stalls[c] = self.stalls.get(c, 0.0) + until - self.clock
            self.clock = until
        return True

    def _finish(self) -> None:
        for i in range(len(self._graph)):
            if not self._done[i] and i not in self._graph.end:
                self._place(i)
        for i in self._graph.end:
            self._place(i)


class MemoryGrowth:
    """How much more memory the graph takes on its way from one place to another, in its own order."""

    def __init__(self, live: Sequence[int]) -> None:
        self._live = list(live)
        self.reached = 0
        """The place that computation has come to."""
        self._table = [self._live]
        width = 1
        while 2 * width <= len(self._live):
            row = self._table[-1]
            self._table.append(list(map(max, row, row[width:])))
            width *= 2

    def copy(self) -> MemoryGrowth:
        """The same at the start."""
        made = object.__new__(MemoryGrowth)
        made._live, made._table, made.reached = self._live, self._table, 0
        return made

    def until(self, place: int) -> int:
        """The highest level until a place, over that of now."""
        begin, end = self.reached, max(place, self.reached) + 1
        level = (end - begin).bit_length() - 1
        row = self._table[level]
        return max(row[begin], row[end - (1 << level)]) - self._live[begin]


class _PrefixSums:
    """Times of ready tasks, summed up to a place (a Fenwick tree)."""

    def __init__(self, graph: TaskGraph) -> None:
        self._rank = {i: k + 1 for k, i in enumerate(graph.tasks)}
        self._sums = [0.0] * (len(graph.tasks) + 1)

    def add(self, i: int, value: float) -> None:
        """Add the time of a task."""
        k, sums = self._rank[i], self._sums
        while k < len(sums):
            sums[k] += value
            k += k & -k

    def before(self, i: int) -> float:
        """The time of all ready tasks before one."""
        k, sums, total = self._rank[i] - 1, self._sums, 0.0
        while k:
            total += sums[k]
            k -= k & -k
        return total
