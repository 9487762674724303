"""The stages of a step in order: `compile_step` makes of a call an `Executable`, which runs or raises the failed guard.

StepCall          a call of the user's function
BoundGraph        its graph after all passes, bound to the user's objects          what `ws.capture` returns
Executable        the graph within its memory budget, lowered, ready to run        what `ws.build` returns

`resolve` turns the options that a user wrote into the objects that they name. `compiled_step.py` decides which
executable runs for a call, and when another one is compiled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, fx, nn

from wholestep.artefact.addresses import Given
from wholestep.artefact.file_format import SavedStep
from wholestep.artefact.saved_graph import CaptureFacts, SavedGraph
from wholestep.artefact.shards import ThisRank
from wholestep.capture.objects.discover import find_models, plan_of_models
from wholestep.capture.objects.objects_found_by_calls import EarlierTraces
from wholestep.capture.results.state_after import refuse_what_grows
from wholestep.capture.scalars.scalar_policy import ScalarPolicy, trace_with_scalars
from wholestep.capture.trace import is_tracing, trace_step
from wholestep.cross_iteration import pending_updates
from wholestep.cross_iteration.executor import CrossingExecutor, IterationGraphs, iteration_graphs
from wholestep.errors import ArtefactError, GuardError, LowerWarning, OptionError, UnsupportedError
from wholestep.guards.all_guards import Guards
from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.graph_functions import CHECKS
from wholestep.ir.io.arguments import ArgumentWriter
from wholestep.ir.meta import warn_user
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.ir.verify import verify
from wholestep.lower.compiled_region import RegionCache
from wholestep.lower.cuda_graph import Program
from wholestep.lower.lower_step import (
    LoweredStep,
    LoweringCache,
    lower_iteration,
    lower_step,
    measure_step,
    record_step,
)
from wholestep.lower.options import LowerOptions
from wholestep.lower.report import Lowering as LoweringReport
from wholestep.lower.report import found_lowering
from wholestep.options import Options, default_progress
from wholestep.parallel.plan import Plan
from wholestep.passes.engine.contract import BoundPass, applied_passes, check_list
from wholestep.passes.engine.dump import PassDump
from wholestep.passes.engine.manager import run_passes
from wholestep.passes.engine.registry import AUTOMATIC, DEFAULT, automatic
from wholestep.passes.engine.registry import resolve as resolve_passes
from wholestep.passes.overlap.shared_plan import OnePlan
from wholestep.passes.overlap_communication import overlap_communication
from wholestep.passes.redundant_collectives import remove_dead_collectives, remove_duplicate_collectives
from wholestep.progress import SILENT, Progress
from wholestep.remat.fit import fit_to_budget
from wholestep.remat.options import Budget, policy_of
from wholestep.runtime.executor import Executor, Gather
from wholestep.runtime.python_program import program
from wholestep.simulate.machine import Machine
from wholestep.simulate.step_timeline import step as simulate_step
from wholestep.torch_private.distributed import default_group, is_dtensor, spec_of
from wholestep.torch_private.inductor import saved_kernels
from wholestep.torch_private.modes import mode_that_needs_eager

ALWAYS = (remove_duplicate_collectives, remove_dead_collectives)
"""Passes that run on every captured graph that communicates, before those of the user."""

log = logging.getLogger("wholestep")


@dataclass(frozen=True)
class ResolvedOptions(Options):
    """Options as the stages read them: every name is replaced by the object that it names."""

    lower_options: LowerOptions = field(default_factory=LowerOptions)
    memory_budget: Budget | None = None
    passes: tuple[BoundPass, ...] = ()
    """The passes to run, in order, without the disabled ones."""
    parallel: Plan | None = None
    given: Options = field(default_factory=Options, repr=False, compare=False)
    """What the user wrote."""


def resolve(options: Options) -> ResolvedOptions:
    """Turn what a user wrote (names of passes, a budget as text, lowering options as a mapping) into objects."""
    if isinstance(options, ResolvedOptions):
        return options
    given = {each.name: getattr(options, each.name) for each in fields(Options)}
    lower_options = LowerOptions.of(options.lower_options, "lower_options")
    if options.check_first:
        lower_options = lower_options.with_eagers_random_numbers()
    budget = Budget.of(options.memory_budget)
    policy_of(options.policy)  # raises for a wrong one
    if lower_options.shed and budget is not None:
        raise OptionError(
            f"memory_budget= is given together with shed={lower_options.shed} in lower_options.",
            fix="leave out one of them: a budget chooses how many bytes to shed (step.last.memory.shed).",
        )
    if options.parallel is not None and not isinstance(options.parallel, Plan):
        raise OptionError(
            f"parallel={options.parallel!r} is not a plan.",
            fix="use ws.Replicate(mesh), which keeps parameters whole like DDP, or ws.FullyShard(mesh), like FSDP.",
        )
    given |= {"lower_options": lower_options, "memory_budget": budget, "disable_passes": (), "given": options}
    return ResolvedOptions(**given | {"passes": _passes_to_run(options, lower_options)})


def with_plan_of_models(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: ResolvedOptions
) -> ResolvedOptions:
    """The options for a call. If they have no plan and torch has made the models of the step parallel
    (`DistributedDataParallel`, `fully_shard`), they get the plan of these models, and `passes="auto"` follows it."""
    plan = None if options.parallel is not None else plan_of_models(fn, args, kwargs, options)
    return options if plan is None else resolve(replace(options.given, parallel=plan))


def _passes_to_run(options: Options, lower_options: LowerOptions) -> tuple[BoundPass, ...]:
    chosen, disabled = options.passes, options.disable_passes
    if isinstance(chosen, str) and chosen == "auto":
        exact = options.lower != "inductor" or lower_options.exact
        chosen = automatic(communicates=options.parallel is not None, exact=exact)
        # Naming a default pass that "auto" has already left out is not an error.
        left_out = {each.name for each in (*DEFAULT, *AUTOMATIC)} - {each.name for each in chosen}
        disabled = [name for name in disabled if name not in left_out]
    passes = resolve_passes(chosen, disabled)
    check_list(passes)
    return passes


@dataclass(frozen=True)
class StepCall:
    """One call of the user's function."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    """The leaves of the arguments."""
    structure: Any
    """The tree structure of the arguments."""

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall:
        """A call with its arguments flattened."""
        return cls(fn, args, kwargs, *leaves_of((args, kwargs)))


class BoundGraph(StepGraph):
    """A StepGraph bound to the user's objects: `gather` reads its inputs, `guards` decide for which calls it runs."""

    def __init__(self, captured: CapturedStep, gather: Gather, guards: Guards, negated: tuple[str, ...]) -> None:
        super().__init__(captured.step_graph.gm, captured.step_graph.signature)
        self.captured = replace(captured, step_graph=self)
        """The record of the capture, with this version of the graph."""
        self.gather = gather
        self.guards = guards
        self.negated = negated
        """Inputs that are negated views (`z.conj().imag`): compiled code would read their memory with another sign."""

    @classmethod
    def of(cls, captured: CapturedStep, call: StepCall) -> BoundGraph:
        """Bind a graph; `call` is the captured call, and is not stored."""
        gather = Gather(captured.inputs, call.leaves, captured.guards.optimizers)
        values = zip(captured.inputs, gather.read(call.leaves) or (), strict=False)
        negated = tuple(slot.path for slot, value in values if isinstance(value, Tensor) and value.is_neg())
        return cls(captured, gather, Guards(captured.guards, gather, call.leaves), negated)

    def rebound(self, step_graph: StepGraph) -> BoundGraph:
        """Another version of the graph, with the same inputs and outputs, bound to the same objects."""
        made = BoundGraph(replace(self.captured, step_graph=step_graph), self.gather, self.guards, self.negated)
        made.memory = step_graph.memory
        return made

    def copy(self) -> BoundGraph:
        """A copy to rewrite, bound to the same objects."""
        return self.rebound(super().copy())


@dataclass
class Shared:
    """State that the captures and graphs of one compiled step share."""

    earlier: EarlierTraces
    """What traces found out for the next ones: objects that the step calls."""
    scalars: ScalarPolicy = field(default_factory=ScalarPolicy)
    """Which Python scalars are inputs of the graph."""
    lowering: LoweringCache = field(default_factory=LoweringCache)
    progress: Progress = SILENT
    one_plan: OnePlan | None = None
    """How ranks come to one plan of `overlap_communication`."""

    @classmethod
    def of(
        cls,
        options: Options,
        name: str = "",
        speaks: Callable[[], bool] = lambda: True,
        one_plan: OnePlan | None = None,
    ) -> Shared:
        """The state before the first capture. `speaks`: whether this process reports progress."""
        wanted = default_progress() if options.progress is None else options.progress
        progress = Progress(name, wanted and bool(name), speaks)
        cache = LoweringCache(RegionCache(progress=progress))
        return cls(EarlierTraces(options), lowering=cache, progress=progress, one_plan=one_plan)


@overload
def compile_step(start: StepCall | BoundGraph, options: ResolvedOptions, shared: Shared) -> Executable: ...


@overload
def compile_step(start: StepCall, options: ResolvedOptions, shared: Shared, *, end: Literal["graph"]) -> BoundGraph: ...


def compile_step(
    start: StepCall | BoundGraph, options: ResolvedOptions, shared: Shared, *, end: str = "executable"
) -> BoundGraph | Executable:
    """All stages, from a call of the user's function to an executable. Each stage takes the result of the last one.

    `ws.compile` runs all of them. `ws.capture` ends at the graph, and `ws.build` starts there.
    """
    if isinstance(start, StepCall):
        # capture/: trace the function on fake tensors, under the plan of parallel/; no state changes.
        trace = functools.partial(
            trace_step, start.fn, start.args, start.kwargs, options, earlier=shared.earlier, progress=shared.progress
        )
        captured, shared.scalars = trace_with_scalars(trace, shared.scalars)
        refuse_what_grows(captured, functools.partial(trace_with_scalars, trace, shared.scalars))
        # guards/, runtime/executor.py: bind the graph to the user's objects.
        graph = BoundGraph.of(captured, start)
        # passes/: ours, then those of the user; the graph is verified after each.
        run_passes(graph, ALWAYS if graph.signature.groups else (), level=0)
        verify(graph, min(options.verify, 2))
        dump = _dump_of(options)
        passes = [for_step(each, options, shared) for each in options.passes]
        run_passes(graph, passes, level=options.verify, dump=dump, progress=shared.progress)
    else:
        graph = start
    if end == "graph":
        return graph
    # remat/: choose what is saved and what the backward recomputes, to stay within the memory budget.
    lower_options, once, lowered = _lowering_of(graph, options), graph.captured.runs_once, None
    if options.memory_budget is not None:
        measure = measure_step(graph, lower_options, shared.lowering.regions, runs_once=once)
        policy, progress = policy_of(options.policy), shared.progress
        fitted = fit_to_budget(graph, options.memory_budget, policy, measure=measure, progress=progress)
        graph.memory, lowered = fitted.report, fitted.executable
        verify(graph, min(options.verify, 2))
    # cross_iteration/: setup and main graphs, if a pass moved updates into the next iteration.
    iterations = _iteration_graphs(graph)
    if iterations is not None:
        report = _lower_iterations(iterations, options, None if once else lower_options, shared.lowering)
        executor: Executor = CrossingExecutor(graph.captured, iterations, graph.memory)
    else:
        # lower/: compile regions, update in place, record one CUDA graph; runtime/: one Python function of the graph.
        lowered = lowered or lower_step(graph, lower_options, cache=shared.lowering.regions, runs_once=once)
        forward, unversioned = _function_of(graph, lowered, options, shared.lowering)
        report = lowered.report
        executor = Executor(graph.captured, lowered.gm, forward, unversioned, graph.memory)
    graph.guards.add_conditions_on_sizes()  # lowering adds conditions on dynamic sizes
    return Executable(graph, executor, report)


def for_step(bound: BoundPass, options: ResolvedOptions, shared: Shared) -> BoundPass:
    """A pass with what only the step knows: the memory budget, and how ranks come to one plan."""
    if bound.graph_pass is not overlap_communication:
        return bound
    known: dict[str, Any] = {}
    if shared.one_plan is not None:
        known["one_plan"] = shared.one_plan
    if options.memory_budget is not None and options.memory_budget.most is not None:
        known["peak_bytes"] = options.memory_budget.most
    return replace(bound, options=known | (bound.options or {}))


def _dump_of(options: Options) -> PassDump | None:
    return None if options.dump_passes is None else PassDump(Path(options.dump_passes))


def _lowering_of(graph: BoundGraph, options: ResolvedOptions) -> LowerOptions | None:
    """How regions are compiled; None if the step runs operator by operator."""
    if options.lower != "inductor":
        return None
    if not graph.negated:
        return options.lower_options
    path = graph.negated[0]
    what = f"{path} is a negated view, which compiled code cannot read: the step runs operator by operator."
    warn_user(f"{what} Pass {path}.resolve_neg() instead.", LowerWarning)
    return None


def _iteration_graphs(graph: BoundGraph) -> IterationGraphs | None:
    if graph.captured.guards.items is not None:
        log.info("updates stay in their own iteration: a guard reads the contents of state")
        return None
    if any(node.target in CHECKS for node in graph.gm.graph.nodes):
        log.info("updates stay in their own iteration: the graph checks its assumptions before it writes")
        return None
    return iteration_graphs(graph)


def _lower_iterations(
    iterations: IterationGraphs, options: ResolvedOptions, lower_options: LowerOptions | None, cache: LoweringCache
) -> LoweringReport | None:
    if lower_options is not None:
        if options.memory_budget is not None:
            lower_options = replace(lower_options, remat=False, shed=0)  # the graph has the recomputations already
        iterations.lower(functools.partial(lower_iteration, options=lower_options, cache=cache.regions))
    if options.lower == "debug":
        iterations.run_as(_checked_program)
    return found_lowering(iterations.main)


def _function_of(
    graph: BoundGraph, lowered: LoweredStep, options: ResolvedOptions, cache: LoweringCache
) -> tuple[Program, Sequence[int]]:
    """The function of the graph, and the inputs that it writes without raising their version counters."""
    if options.lower == "debug":
        return _checked_program(graph.gm), lowered.written  # the functional graph, which a user reads
    mode = False if graph.captured.runs_once else options.cuda_graph
    recorded = record_step(graph, lowered, program, cuda_graph=mode, pool=cache.pool)
    return (program(lowered.gm), lowered.written) if recorded is None else (recorded.program, recorded.written)


def _checked_program(gm: fx.GraphModule) -> Program:
    from wholestep.compilers.debug_interpreter import checked_program

    return checked_program(gm)


def capture_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> BoundGraph:
    """Capture one call for `ws.capture` and `CompiledStep.capture`. Nothing runs."""
    mode = mode_that_needs_eager()
    if mode is not None:
        raise needs_eager(mode)
    chosen = with_plan_of_models(fn, args, kwargs, resolve(options))
    pending_updates.flush_all()
    if chosen.parallel is not None:
        find_models(fn, args, kwargs, chosen).run()
    shared = Shared.of(chosen, name=chosen.name or getattr(fn, "__qualname__", type(fn).__qualname__))
    with shared.progress.compiling():
        return compile_step(StepCall.of(fn, args, kwargs), chosen, shared, end="graph")


class Executable:
    """A graph that is ready to run for the calls that its guards allow. It never captures again."""

    def __init__(self, graph: BoundGraph, executor: Executor, lowering: LoweringReport | None) -> None:
        self.step_graph = graph
        self.captured = graph.captured
        self.gather = graph.gather
        self.guards = graph.guards
        self.executor = executor
        self.lowering = lowering
        """Which nodes were compiled, and why the others were not; None without Inductor."""
        self.facts: CaptureFacts | None = None
        """What was true at the capture: for a file. None for an executable of `ws.build`."""

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph module that runs: with compiled regions and in-place updates."""
        return self.executor.executable

    @property
    def pending_state(self) -> tuple[int, ...]:
        """Indices of the inputs whose update may still be pending when the graph starts."""
        return self.executor.graphs.state if isinstance(self.executor, CrossingExecutor) else ()

    def read(self, leaves: list[Any], structure: Any) -> list[Any] | None:
        """The inputs of the graph for a call; None if its guards do not hold."""
        state = self.gather.read(leaves)
        return state if state is not None and self.guards.hold(leaves, structure, state) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph for a call, or raise GuardError with the guard that failed."""
        mode = "the capture of another step" if is_tracing() else mode_that_needs_eager()
        if mode is not None:
            raise needs_eager(mode)
        leaves, structure = leaves_of((args, kwargs))
        pending_updates.flush_all()
        state = self.read(leaves, structure)
        if state is None:
            reason = self.guards.why_not(leaves, structure, self.gather.read(leaves))
            raise GuardError(
                f"a guard of this executable does not hold for the call: {reason}.",
                fix="capture and build another executable for such calls, or use ws.compile, which does that itself.",
            )
        result = self.executor.run(state, leaves)
        if isinstance(self.executor, CrossingExecutor) and self.executor.pending is not None:
            self.executor.complete(self.executor.pending)
        return result

    def explain(self, machine: Machine | None = None, memory: str | None = None) -> str:
        """What runs, as text: passes, what was compiled, memory, and which communication is exposed and why. `memory`:
        what is said of it instead of that of the graph as it stands, in which each update is a new tensor."""
        graph = self.step_graph
        lines = [f"{graph.num_nodes} nodes after {', '.join(applied_passes(graph.gm)) or 'no pass'}"]
        lines += [] if self.lowering is None else [f"lowering: {self.lowering.text(most=5)}"]
        lines += [] if graph.memory is None else [str(graph.memory)]
        timeline = simulate_step(
            graph, machine=machine, peak_bytes=None if graph.memory is None else graph.memory.budget
        )
        lines += [] if timeline.index.collectives else ["no communication"]
        return "\n".join([*lines, str(timeline) if memory is None else timeline.text(memory)])

    def __repr__(self) -> str:
        return f"Executable({self.step_graph!r})"


def needs_eager(mode: str) -> UnsupportedError:
    """The error for a call inside of a mode that a captured graph cannot honour."""
    return UnsupportedError(
        f"{mode} is active around the call. It acts on the operators of the eager step, which a captured graph does "
        "not run.",
        fix="leave the mode before the call; without parallel=, a compiled step runs in eager while it is active.",
    )


def saved_step(
    name: str, fn: Callable[..., Any], options: Options, entries: Sequence[Executable], *, kernels: bool
) -> SavedStep:
    """The graphs of a compiled step as data."""
    if not entries:
        raise ArtefactError(
            f"{name} has no graph yet.", fix="call it first: usually twice, see docs/ship-a-prepared-step.md."
        )
    changes = [entry.guards.changed_code() for entry in entries]
    entries = [entry for entry, changed in zip(entries, changes, strict=True) if changed is None]
    if not entries:
        raise ArtefactError(
            f"the code of {name} is not that of its graphs any more: {changes[-1]}.",
            fix="call the step, which captures it again, and then save it.",
        )
    graphs = [SavedGraph.of(entry.captured, fn, entry.facts) for entry in entries if entry.facts is not None]
    found = resolve(options)
    settings = {each.name: getattr(found.lower_options, each.name) for each in fields(LowerOptions)}
    plan = "" if found.parallel is None else found.parallel.describe()
    written = {
        "plan": plan,
        "lower": found.lower,
        "cuda_graph": found.cuda_graph,
        "lower_options": ArgumentWriter().write(settings),
    }
    return SavedStep(name, written, graphs, saved_kernels() if kernels else b"")


def bound_graph(
    saved: SavedGraph,
    call: StepCall,
    fn: Callable[..., Any] | Given,
    allow_ops: Sequence[str] = (),
    plan: Plan | None = None,
) -> BoundGraph:
    """A saved graph, bound to the objects of a call; ArtefactError says what differs."""
    rank = _this_rank(call, plan)
    captured = saved.bind(fn, call.leaves, call.structure, rank=rank, allow_ops=allow_ops)
    graph = BoundGraph.of(captured, call)
    graph.memory = captured.step_graph.memory
    verify(graph, 1)
    return graph


def _this_rank(call: StepCall, plan: Plan | None) -> ThisRank:
    """The meshes of the plan and of tensors that are sharded already, and the groups of this process."""
    world = default_group()
    everywhere = ("", 0) if world is None else (str(world.group_name), int(world.size()))
    if plan is None:
        return ThisRank(world=everywhere)
    modules = [leaf for leaf in call.leaves if isinstance(leaf, nn.Module)]
    placed = [spec_of(p).mesh for module in modules for p in module.parameters() if is_dtensor(p)]
    meshes = [plan.mesh, *([] if plan.tensor_parallel is None else [plan.tensor_parallel[0]]), *placed]
    groups = {axis.name: (axis.group, axis.size) for axis in plan.all_axes}
    return ThisRank(meshes, groups, everywhere)


def within_budget(graph: BoundGraph, options: ResolvedOptions) -> ResolvedOptions:
    """The options to lower a saved graph with: what a memory budget chose is in the graph, or in its report."""
    if graph.memory is None:
        return options
    shed = graph.memory.shed
    lower_options = replace(options.lower_options, remat=shed is not None, shed=shed or 0)
    return replace(options, lower_options=lower_options, memory_budget=None)
