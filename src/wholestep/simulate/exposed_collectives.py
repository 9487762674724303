"""Why a collective is not hidden: the one constraint without which it would be.

    link         it queues behind other collectives of its stream              without: it starts when it is issued
    place        it is issued later, or waited for earlier, than it has to be  without: it is not
    memory       the same, and issuing it earlier would pass the limit         without: it is issued that much earlier
    dependence   what it sends is ready only now, and is needed at once        without: it is issued at the beginning
    start        the step begins with it, and nothing else can be computed     without: it comes from the step before

A reason is the first of them whose removal takes away at least four fifths of the exposed time, by the times of the
replay. `without` removes it in the simulator, which shows whether the reason is true.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from wholestep.ir.step_graph import shown
from wholestep.simulate.step_index import COMPUTE, FREE, INPUT, ISSUE, OUTPUT, WAIT, StepIndex, memory_of
from wholestep.simulate.step_replay import StepReplay, StreamRules, replay

LINK, PLACE, MEMORY, DEPENDENCE, START = "link", "place", "memory", "dependence", "start"
REASONS = (LINK, PLACE, MEMORY, DEPENDENCE, START)
_ENOUGH = 0.8
_LEAST_US = 0.01
_CHEAP_US = 30.0
"""What takes no longer moves along with a collective: casts and padding before it, casts and divisions behind it."""
_MOST_CHEAP = 64


@dataclass(frozen=True)
class ExposedCollective:
    """A collective for which the compute stream stands still."""

    node: int
    """Its number in the index of the timeline."""
    name: str
    exposed_us: float
    queued_us: float
    """The part of it in which other collectives of its stream run."""
    reason: str
    """One of `REASONS`."""
    removed_us: float
    """How much of the exposed time goes without that constraint."""
    after: int = -1
    """The last node that takes time to make what it sends; -1: everything is there from the start."""
    before: int = -1
    """The first node that takes time and needs its result; -1: nothing before the end."""
    behind: tuple[int, ...] = ()
    """What it queues behind."""
    issue_us: float = 0.0
    """When it is issued without the constraint."""
    more_bytes: int = 0
    """Bytes beyond the limit that would hide it (`memory`)."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that the reason names."""
        if self.reason == LINK:
            return self.behind
        return tuple(i for i in (self.after, self.before) if i >= 0)

    def text(self, index: StepIndex) -> str:
        """The reason in words."""
        names = [index.nodes[i].name for i in self.behind]
        source = f"after {index.nodes[self.after].name}" if self.after >= 0 else "from the beginning"
        user = f"before {index.nodes[self.before].name}" if self.before >= 0 else "at the end"
        head = f"{self.exposed_us:.1f} us of it are exposed"
        if self.reason == LINK:
            named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            return f"{head}: the link is busy with {named}"
        if self.reason == PLACE:
            return f"{head}: it could be issued {source} and waited for {user}"
        if self.reason == MEMORY:
            return f"{head}: issued early enough it would take {shown(self.more_bytes)} more than the limit allows"
        if self.reason == START:
            return f"{head}: it is needed {user}, and too little is computed before; start it a step earlier"
        return f"{head}: it can only be issued {source} and is needed {user}; no independent computation is in between"


@dataclass(frozen=True)
class Stall:
    """The time that one collective is exposed for."""

    collective: int
    waits: tuple[int, ...]
    us: float
    begin: float
    """When computation first came to a wait of it, or to the end of the graph."""


def explain_exposed(
    index: StepIndex, cost: Sequence[float], found: StepReplay, limit: int | None = None
) -> list[ExposedCollective]:
    """All exposed collectives in the order in which computation comes to them. `limit`: the most bytes allowed."""
    reasons = _Reasons(index, cost, found, limit)
    return [reasons.of(stall) for stall in stalls(index, found)]


def stalls(index: StepIndex, found: StepReplay) -> list[Stall]:
    """Where computation stands still: at waits, and at the end for the collective that ends last."""
    by: dict[int, list[int]] = {}
    for i in found.order:
        if index.kind[i] == WAIT and index.issued[i] >= 0 and found.end[i] - found.start[i] > _LEAST_US:
            by.setdefault(index.issued[i], []).append(i)
    result = [
        Stall(c, tuple(waits), sum(found.end[w] - found.start[w] for w in waits), found.start[waits[0]])
        for c, waits in by.items()
    ]
    last = _end_of_computation(index, found)
    if found.step - last > _LEAST_US:
        latest = max(index.collectives, key=found.end.__getitem__)
        result.append(Stall(latest, (), found.step - last, last))
    return result


def without(
    index: StepIndex, cost: Sequence[float], found: StepReplay, rules: StreamRules, exposed: ExposedCollective
) -> StepReplay:
    """The same step without the constraint that keeps a collective from being hidden."""
    c = exposed.node
    if exposed.reason == LINK:
        return replay(index, cost, found.order, rules, own_stream={c})
    if exposed.reason == DEPENDENCE:
        return replay(index, cost, found.order, rules, own_stream={c}, issued_at={c: 0.0})
    if exposed.reason == START:
        return replay(index, cost, found.order, rules, own_stream={c}, issued_at={c: -cost[c]})
    return replay(index, cost, _well_placed(index, cost, found.order, exposed), rules)


def _well_placed(
    index: StepIndex, cost: Sequence[float], order: Sequence[int], exposed: ExposedCollective
) -> list[int]:
    """The order with a collective right behind the last node that takes time to make what it sends, and its waits right
    before the first node that takes time and needs its result; what is cheap in between moves along."""
    place = dict(zip(order, range(len(order)), strict=True))
    early = _cheap_sources(index, cost, exposed.node)[0]
    late = _cheap_users(index, cost, index.waits.get(exposed.node, []))[0]
    begin = place[exposed.after] + 1 if exposed.after >= 0 else 0
    end = place[exposed.before] if exposed.before >= 0 else len(order)
    sooner = sorted((i for i in early if place[i] >= begin), key=place.__getitem__)
    later = {i for i in late if place[i] < end}
    for i in order[:end]:  # what reads something that moves down moves, too
        if i not in later and any(source in later for source in index.sources[i]):
            later.add(i)
    moved = later.union(sooner)
    rest = [[i for i in part if i not in moved] for part in (order[:begin], order[begin:end], order[end:])]
    return [*rest[0], *sooner, *rest[1], *sorted(later, key=place.__getitem__), *rest[2]]


def _cheap_sources(index: StepIndex, cost: Sequence[float], c: int) -> tuple[dict[int, None], list[int]]:
    """A collective with the cheap nodes that make what it sends, and what those need."""
    inside, needed, stack = {c: None}, list[int](), [c]
    while stack:
        for source in index.sources[stack.pop()]:
            if source in inside or index.kind[source] == INPUT:
                continue
            is_cheap = index.kind[source] not in (WAIT, ISSUE) and cost[source] <= _CHEAP_US
            if is_cheap and len(inside) < _MOST_CHEAP:
                inside[source] = None
                stack.append(source)
            else:
                needed.append(source)
    return inside, needed


def _cheap_users(index: StepIndex, cost: Sequence[float], waits: Sequence[int]) -> tuple[dict[int, None], list[int]]:
    """Some waits with the views and cheap operators behind them, and what needs those."""
    inside, users, stack = dict.fromkeys(waits), list[int](), list(waits)
    while stack:
        for user in index.users[stack.pop()]:
            if user in inside:
                continue
            cheap = index.kind[user] == FREE or (index.kind[user] == COMPUTE and cost[user] <= _CHEAP_US)
            if cheap and len(inside) < _MOST_CHEAP:
                inside[user] = None
                stack.append(user)
            else:
                users.append(user)
    return inside, users


def _end_of_computation(index: StepIndex, found: StepReplay) -> float:
    return max((found.end[i] for i in found.order if index.kind[i] != ISSUE), default=0.0)


class _Reasons:
    def __init__(self, index: StepIndex, cost: Sequence[float], found: StepReplay, limit: int | None) -> None:
        self._index, self._cost, self._found, self._limit = index, cost, found, limit
        self._place = numpy.empty(len(index), dtype=numpy.int64)
        self._place[numpy.asarray(found.order)] = numpy.arange(len(index))
        self._live = memory_of(index, found.order)[0] if limit is not None else None
        self._last = _end_of_computation(index, found)
        streams: dict[int, list[int]] = {}
        for i in found.order:
            if index.kind[i] == ISSUE:
                streams.setdefault(index.group[i], []).append(i)
        self._before = {i: (stream, position) for stream in streams.values() for position, i in enumerate(stream)}

    def of(self, stall: Stall) -> ExposedCollective:
        """The first constraint that is enough, or else the one that does most."""
        found = self._found
        c = stall.collective
        length = found.end[c] - found.start[c]
        after, ready = self._ready(c)
        before, needed = self._needed(stall)
        options = (
            (LINK, found.issue[c] + length - stall.begin),
            (PLACE, self._free_at(c, ready) + length - needed),
            (DEPENDENCE, length - stall.begin),
            (START, 0.0),
        )
        reason, removed, issue = "", -1.0, 0.0
        for option, left in options:
            gone = stall.us - max(left, 0.0)
            if gone > removed + _LEAST_US:
                reason, removed = option, gone
                issue = {LINK: found.issue[c], PLACE: ready, DEPENDENCE: 0.0, START: -length}[option]
            if removed >= _ENOUGH * stall.us:
                break
        more = 0
        if reason == PLACE and self._live is not None and ready < found.issue[c] - _LEAST_US and self._place[c]:
            more = max(self._bytes_beyond(c, min(max(stall.begin - length, ready), found.issue[c])), 0)
            reason = MEMORY if more else reason
        queued = min(max(found.start[c] - max(stall.begin, found.issue[c]), 0.0), stall.us)
        behind = self._behind(c) if reason == LINK else ()
        name = self._index.nodes[c].name
        return ExposedCollective(
            c, name, stall.us, queued, reason, max(removed, 0.0), after, before, behind, issue, more
        )

    def _behind(self, c: int) -> tuple[int, ...]:
        """What a collective queues behind, from its issue on, the nearest first."""
        stream, position = self._before[c]
        ahead = []
        while position and self._found.end[stream[position - 1]] > self._found.issue[c] + _LEAST_US:
            position -= 1
            ahead.append(stream[position])
        return tuple(ahead)

    def _free_at(self, c: int, at: float) -> float:
        """When its stream is free for a collective that is issued at a time, after those issued before then."""
        stream, position = self._before[c]
        issue, end = self._found.issue, self._found.end
        ahead = bisect_right(stream, at, hi=position, key=issue.__getitem__)
        return max(at, end[stream[ahead - 1]] if ahead else 0.0)

    def _ready(self, c: int) -> tuple[int, float]:
        """The last input of a collective that takes time to make, and when it is there; cheap ones move along."""
        end = self._found.end
        needed = _cheap_sources(self._index, self._cost, c)[1]
        latest = max(needed, key=lambda i: (end[i], self._place[i]), default=-1)
        return latest, end[latest] if latest >= 0 else 0.0

    def _needed(self, stall: Stall) -> tuple[int, float]:
        """The first node that takes time and needs what the collective gives, and when computation would come to it if
        it did not stand still before, nor compute the cheap nodes in between."""
        index, found = self._index, self._found
        inside, users = _cheap_users(index, self._cost, stall.waits)
        users = [user for user in users if index.kind[user] != OUTPUT]
        later = sum(self._cost[i] for i in inside)
        if not users:
            return -1, max(self._last - stall.us - later, stall.begin) if stall.waits else stall.begin
        first = min(users, key=self._place.__getitem__)
        begin = found.issue[first] if index.kind[first] == ISSUE else found.start[first]
        return first, max(begin - stall.us - later, stall.begin)

    def _bytes_beyond(self, c: int, at: float) -> int:
        """How far the limit is passed if a collective is issued at a time: its result lives from there on."""
        index, found = self._index, self._found
        assert self._live is not None
        assert self._limit is not None
        end = int(self._place[c])
        begin = end
        while begin > 0:
            begin -= 1
            before = found.order[begin]
            when = found.issue[before] if index.kind[before] == ISSUE else found.start[before]
            if when <= at:
                break
        made = sum(int(index.sizes[s]) for s in index.made[c])
        return int(self._live[begin:end].max()) + made - self._limit
