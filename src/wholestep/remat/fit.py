"""Fit a graph into a memory budget: choose what its backward recomputes, and rewrite it.

    fit_to_budget      a StepGraph; a `measure` builds the executable form of each candidate and tells its exact peak
    partition_within   the joint graph of AOTAutograd, by estimates alone

Compiled steps use the compiler's own cut where that fits, with fewer bytes saved if need be. Otherwise norms and
softmax are decomposed, forward and backward become calls of their own, and plans are searched. Deterministic: ranks
with the same shapes choose the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic

from torch import fx

from wholestep.ir.graphs import collector_paused, copy_graph, tensors_in
from wholestep.ir.memory_report import MemoryReport, SavedTensor, shown
from wholestep.ir.meta import node_meta
from wholestep.ir.step_graph import StepGraph
from wholestep.remat.measure import E, Measure, Measured, set_opaque_sizes
from wholestep.remat.options import Budget, Policy, policy_of
from wholestep.remat.problem import RematProblem, check_policy
from wholestep.remat.rewrite import decompose_norms, recompute
from wholestep.remat.search import Candidate, CutSearch, Effort, ParetoFront, PlanSearch, Trial
from wholestep.torch_private.allocator import extract_forward_backward

log = logging.getLogger("wholestep.memory")

_LATER = (
    " The first call, which is this, creates the optimizer's state and is not compiled. The next ones may need more: "
    "memory_budget=0.0 and step.last.memory of the second call tell how much. A fused optimizer is compiled at once."
)
_MANY = 8000
"""Number of nodes from which on building a plan takes half a second and more."""

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True)
class FittedStep(Generic[E]):
    """A step that is within its budget."""

    report: MemoryReport
    executable: E | None
    """What the measure built for the chosen candidate; None if it compiles nothing."""


def fit_to_budget(step_graph: StepGraph, budget: Budget, policy: Policy, *, measure: Measure[E]) -> FittedStep[E]:
    """Rewrite a graph in normal form so that its peak is within a budget; raises MemoryBudgetError if it cannot be."""
    started = time.perf_counter()
    with nullcontext() if measure.compiles else collector_paused():
        fitted = _Fit(step_graph, policy, measure).run(budget)
    log.info("%s", fitted.report)
    log.info("planned in %.1f s, %d candidates built", time.perf_counter() - started, fitted.report.plans_tried)
    return fitted


def _effort(nodes: int, compiles: bool) -> Effort:
    if compiles:
        return Effort(levels=4, is_slow=True)
    return Effort(levels=6, smallest=4, near=0.99) if nodes < _MANY else Effort(levels=3)


class _Fit(Generic[E]):
    def __init__(self, step_graph: StepGraph, policy: Policy, measure: Measure[E]) -> None:
        self._step_graph = step_graph
        self._measure = measure
        self._later: dict[Candidate, int] = {}
        """Peaks of the calls that follow, where they are known to differ."""
        self._is_decided = not policy.is_empty or any(node_meta(n).recompute for n in step_graph.gm.graph.nodes)
        """By a policy or by `torch.utils.checkpoint`, which the compiler's own cut would ignore."""
        self._base = copy_graph(step_graph.gm.graph)
        set_opaque_sizes(self._base)
        if measure.compiles:
            log.debug("%d norms and softmax decomposed", decompose_norms(self._base))
        self._problem = RematProblem.of(
            self._base,
            policy=policy,
            fuses=measure.compiles,
            device=measure.device,
            workspace=measure.workspace,
        )
        check_policy(self._problem)
        self._cuts = CutSearch(self._build)
        self._plans = PlanSearch(
            ParetoFront(self._problem),
            self._build,
            _effort(len(self._problem.nodes), measure.compiles),
            lambda: self._least_later,
            "" if measure.knows_later else _LATER,
        )

    def run(self, budget: Budget) -> FittedStep[E]:
        most = self._plans.limit(budget)
        trial = None if budget.fraction == 0.0 else self._cut_within(most)
        if trial is None:
            trial, _ = self._plans.fit(budget, self._cuts.least_built if self._cuts.has_cuts else None)
        if budget.most is not None:
            self._check_later(trial, most)
        if trial.candidate.shed is None:
            self._step_graph.gm.graph = self._graph(trial.candidate)
            self._step_graph.gm.recompile()
        return FittedStep(self._report(trial, most), trial.measured.executable)

    def _graph(self, candidate: Candidate) -> fx.Graph:
        """The graph in normal form for a candidate. The compiler's own cut needs no rewrite."""
        if candidate.shed is not None:
            graph = copy_graph(self._step_graph.gm.graph)
            set_opaque_sizes(graph)
            return graph
        graph = copy_graph(self._base)
        recompute(graph, self._problem, candidate.plan)
        return graph

    def _build(self, candidate: Candidate) -> Measured[E]:
        found = self._measure(self._graph(candidate), candidate.shed)
        if found.later_peak:
            self._later[candidate] = found.later_peak
        if candidate.shed is None:
            nodes = len(self._problem.recomputed(candidate.plan))
            what = f"{nodes} nodes recomputed (estimated peak {shown(candidate.peak)})"
        else:
            what = f"the compiler's cut with {shown(candidate.shed)} fewer"
        log.info("%s: peak %s at %s", what, shown(found.peak), found.peak_at)
        return found

    @property
    def _least_later(self) -> int:
        """The lowest peak of the calls that follow, of all that was built; 0 if it is not known."""
        return min(self._later.values(), default=0)

    def _check_later(self, trial: Trial[E], most: int) -> None:
        """Refuse a budget that this call meets and those that follow cannot: before the first update, not after it."""
        if self._later.get(trial.candidate, 0) > most:
            self._plans.smallest()
            if self._least_later > most:
                self._plans.refuse(most, self._least_later)

    def _cut_within(self, most: int) -> Trial[E] | None:
        """The compiler's own cut, if it is allowed here and fits, with fewer bytes saved if need be."""
        if not self._measure.may_cut or self._is_decided:
            return None
        found = self._cuts.within(most, self._plans.least_built)
        return None if found is not None and found.candidate.shed and self._plans.fits_without(most) else found

    def _report(self, trial: Trial[E], most: int) -> MemoryReport:
        report = MemoryReport(
            device=str(self._measure.device),
            budget=most,
            planned_peak=trial.peak,
            smallest_peak=int(min(self._plans.peak_smallest(), self._cuts.least_built)),
            peak_without=max(self._plans.peak_without(), trial.peak),
            saved=(),
            recomputed=(),
            plans_tried=self._plans.tried + self._cuts.tried,
            shed=trial.candidate.shed,
        )
        if trial.candidate.shed is not None:
            cuts = trial.measured.cuts
            saved = [SavedTensor(name, size, "") for cut in cuts for name, size in cut.saved.items() if size]
            recomputed = tuple(name for cut in cuts for name in cut.recomputed)
        else:
            problem, plan = self._problem, trial.candidate.plan
            saved = [
                SavedTensor(node.name, problem.saved_bytes(i), node_meta(node).module_path)
                for i in problem.saved(plan)
                if not problem.is_list(i) and problem.saved_bytes(i)
                for node in (problem.nodes[i],)
            ]
            recomputed = tuple(problem.nodes[i].name for i in sorted(problem.recomputed(plan)))
        return replace(report, saved=tuple(sorted(saved, key=lambda tensor: -tensor.bytes)), recomputed=recomputed)


def partition_within(memory_budget: Any, policy: Any = None) -> Partition:
    """A `partition_fn` of `aot_function` whose forward saves what fits. The options are those of `ws.compile`.

    The peak is that of the two graphs with their inputs, estimated by simulating them; values inside of fused kernels
    do not count.
    """
    budget, chosen = Budget.of(memory_budget), policy_of(policy)
    assert budget is not None

    def partition(
        joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        backward = _backward_of(joint.graph)
        problem = RematProblem.of(
            joint.graph,
            policy=chosen,
            fuses=True,
            is_forward=lambda node: node not in backward,
            is_backward=backward.__contains__,
        )
        check_policy(problem)
        search: PlanSearch[None] = PlanSearch(
            ParetoFront(problem), lambda candidate: Measured(candidate.peak), Effort(levels=6, near=0.99)
        )
        found, _ = search.fit(budget)
        saved = [problem.nodes[i] for i in problem.saved(found.candidate.plan) if not problem.is_list(i)]
        read = [node for node in joint.graph.find_nodes(op="placeholder") if _is_read_by(node, backward, problem)]
        return extract_forward_backward(joint, [*read, *saved], num_fwd_outputs, settings)

    return partition


def _backward_of(graph: fx.Graph) -> set[fx.Node]:
    """All nodes from the first on that reads a gradient: a joint graph has its forward first."""
    nodes = list(graph.nodes)
    given = {node for node in nodes if node.op == "placeholder" and "tangents" in str(node.target)}
    first = next((i for i, node in enumerate(nodes) if not given.isdisjoint(node.all_input_nodes)), len(nodes))
    return given.union(node for node in nodes[first:] if node.op == "call_function")


def _is_read_by(node: fx.Node, backward: set[fx.Node], problem: RematProblem) -> bool:
    """True if the backward may need an input of the forward: a tensor that it, or a node it recomputes, reads."""
    if node in backward or not any(True for _ in tensors_in(node.meta.get("val"))):
        return False
    needed = {problem.nodes[i] for i, is_needed in enumerate(problem.needed) if is_needed}
    return any(user in backward or user in needed for user in node.users)
