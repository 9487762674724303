"""Hide communication behind computation: when collectives are issued, waited for, and what is computed meanwhile.

    before                                      after
    y = mm(x, w1)                               a = all_gather(w2)           as early as it must be, not earlier
    a = all_gather(w2)                          y = mm(x, w1)
    w = wait_tensor(a)                          g1 = mm(t, dy)               from further up: fills the time of r
    z = mm(y, w)                                w = wait_tensor(a)
    r = reduce_scatter(g)                       z = mm(y, w)
    v = wait_tensor(r)                          v = wait_tensor(r)           when r is done: what it sent is free

Needs: nothing.  Numerics: exact where nothing is packed: every node computes what it did, only the order changes. Where
latency is exposed, collectives are packed into buckets if the step with them is faster: gathers are exact, reductions
reassociate (`bucket="exact"` packs gathers only, `bucket=None` nothing).  Random draws, writes and effects keep their
order; write-backs stay at the end.  `passes="auto"` lets one rank plan for all (`overlap/shared_plan.py`), so
collectives of overlapping groups are issued in one order everywhere.
Memory: never above `peak_bytes`.  Cost: a few runs of a list scheduler (`overlap/list_schedule.py`), each near-linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from torch import fx

from wholestep.errors import invalid_value
from wholestep.ir.graph_walks import copy_graph
from wholestep.ir.propagate_metadata import fill_values
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.engine.manager import drop_dead_code
from wholestep.passes.overlap.choice import LITTLE, ScheduledStep, choose, default_limit
from wholestep.passes.overlap.packing import pack, sizes, worth_a_try
from wholestep.passes.overlap.shared_plan import OnePlan, SharedPlan, plan_key, structure, with_issue_order
from wholestep.passes.overlap.task_graph import task_graph
from wholestep.simulate.cost_model import node_costs
from wholestep.simulate.machine import Machine
from wholestep.simulate.step_index import StepIndex, costs_by, index_step
from wholestep.simulate.step_timeline import machine_for, stream_rules
from wholestep.torch_private.fx_graphs import lazy_graph_module

Bucket = Literal["auto", "exact"] | float | None
_FASTER = 0.997
"""Buckets are used if the step takes at most so much of its time without them."""


def _check(
    *,
    machine: Machine | None = None,
    cost: Callable[[fx.Node], float] | None = None,
    peak_bytes: int | None = None,
    bucket: Bucket = "auto",
    max_displaced: float | None = None,
    one_plan: OnePlan | None = None,
) -> None:
    given: Any = machine
    if given is not None and not isinstance(given, Machine):
        raise invalid_value("machine", machine, "give a wholestep.simulate.Machine, or None for that of the graph.")
    if cost is not None and not callable(cost):
        raise invalid_value("cost", cost, "give a function from a node to microseconds.")
    if peak_bytes is not None and not (type(peak_bytes) is int and peak_bytes > 0):
        raise invalid_value("peak_bytes", peak_bytes, "give a number of bytes, or None for 1.05 times the peak.")
    is_size = type(bucket) in (int, float) and bucket > 0  # type: ignore[operator]
    if not (bucket is None or bucket in ("auto", "exact") or is_size):
        raise invalid_value("bucket", bucket, 'use "auto", "exact" (gathers only), None, or a size in MiB.')
    if max_displaced is not None and not 0.0 <= max_displaced <= 1.0:
        raise invalid_value("max_displaced", max_displaced, "give a part of all nodes, from 0 to 1.")
    if one_plan is not None and not callable(one_plan):
        raise invalid_value("one_plan", one_plan, "give a function of a key and of a function that makes a plan.")


def _packs_no_reduction(*, bucket: Bucket = "auto", **_: object) -> bool:
    return bucket is None or bucket == "exact"


@graph_optimization_pass(numerics="reassociates", exact_if=_packs_no_reduction, allow_rerun=True, check=_check)
def overlap_communication(
    gm: fx.GraphModule,
    *,
    machine: Machine | None = None,
    cost: Callable[[fx.Node], float] | None = None,
    peak_bytes: int | None = None,
    bucket: Bucket = "auto",
    max_displaced: float | None = None,
    one_plan: OnePlan | None = None,
) -> None:
    """Order the nodes of a graph so that communication is hidden.

    `cost`: microseconds of a node; without, the model of `machine` (by default that of the graph's device).
    `peak_bytes`: the most bytes that may be alive; without, 1.05 times the peak of the graph as it is, or 16 MiB more.
    `bucket`: "auto", "exact" (gathers only), None, or a size in MiB. `max_displaced`: the part of all nodes that may
    move. `one_plan`: how ranks come to one plan: called with a key, a function that makes a plan as text, and whether
    it should be that of the first rank; it returns the plan that all ranks with this key use.
    """
    index = index_step(gm)
    if not index.collectives:
        return
    given = GivenCosts(machine or (None if cost is not None else machine_for(gm.graph)), cost, max_displaced)

    def own() -> SharedPlan:
        return _own_plan(gm, index, given, peak_bytes, bucket)

    if one_plan is None:
        plan = own()
    else:
        key = plan_key(gm)
        plan = SharedPlan.from_json(one_plan(key, lambda: own().to_json(), True))
    if plan.bucket is not None:
        _pack(gm, plan.bucket, bucket)
        index = index_step(gm)
    its = structure(index)
    if its != plan.graph:
        following = partial(_following_plan, index, given, peak_bytes, plan)
        plan = (
            SharedPlan.from_json(one_plan(f"{key}/{its}", lambda: following().to_json(), False))
            if one_plan
            else following()
        )
    if plan.order:
        reorder(gm.graph, [index.nodes[i] for i in plan.order])


def _following_plan(index: StepIndex, given: GivenCosts, peak_bytes: int | None, first: SharedPlan) -> SharedPlan:
    """The plan for a graph that communicates as another one, which has a plan."""
    own = plan_of(index, given, peak_bytes)
    order = with_issue_order(task_graph(index, own.times), own.found.order, first.issued)
    return SharedPlan.of(index, order or range(len(index)), first.bucket)


def _own_plan(
    gm: fx.GraphModule, index: StepIndex, given: GivenCosts, peak_bytes: int | None, bucket: Bucket
) -> SharedPlan:
    """The plan for a graph, which stays as it is."""
    plan = plan_of(index, given, peak_bytes)
    packed = _best_packed(gm, plan, given, plan.limit, bucket)
    if packed is not None:
        return SharedPlan.of(packed[1].index, packed[1].found.order, packed[0])
    return SharedPlan.of(index, plan.found.order, None)


@dataclass(frozen=True)
class GivenCosts:
    """What the user said of costs."""

    machine: Machine | None
    cost: Callable[[fx.Node], float] | None
    max_displaced: float | None = None

    def times(self, index: StepIndex) -> list[float]:
        """Microseconds of every node."""
        if self.cost is not None:
            return costs_by(index, self.cost)
        assert self.machine is not None
        return node_costs(index, self.machine)


@dataclass(frozen=True)
class StepPlan:
    """A graph with its costs, and what became of it."""

    index: StepIndex
    times: list[float]
    found: ScheduledStep
    as_is: ScheduledStep
    limit: int
    """The bytes that it may take."""


def plan_of(index: StepIndex, given: GivenCosts, limit: int | None, *, quickly: bool = False) -> StepPlan:
    """The best schedule of a graph."""
    times = given.times(index)
    rules = stream_rules(index, given.machine)
    found, as_is = choose(task_graph(index, times), rules, limit, given.max_displaced, quickly=quickly)
    return StepPlan(index, times, found, as_is, default_limit(as_is.peak) if limit is None else limit)


def _best_packed(
    gm: fx.GraphModule, plan: StepPlan, given: GivenCosts, limit: int, bucket: Bucket
) -> tuple[float, StepPlan] | None:
    """A size of buckets with which the step is faster, and its plan."""
    if bucket is None:
        return None
    index, times = plan.index, plan.times
    if isinstance(bucket, str):
        if not worth_a_try(index, times, plan.found.order, stream_rules(index, given.machine)):
            return None
        tried = sizes(index, times)
    else:
        tried = [float(bucket)]
    best: tuple[float, StepPlan] | None = None
    shortest = _FASTER * plan.found.time
    for mebibytes in tried:
        copied = lazy_graph_module(gm, copy_graph(gm.graph))
        _pack(copied, mebibytes, bucket)
        trial_index = index_step(copied)
        if len(trial_index.collectives) == len(index.collectives):
            continue
        trial = plan_of(trial_index, given, limit, quickly=True)
        if trial.found.peak <= max(limit, plan.found.peak) and trial.found.time <= shortest:
            best, shortest = (mebibytes, trial), _FASTER * trial.found.time
    if best is not None and best[1].found.time > LITTLE:
        best = best[0], plan_of(best[1].index, given, limit)
    return best


def _pack(gm: fx.GraphModule, mebibytes: float, bucket: Bucket) -> None:
    pack(gm, mebibytes, only_exact=bucket == "exact")
    drop_dead_code(gm.graph)
    fill_values(gm)


def reorder(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Put all nodes of a graph into an order; those that stand right already are not touched."""
    place = next(iter(graph.nodes))
    if nodes[0] is not place:
        place.prepend(nodes[0])
    for before, node in pairwise(nodes):
        if before.next is not node:
            before.append(node)
