"""Several schedules of one graph, and which of them is used.

The scheduler has two numbers that no rule gives: how much work is left behind for stalls, and how early gathers are
issued. A few values of both are tried, in units of the graph's own stalls and gathers; each run starts from the times
of the one before. The graph as it is, is among them. The number of runs falls with the size of the graph, and never
depends on the clock: all ranks choose the same.

    never above the limit of memory
    the shortest time; within 0.3% of it the smallest peak, and then the fewest nodes that moved
    within 1% of it one that moves at most so many nodes, if there is one
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from wholestep.passes.overlap.list_schedule import (
    ListPolicy,
    ListSchedule,
    ListScheduler,
    MemoryGrowth,
    NeededTimes,
    in_order,
)
from wholestep.passes.overlap.settle import settle
from wholestep.passes.overlap.task_graph import TaskGraph
from wholestep.simulate.step_index import INPUT, OUTPUT, Order, StepIndex, memory_of
from wholestep.simulate.step_replay import StreamRules, replay

_AS_GOOD = 0.003
_FOR_FEW_MOVES = 0.01
_RUNS_OF_NODES = 50_000
"""Nodes times runs."""
_FEWEST_RUNS, _MOST_RUNS = 3, 20
_MOST_DISPLACED = 0.15
_SMALL = 16 * 2**20
LITTLE = 2000.0
"""Microseconds: if a step is less above its bound, only a few schedules are tried."""
_WITH_RESERVE = ((4.5, 40.0), (9.0, 20.0), (2.0, 10.0), (18.0, 10.0), (4.5, 3.0), (9.0, 5.0))
_WITHOUT = ((0.0, 10.0), (0.0, 1.0), (0.0, 40.0), (2.0, 20.0))
"""Work left behind, in stalls, and how early gathers are issued, in gathers."""


@dataclass(frozen=True)
class ScheduledStep:
    """A schedule, as the simulator sees it."""

    order: Sequence[int]
    time: float
    peak: int
    displaced: float
    """The part of the nodes that moved."""


def choose(
    graph: TaskGraph,
    rules: StreamRules,
    limit: float | None = None,
    max_displaced: float | None = None,
    *,
    quickly: bool = False,
) -> tuple[ScheduledStep, ScheduledStep]:
    """The schedule to use, and the graph as it is. `limit`: bytes; without, `default_limit`."""
    index = graph.index
    live, _ = memory_of(index)
    as_is = _measure(graph, rules, range(len(index)))
    most = limit if limit is not None else default_limit(as_is.peak)
    tried = [as_is]
    bound = _bound(graph)
    near = (1.0 + _AS_GOOD) * bound
    quickly = quickly or as_is.time - bound < LITTLE
    for schedule in _schedules(graph, MemoryGrowth(live.tolist()), most, quickly):
        if schedule.time <= (1.0 + _FOR_FEW_MOVES) * min(each.time for each in tried) or not rules.are_independent:
            tried.append(_measure(graph, rules, settle(graph, schedule.order)))
            if tried[-1].time <= near and tried[-1].peak <= most and tried[-1].displaced <= _MOST_DISPLACED:
                break
    return best(tried, most, max_displaced), as_is


def default_limit(peak: int) -> int:
    """The bytes that a schedule may take where the graph takes `peak`; a bucket of a small model is larger than 5%."""
    return max(int(1.05 * peak), peak + _SMALL)


def best(tried: Iterable[ScheduledStep], limit: float, max_displaced: float | None = None) -> ScheduledStep:
    """The schedule that the rules above choose."""
    all_of_them = list(tried)
    lowest = min(each.peak for each in all_of_them)
    allowed = [each for each in all_of_them if each.peak <= max(limit, lowest)]
    if max_displaced is not None:
        allowed = [each for each in allowed if each.displaced <= max_displaced] or allowed[:1]
    shortest = min(each.time for each in allowed)
    few = [
        each for each in allowed if each.displaced <= _MOST_DISPLACED and each.time <= shortest * (1.0 + _FOR_FEW_MOVES)
    ]
    if few:
        allowed, shortest = few, min(each.time for each in few)
    good = [each for each in allowed if each.time <= shortest * (1.0 + _AS_GOOD)]
    return min(good, key=lambda each: (each.peak, each.displaced, each.time))


def _bound(graph: TaskGraph) -> float:
    """What no order is faster than: all computation, or all collectives of a group."""
    streams: dict[int, float] = {}
    for i, time in enumerate(graph.cost):
        streams[graph.index.group[i]] = streams.get(graph.index.group[i], 0.0) + time
    return max(streams.values())


def _schedules(graph: TaskGraph, growth: MemoryGrowth, limit: float, quickly: bool) -> Iterator[ListSchedule]:
    """Runs of the scheduler, from the most promising policy on."""
    runs = min(max(_RUNS_OF_NODES // max(len(graph), 1), _FEWEST_RUNS), _MOST_RUNS)
    runs = _FEWEST_RUNS if quickly else runs
    gather = _typical([graph.cost[c] for c in graph.index.collectives if graph.is_pull[c]])
    plain = in_order(graph)
    first = ListScheduler(
        graph, ListPolicy(0.0, 3.0 * gather, 10.0 * gather, limit), NeededTimes(graph, plain), growth.copy()
    ).run()
    yield first
    stall = _typical(list(first.stalls.values()))
    if not stall:
        return

    def twice(left: float, early: float) -> Iterator[ListSchedule]:
        policy = ListPolicy(left * stall, early * gather, 4.0 * max(stall, gather) + left * stall, limit)
        need = NeededTimes(graph, plain)
        for _ in range(2):
            found = ListScheduler(graph, policy, need, growth.copy()).run()
            yield found
            need = NeededTimes(graph, found.start, found.progress)

    filled = list(islice(twice(4.5, 10.0), runs - 1))
    yield from filled
    helps = min(each.time for each in filled) < (1.0 - _FOR_FEW_MOVES) * first.time
    others = (found for policy in (_WITH_RESERVE if helps else _WITHOUT) for found in twice(*policy))
    yield from islice(others, max(runs - 3, 0))


def _typical(times: list[float]) -> float:
    """A time that most are not above."""
    times = sorted(time for time in times if time > 0.0)
    return times[int(0.9 * (len(times) - 1))] if times else 0.0


def _measure(graph: TaskGraph, rules: StreamRules, order: Order) -> ScheduledStep:
    index = graph.index
    found = replay(index, graph.cost, order, rules)
    live, _ = memory_of(index, order)
    return ScheduledStep(order, found.step, int(live.max()), displaced(index, order))


def displaced(index: StepIndex, order: Order) -> float:
    """The part of the nodes, without inputs and output, that must have moved: all but a longest increasing sequence."""
    tails: list[int] = []
    moving = [i for i in order if index.kind[i] not in (INPUT, OUTPUT)]
    for i in moving:
        at = bisect_left(tails, i)
        tails[at : at + 1] = [i]
    return 1.0 - len(tails) / len(moving) if moving else 0.0
