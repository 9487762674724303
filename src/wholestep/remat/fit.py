"""Fit a graph into a memory budget: choose what its backward recomputes, and rewrite it.

    fit_to_budget      a StepGraph; a `measure` builds the executable form of each candidate and tells its exact peak
    partition_within   the joint graph of AOTAutograd, by estimates alone

Compiled steps use the compiler's own cut where that fits, with fewer bytes saved if need be. Otherwise norms and
softmax are decomposed, forward and backward become calls of their own, and plans are searched. Deterministic: ranks
with the same shapes choose the same.

A step under a budget is rewritten in two ways. `recompute` lets the backward recompute values:

    before    h = gelu(u); ..; g = gelu_backward(d, u); w = mm(h, d)
    after     h = gelu(u); ..; g = gelu_backward(d, u); h_again = gelu(u); w = mm(h_again, d)

Numerics: exact. A node is recomputed from the same values by the same operator, and no random op runs twice. A new part
of the step (`NodeMeta.begins`) begins with the backward and wherever much is recomputed: a compiler that saw all of it
at once would recompute everything at the start.

`decompose_norms` replaces norms and softmax, which save more than they need, by their parts:

    before    y, mean, rstd = native_layer_norm(x, ..)
    after     mean = ..; rstd = ..; y = (x - mean) * rstd * w + b

Inductor does the same later. Done before planning, the backward can recompute `y` from the few bytes of `mean` and
`rstd`, without the sums over rows. For compiled steps only: numerics are those of Inductor's decompositions.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor, fx

from wholestep.ir.graph_walks import collector_paused, copy_graph, tensors_in
from wholestep.ir.meta import node_meta, set_node_meta, update_node_meta
from wholestep.ir.rewrite_rules import apply_rules, rewrite_rule
from wholestep.ir.step_graph import MemoryReport, SavedTensor, StepGraph, shown
from wholestep.progress import SILENT, Progress
from wholestep.remat.measure import E, Measure, Measured, order_of, set_opaque_sizes
from wholestep.remat.options import Budget, Policy, policy_of
from wholestep.remat.problem import Plan, RematProblem, check_policy
from wholestep.remat.search import Candidate, CutSearch, Effort, ParetoFront, PlanSearch, Trial
from wholestep.simulate.cost_model import is_counted
from wholestep.torch_private.aot import extract_forward_backward
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.inductor import decomposed

aten = torch.ops.aten
log = logging.getLogger("wholestep.memory")

_PARTS = 16
"""On the CPU a part ends when more than one in so many bytes of the forward's values has been recomputed in it."""
_LEAST = 32
"""Nodes of a part, without views: fewer are not worth a compiled call of their own."""


def recompute(graph: fx.Graph, problem: RematProblem, plan: Plan) -> int:
    """Rewrite the graph of a problem, or a copy of it; returns how many nodes were added."""
    return _Recompute(graph, problem, plan).run()


class _Recompute:
    def __init__(self, graph: fx.Graph, problem: RematProblem, plan: Plan) -> None:
        self._graph = graph
        self._problem = problem
        self._nodes = list(graph.nodes)
        self._again = problem.recomputed(plan)
        self._made: dict[fx.Node, fx.Node] = {}
        total = sum(
            problem.saved_bytes(i) for i, needed in enumerate(problem.needed) if needed and not problem.is_view(i)
        )
        # Only on the CPU does Inductor fuse unrelated loops.
        on_cpu = all(tensor.device.type == "cpu" for node in self._nodes for tensor in tensors_in(node.meta.get("val")))
        self._most = total / _PARTS if on_cpu else float("inf")
        self._since = 0.0
        """Bytes recomputed since the last part began."""
        self._length = 0
        """Nodes since then."""

    def run(self) -> int:
        chosen = {self._nodes[i] for i in self._again}
        waiting: list[int] = []
        is_first = True
        for entry in order_of(self._problem, self._again):
            if entry < 0:
                waiting.append(~entry)
            elif self._problem.backward[entry]:
                node = self._nodes[entry]
                first = self._insert(waiting, node) or node
                if is_first or (self._length >= _LEAST and self._is_large(waiting)):
                    update_node_meta(first, begins=True)
                    is_first, self._since, self._length = False, 0.0, 0
                self._since += self._bytes(waiting)
                self._length += sum(1 for i in (*waiting, entry) if not self._problem.is_view(i))
                waiting = []
                if not chosen.isdisjoint(node.all_input_nodes):
                    node.args = fx.map_arg(node.args, self._recomputed)
                    node.kwargs = fx.map_arg(node.kwargs, self._recomputed)
        return len(self._made)

    def _insert(self, waiting: list[int], before: fx.Node) -> fx.Node | None:
        with self._graph.inserting_before(before):
            for i in waiting:
                self._made[self._nodes[i]] = _copy(self._graph, self._nodes[i], self._recomputed)
        return self._made[self._nodes[waiting[0]]] if waiting else None

    def _recomputed(self, node: fx.Node) -> fx.Node:
        return self._made.get(node, node)

    def _is_large(self, waiting: list[int]) -> bool:
        return any(is_counted(self._nodes[i].target) for i in waiting) or (bool(waiting) and self._since > self._most)

    def _bytes(self, waiting: list[int]) -> int:
        return sum(self._problem.saved_bytes(i) for i in waiting if not self._problem.is_view(i))


def _copy(graph: fx.Graph, node: fx.Node, second: Callable[[fx.Node], fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, second)
    copy.name = f"{node.name}_again"
    copy.meta = dict(node.meta)
    set_node_meta(copy, replace(node_meta(node), phase="backward", recompute=True, in_place=None))
    return copy


_DECOMPOSED = frozenset(
    {
        aten._log_softmax.default,
        aten._softmax.default,
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._fused_rms_norm.default,
    }
)


def decompose_norms(graph: fx.Graph) -> int:
    """Replace norms and softmax of a graph by their parts; returns how many."""
    return apply_rules(graph, [_decompose])


def _can_decompose(node: fx.Node) -> bool:
    """True if the metadata has fake tensors, and results are taken one by one."""
    several = isinstance(node.meta.get("val"), list | tuple)
    parts = all(user.target is operator.getitem for user in node.users) if several else True
    return parts and any(isinstance(t, FakeTensor) for t in tensors_in(node.meta.get("val")))


@rewrite_rule(*_DECOMPOSED)
def _decompose(node: fx.Node) -> fx.Node | list[fx.Node] | None:
    if not _can_decompose(node):
        return None
    graph = node.graph
    sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    values = [source.meta["val"] for source in sources]
    mode = next(t.fake_mode for t in tensors_in(node.meta["val"]) if isinstance(t, FakeTensor))

    def run(*tensors: Any) -> tuple[Any, ...]:
        env = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: env.get(n, n.meta.get("val")))
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(result) if isinstance(result, list | tuple) else (result,)

    parts = decomposed(run, values, mode, settings={}, functionalize=False)
    env: dict[fx.Node, fx.Node] = dict(zip(parts.graph.find_nodes(op="placeholder"), sources, strict=True))
    for part in parts.graph.nodes:
        if part.op == "call_function":
            env[part] = graph.node_copy(part, env.__getitem__)
            env[part].meta = {"val": part.meta.get("val")}
    results = [env[value] for value in parts.graph.output_node().args[0]]  # type: ignore[index, union-attr]
    return results if isinstance(node.meta["val"], list | tuple) else results[0]


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


def fit_to_budget(
    step_graph: StepGraph, budget: Budget, policy: Policy, *, measure: Measure[E], progress: Progress = SILENT
) -> FittedStep[E]:
    """Rewrite a graph in normal form so that its peak is within a budget; raises MemoryBudgetError if it cannot be."""
    started = time.perf_counter()
    with nullcontext() if measure.compiles else collector_paused():
        fitted = _Fit(step_graph, policy, measure, progress).run(budget)
    log.info("%s", fitted.report)
    log.info("planned in %.1f s, %d candidates built", time.perf_counter() - started, fitted.report.plans_tried)
    return fitted


def _effort(nodes: int, compiles: bool) -> Effort:
    if compiles:
        return Effort(levels=4, is_slow=True)
    return Effort(levels=6, smallest=4, near=0.99) if nodes < _MANY else Effort(levels=3)


class _Fit(Generic[E]):
    def __init__(self, step_graph: StepGraph, policy: Policy, measure: Measure[E], progress: Progress) -> None:
        progress.stage("passes", lambda: "memory budget: estimating plans")
        self._progress = progress
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

    def _say(self) -> None:
        """What is built now, and how many builds may follow it at most."""
        built = self._plans.tried + self._cuts.tried
        left = self._plans.most_left + self._cuts.most_left
        what = "compilation" if self._measure.compiles else "plan"
        text = f"memory budget, {what} {built + 1} (at most {max(left - 1, 0)} left)"
        self._progress.stage("compilation", lambda: text, lambda: built / max(built + left, 1), prefix=text)

    def _build(self, candidate: Candidate) -> Measured[E]:
        self._say()
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
            self._cuts.most_left = 0
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
