"""Fit a step into a memory budget: choose what its backward computes again, and rewrite its graph so.

Compiled steps keep torch's cut where that meets the budget, with a little less kept if need be (`cut_budget.py`). Else
norms and softmax are opened first, forward and backward become calls of their own, and what those calls need is
measured. Deterministic: ranks with the same shapes choose the same.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.ir.garbage import collector_paused
from wholestep.ir.graphs import copy_graph, tensors_in
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.ir.memory_report import MemoryReport, SavedTensor, shown
from wholestep.ir.meta import node_meta
from wholestep.ir.reinplace import reinplace
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.lower.cut_budget import CutSearch, Level, cuts_in
from wholestep.lower.expand import expand
from wholestep.lower.region_memory import RegionMemory
from wholestep.lower.remat import Cut
from wholestep.lower.step import Lowering
from wholestep.remat.budget import Budget
from wholestep.remat.fit import Effort, Fitted, Fitting
from wholestep.remat.outline import Outline
from wholestep.remat.plans import Candidate, Plans
from wholestep.remat.policy import Policy
from wholestep.remat.policy_check import check_policy
from wholestep.remat.rewrite import recompute
from wholestep.remat.stand_in import tell_unknown_sizes
from wholestep.remat.timeline import Timeline, timeline
from wholestep.remat.workspace import OperatorMemory
from wholestep.torch_private.fx_graphs import lazy_graph_module

log = logging.getLogger("wholestep.memory")

_LATER = (
    " The first call, which is this, makes the optimizer's state and is not compiled. The next ones may need more: "
    "memory_budget=0.0 and step.last.memory of the second call tell how much. A fused optimizer is asked at once."
)
_MANY = 8000
"""Nodes from which on building a plan takes half a second and more."""


def _effort(nodes: int, compiles: bool) -> Effort:
    if compiles:
        return Effort(levels=4, is_slow=True)
    return Effort(levels=6, smallest=4, near=0.99) if nodes < _MANY else Effort(levels=3)


def fit_to_budget(
    step_graph: StepGraph, lowering: Lowering, budget: Budget, policy: Policy, *, runs_once: bool
) -> MemoryReport:
    """Rewrite a graph in normal form so that its peak is within a budget; raises MemoryBudgetError if none is."""
    started = time.perf_counter()
    compiles = lowering.lowers(step_graph, runs_once=runs_once)
    with nullcontext() if compiles else collector_paused():
        work = _Work(step_graph, lowering, policy, compiles, runs_once)
        check_policy(work.outline)
        effort = _effort(len(work.outline.nodes), compiles)
        advice = _LATER if runs_once and lowering.compiles and not compiles else ""
        fitting = Fitting(Plans(work.outline), work.build, effort, lambda: work.least_later, advice)
        most = fitting.limit(budget)
        level = None if budget.fraction == 0.0 else work.cut_within(most, fitting)
        if level is None:
            found, _ = fitting.fit(budget, work.least_cut)
            if budget.most is not None:
                work.check_later(found.candidate, most, fitting)
            work.use(found.candidate)
            report = work.report(found, most, fitting)
        else:
            if budget.most is not None:
                work.check_later(level.shed, most, fitting)
            work.use(level.shed)
            report = work.report_of_cut(level, most, fitting)
    log.info("%s", report)
    log.info("planned in %.1f s, %d plans built", time.perf_counter() - started, report.plans_tried)
    return report


class _Work:
    def __init__(
        self, step_graph: StepGraph, lowering: Lowering, policy: Policy, compiles: bool, runs_once: bool
    ) -> None:
        self._step_graph = step_graph
        self._lowering = lowering
        self._compiles = compiles
        self._runs_once = runs_once
        self._cuts = CutSearch(self._build_cut)
        self._made: dict[Candidate | int, fx.GraphModule] = {}
        """Lowered graphs by their plans, or by what they shed."""
        self._later: dict[Candidate | int, int] = {}
        """The peaks of the calls that follow under the same plans, where this one makes optimizer state that they hold
        from the beginning. Not known if they are compiled and this one is not."""
        changes = step_graph.signature.state_changes if compiles or not lowering.compiles else ()
        self._state = [
            change.output
            for change in changes
            if change.kind is ChangeKind.CREATED and change.slot is InputKind.OPTIMIZER_STATE
        ]
        self._is_told = not policy.is_empty or any(node_meta(node).recompute for node in step_graph.gm.graph.nodes)
        """By a policy or by `torch.utils.checkpoint`, which torch's cut does not ask."""
        self._base = copy_graph(step_graph.gm.graph)
        tell_unknown_sizes(self._base)
        if compiles:
            log.debug("%d operators opened", expand(self._base))
        self.device = main_device(self._base)
        operators = OperatorMemory(self.device)
        self._memory = RegionMemory(operators)
        self.outline = Outline.of(
            self._base,
            policy=policy,
            fuses=compiles,
            device=self.device,
            workspace=(lambda node: 0) if compiles else operators.workspace,
        )

    def use(self, chosen: Candidate | int) -> None:
        """Run what was built for a plan, or for bytes to shed."""
        if isinstance(chosen, Candidate):
            self._step_graph.gm.graph = self.planned(chosen)
            self._step_graph.gm.recompile()
        if self._compiles:
            self._lowering.keep(self._step_graph, self._made[chosen])

    def planned(self, candidate: Candidate) -> fx.Graph:
        """The graph in normal form under a plan."""
        graph = copy_graph(self._base)
        recompute(graph, self.outline, candidate.plan)
        return graph

    def build(self, candidate: Candidate) -> int:
        """The peak of the graph in executable form under a plan."""
        gm, found = self._executable(self.planned(candidate), None, candidate)
        if self._compiles:
            self._made[candidate] = gm
        log.info(
            "%d nodes computed again: peak %s (estimated %s) at %s",
            len(self.outline.run_again(candidate.plan)),
            shown(found.peak),
            shown(candidate.peak),
            found.peak_at,
        )
        return found.peak

    def _executable(
        self, graph: fx.Graph, shed: int | None, chosen: Candidate | int
    ) -> tuple[fx.GraphModule, Timeline]:
        """What runs in the end, before updates are in place, and played with them. `shed`: as in `Lowering.lower`."""
        gm = played = lazy_graph_module(self._step_graph.gm, graph, "WholeStepPlanned")
        if self._compiles:
            gm = self._lowering.lower(gm, runs_once=self._runs_once, shed=shed)
            played = lazy_graph_module(gm, copy_graph(gm.graph), "WholeStepPlayed")
        reinplace(played.graph)
        extra = self._memory.of(played, self.device)
        if self._state:
            results: Any = played.graph.output_node().args[0]
            state = [results[i] for i in self._state if i is not None]
            self._later[chosen] = timeline(played.graph, extra, self.device, state).peak
        return gm, timeline(played.graph, extra, self.device)

    @property
    def least_later(self) -> int:
        """The least that the calls that follow need, of all that was built; 0 where that is not known."""
        return min(self._later.values(), default=0)

    def check_later(self, chosen: Candidate | int, most: int, fitting: Fitting) -> None:
        """Refuse a budget that this call meets and those that follow cannot: better now than after one update."""
        if self._later.get(chosen, 0) > most:
            fitting.smallest()
            if self.least_later > most:
                fitting.refuse(most, self.least_later)

    def cut_within(self, most: int, fitting: Fitting) -> Level | None:
        """torch's cut, if it is allowed here and meets the budget, with some bytes less if need be."""
        if not self._compiles or not self._lowering.may_cut or self._is_told:
            return None
        found = self._cuts.within(most, fitting.least_built)
        return None if found is not None and found.shed and fitting.has_room_for_all(most) else found

    @property
    def least_cut(self) -> float | None:
        """The lowest peak of torch's cut that was built; None if there is no such cut."""
        return self._cuts.least_built if self._cuts.can_shed else None

    def _build_cut(self, shed: int) -> tuple[int, tuple[Cut, ...]]:
        graph = copy_graph(self._step_graph.gm.graph)
        tell_unknown_sizes(graph)
        gm, found = self._executable(graph, shed, shed)
        self._made[shed] = gm
        log.info("torch's cut with %s less: peak %s at %s", shown(shed), shown(found.peak), found.peak_at)
        return found.peak, cuts_in(gm)

    def report_of_cut(self, level: Level, most: int, fitting: Fitting) -> MemoryReport:
        return replace(
            self._report(level.peak, most, fitting), saved=level.saved, recomputed=level.recomputed, shed=level.shed
        )

    def report(self, found: Fitted, most: int, fitting: Fitting) -> MemoryReport:
        outline, plan = self.outline, found.candidate.plan
        saved = [
            SavedTensor(node.name, outline.keeping(i), node_meta(node).module_path)
            for i in outline.saved(plan)
            if not outline.is_list(i) and outline.keeping(i)
            for node in (outline.nodes[i],)
        ]
        return replace(
            self._report(found.peak, most, fitting),
            saved=tuple(sorted(saved, key=lambda tensor: -tensor.bytes)),
            recomputed=tuple(outline.nodes[i].name for i in sorted(outline.run_again(plan))),
        )

    def _report(self, peak: int, most: int, fitting: Fitting) -> MemoryReport:
        return MemoryReport(
            device=str(self.device),
            budget=most,
            planned_peak=peak,
            smallest_peak=int(min(fitting.peak_smallest(), self._cuts.least_built)),
            peak_without=max(fitting.peak_without(), peak),
            saved=(),
            recomputed=(),
            plans_tried=fitting.tried + self._cuts.tried,
        )


def main_device(graph: fx.Graph) -> torch.device:
    """The device that most bytes of a graph are on; a GPU before the CPU."""
    total: dict[torch.device, int] = {}
    for node in graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            total[tensor.device] = total.get(tensor.device, 0) + tensor_bytes(tensor)
    return max(total, key=lambda device: (device.type != "cpu", total[device]), default=torch.device("cpu"))
