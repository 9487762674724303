"""The way of a step: capture, passes, budget, lowering and binding follow each other here, and nowhere else.

capture_step    a call of the user's function            -> StepGraph, bound to the user's objects
build_step      a StepGraph                              -> Executable: budget, lowering, CUDA graph
CompiledStep    captures and builds where no executable's guards hold for a call, and runs the one that fits
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from torch import Tensor, fx

from wholestep.capture.objects.called import CalledObjects
from wholestep.capture.scalars.scalar_policy import NumberPolicy, trace_with_numbers
from wholestep.capture.trace import find_models, is_tracing, trace_step
from wholestep.cross_iteration import pending
from wholestep.cross_iteration.executor import CrossingExecutor
from wholestep.cross_iteration.iterations import Iterations, Pending, iterations_of
from wholestep.cross_iteration.pending import PendingWork, finally_flush
from wholestep.errors import (
    EagerWarning,
    GuardError,
    LowerWarning,
    OptionError,
    RecompileWarning,
    UnsupportedError,
)
from wholestep.guards.all_guards import Guards
from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.iter.moves import CREATES, LATE
from wholestep.ir.reinplace import reinplaced
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.ir.verify import verify
from wholestep.lower.region_memory import measure_step
from wholestep.lower.report import Lowering as LoweringReport
from wholestep.lower.report import found_lowering
from wholestep.lower.step import LoweredStep, LoweringCache, lower_iteration, lower_step, record_step
from wholestep.options import (
    Options,
)
from wholestep.passes.engine.dump import PassDump
from wholestep.passes.engine.manager import run_passes
from wholestep.passes.redundant_collectives import remove_dead_collectives, remove_duplicate_collectives
from wholestep.ranks.step_ranks import RankOptions, Ranks
from wholestep.remat.fit import fit_to_budget
from wholestep.remat.options import policy_of
from wholestep.runtime.executor import Executor
from wholestep.runtime.gather import Gather
from wholestep.runtime.program import program
from wholestep.torch_private.aot import call_untraced, is_dynamo_tracing
from wholestep.torch_private.modes import mode_that_needs_eager

if TYPE_CHECKING:
    pass

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

ALWAYS = (remove_duplicate_collectives, remove_dead_collectives)
"""Passes that run on every captured graph, before those of the user."""

_MOST_GRAPHS = 128
_NONE_LIFTED = NumberPolicy()
_LAST = "last_train_step"

log = logging.getLogger("wholestep")


@dataclass(frozen=True, eq=False)
class Binding:
    """A captured graph and the user's objects: reads its inputs, and says for which calls it may run."""

    captured: CapturedStep
    gather: Gather
    guards: Guards
    negated: tuple[str, ...] = ()
    """Inputs that are negated views (`z.conj().imag`): compiled code would read their memory with the wrong sign."""

    @classmethod
    def of(cls, captured: CapturedStep, leaves: list[Any]) -> Binding:
        """`leaves`: the arguments of the captured call; not kept."""
        gather = Gather(captured.inputs, leaves, captured.guards.optimizers)
        values = zip(captured.inputs, gather.read(leaves) or (), strict=False)
        negated = tuple(slot.path for slot, value in values if isinstance(value, Tensor) and value.is_neg())
        return cls(captured, gather, Guards(captured.guards, gather, leaves), negated)

    def rebound(self, step_graph: StepGraph) -> Binding:
        """The same for another version of the graph."""
        return replace(self, captured=replace(self.captured, step_graph=step_graph))


def trace(
    fn: Function,
    args: Args,
    kwargs: Kwargs,
    options: Options,
    scalars: NumberPolicy = _NONE_LIFTED,
    called: CalledObjects | None = None,
) -> tuple[CapturedStep, NumberPolicy]:
    """Capture one call: nothing is computed and no state changes. Also which scalars are inputs of the graph."""
    one = functools.partial(trace_step, fn, args, kwargs, options, called=called)
    captured, scalars = trace_with_numbers(one, scalars)
    step_graph = captured.step_graph
    run_passes(step_graph, ALWAYS if step_graph.signature.groups else (), level=0)
    verify(step_graph, min(options.verify, 2))
    step_graph.gm.meta[LATE] = captured.late_outputs()
    step_graph.gm.meta[CREATES] = step_graph.signature.creates_optimizer_state
    step_graph.binding = Binding.of(captured, leaves_of((args, kwargs))[0])
    return captured, scalars


def capture_step(
    fn: Function,
    args: Args,
    kwargs: Kwargs,
    options: Options,
    scalars: NumberPolicy = _NONE_LIFTED,
    called: CalledObjects | None = None,
) -> tuple[StepGraph, NumberPolicy]:
    """From a call to a StepGraph after all passes, bound to the user's objects."""
    captured, scalars = trace(fn, args, kwargs, options, scalars, called)
    dump = None if options.dump_passes is None else PassDump(options.dump_passes)
    run_passes(captured.step_graph, options.passes, level=options.verify, dump=dump)
    return captured.step_graph, scalars


def capture_call(fn: Function, args: Args, kwargs: Kwargs, options: Options) -> StepGraph:
    """A call as a StepGraph, for a caller that holds it: `ws.capture` and `CompiledStep.capture`."""
    mode = mode_that_needs_eager()
    if mode is not None:
        raise needs_eager(mode)
    pending.flush_all()
    if options.parallel is not None:
        find_models(fn, args, kwargs, options).run()
    return capture_step(fn, args, kwargs, options)[0]


def build_step(step_graph: StepGraph, options: Options, cache: LoweringCache) -> Executable:
    """From a StepGraph to what runs: budget, lowering, in-place updates, CUDA graph."""
    binding = step_graph.binding
    assert isinstance(binding, Binding)
    captured, once = binding.captured, binding.captured.runs_once
    lower_options = options.lower_options if options.lower == "inductor" else None
    lowered: LoweredStep | None = None
    if options.memory_budget is not None:
        measure = measure_step(step_graph, lower_options, cache.regions, runs_once=once)
        fitted = fit_to_budget(step_graph, options.memory_budget, policy_of(options.policy), measure=measure)
        step_graph.memory, lowered = fitted.report, fitted.executable
        verify(step_graph, min(options.verify, 2))
    if lower_options is not None and _warn_of_negated(binding):
        lower_options = lowered = None
    make_program = _program_maker(options)
    crossing = _crossing_iterations(captured)
    executor: Executor
    if crossing is not None:
        if lower_options is not None and not once:
            if options.memory_budget is not None:
                lower_options = replace(lower_options, remat=False, shed=0)  # what is recomputed is in the graph
            crossing.lower(functools.partial(lower_iteration, options=lower_options, cache=cache.regions))
        if make_program is not program:
            crossing.run_as(make_program)
        executor = CrossingExecutor(captured, crossing)
    elif make_program is not program:
        # As people read it, before updates are in place.
        executor = Executor(captured, reinplaced(step_graph), make_program(step_graph.gm))
    else:
        lowered = lowered or lower_step(step_graph, lower_options, cache=cache.regions, runs_once=once)
        mode = False if once else options.cuda_graph
        recorded = record_step(step_graph, lowered, program, cuda_graph=mode, pool=cache.pool)
        if recorded is None:
            executor = Executor(captured, lowered.gm, program(lowered.gm), lowered.written)
        else:
            executor = Executor(captured, lowered.gm, recorded.program, recorded.written)
    binding.guards.add_conditions_on_sizes()
    return Executable(binding, executor)


def _program_maker(options: Options) -> Callable[[fx.GraphModule], Callable[..., Any]]:
    if options.lower != "debug":
        return program
    from wholestep.compilers.debug_interpreter import checked_program

    return checked_program


def _crossing_iterations(captured: CapturedStep) -> Iterations | None:
    if captured.guards.items is not None:
        log.info("updates stay in their own iteration: whether the graph may run depends on the contents of state")
        return None
    return iterations_of(captured.step_graph)


def _warn_of_negated(binding: Binding) -> bool:
    if binding.negated:
        path = binding.negated[0]
        what = f"{path} is a negated view, which compiled code cannot read: the step runs operator by operator."
        warnings.warn(LowerWarning(f"{what} Give it {path}.resolve_neg()."), stacklevel=3)
    return bool(binding.negated)


class Executable:
    """A graph that is ready to run for the calls that its guards allow. It never captures again."""

    def __init__(self, binding: Binding, executor: Executor) -> None:
        self.captured = binding.captured
        self.step_graph = binding.captured.step_graph
        self.gather = binding.gather
        self.guards = binding.guards
        self.executor = executor

    @property
    def graph_module(self) -> fx.GraphModule:
        """What runs: the graph with its compiled regions, updating in place."""
        return self.executor.executable

    @property
    def lowering(self) -> LoweringReport | None:
        """What was compiled, and why the rest was not; None where nothing was."""
        return found_lowering(self.executor.executable)

    @property
    def pending_state(self) -> tuple[int, ...]:
        """Inputs whose update may still be pending when the graph starts."""
        return self.executor.iterations.state if isinstance(self.executor, CrossingExecutor) else ()

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
        pending.flush_all()
        state = self.read(leaves, structure)
        if state is None:
            reason = self.guards.why_not(leaves, structure, self.gather.read(leaves))
            raise GuardError(
                f"this executable was not built for the call: {reason}.",
                fix="capture and build another one for such calls; a step of ws.compile does that by itself.",
            )
        result = self.executor.run(state, leaves)
        if isinstance(self.executor, CrossingExecutor) and self.executor.left is not None:
            self.executor.complete(self.executor.left)
        return result

    def __repr__(self) -> str:
        return f"Executable({self.step_graph!r})"


@dataclass(frozen=True)
class Recompile:
    """Why a step was captured again."""

    call: int
    """The number of the call, from 1."""
    reason: str

    def __str__(self) -> str:
        return f"call {self.call}: {self.reason}"


class CompiledStep(Generic[P, R]):
    """A training step that runs as one graph. Call it like the function it was made from."""

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        if not callable(fn):
            raise OptionError(f"ws.compile got a {type(fn).__name__}.", fix="pass the function that does one step.")
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.options = options
        self.recompiles: list[Recompile] = []
        """Why each capture after the first happened."""
        self.capture_seconds = 0.0
        """Time spent capturing, over all graphs."""
        self._entries: list[Executable] = []
        self._last: Executable | None = None
        self._last_left: Pending | None = None
        """What the last call left for the next one; void unless `_work` says that it exists."""
        self._calls = 0
        self._numbers = NumberPolicy()
        self._called = CalledObjects(options)
        self._warned = False
        self._modes_warned: set[str] = set()
        plan = options.parallel
        self._ranks = None
        if plan is not None:
            groups = [axis.group for axis in plan.axes]
            self._ranks = Ranks(self._name, RankOptions(plan.deadline, plan.axis_ranks, groups, plan.per_rank))
        self._lowering_cache = LoweringCache()
        self._work = PendingWork()
        weakref.finalize(self, finally_flush, self._work).atexit = False
        self._has_own_last = has_parameter(fn, _LAST)
        if options.check_first:
            from wholestep.debug.check.check_calls import FirstCalls

            FirstCalls.stand_in(self, options.check_first)

    @property
    def __wholestep_function__(self) -> Callable[P, R]:
        return self._fn

    @property
    def graphs(self) -> list[StepGraph]:
        """One StepGraph per guard key, in the order of capture."""
        return [entry.step_graph for entry in self._entries]

    @property
    def last(self) -> StepGraph | None:
        """The graph that ran last."""
        return self._last.step_graph if self._last is not None else None

    @property
    def executable(self) -> fx.GraphModule | None:
        """What ran last: the graph with its compiled regions, updating in place."""
        return self._last.graph_module if self._last is not None else None

    @property
    def lowering(self) -> LoweringReport | None:
        """What was compiled of the graph that ran last, and why the rest was not; None where nothing was."""
        return None if self._last is None else self._last.lowering

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_tracing():
            return call_untraced(self._run, self._fn, args, kwargs)  # type: ignore[no-any-return]
        result: R = self._run(self._fn, args, kwargs)
        return result

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> StepGraph:
        """The StepGraph of one call under the options of this step; nothing runs, and no state changes."""
        return capture_call(self._fn, args, kwargs, self.options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return BoundStep(self, instance)

    def _run(self, fn: Function, args: Args, kwargs: Kwargs) -> Any:
        if is_tracing():
            return fn(*args, **kwargs)  # a compiled step inside of another is a part of it
        last = False if self._has_own_last else bool(kwargs.pop(_LAST, False))
        mode = mode_that_needs_eager()
        if mode is not None:
            return self._run_in_eager(mode, fn, args, kwargs)
        self._calls += 1
        leaves, structure = leaves_of((args, kwargs))
        pending.suspend()
        try:
            result = self._run_one(fn, args, kwargs, leaves, structure)
        finally:
            pending.resume()
        if last:
            self.flush()
        return result

    def _run_in_eager(self, mode: str, fn: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call the plain function: a mode around the call acts on operators, and a replay would not honour it."""
        if self._ranks is not None:
            with self._ranks.compiling(self._calls):  # tells the other ranks
                raise needs_eager(mode)
        if mode not in self._modes_warned:
            self._modes_warned.add(mode)
            warnings.warn(
                f"{self._name} runs in eager while {mode} is on around the call: it acts on the operators that eager "
                "runs, which a captured graph does not repeat.",
                EagerWarning,
                stacklevel=4,
            )
        self.flush()
        pending.flush_all()
        return fn(*args, **kwargs)

    def _ready(self, fn: Function, args: Args, kwargs: Kwargs) -> None:
        """Have a graph for the next call, which finds it: a refusal comes before anything runs."""
        if mode_that_needs_eager() is not None:
            return
        leaves, structure = leaves_of((args, kwargs))
        pending.suspend()
        self._calls += 1
        try:
            if self._find(leaves, structure) is None:
                self._capture(fn, args, kwargs, leaves, structure)
        finally:
            self._calls -= 1
            pending.resume()

    def _run_one(self, fn: Function, args: Args, kwargs: Kwargs, leaves: list[Any], structure: Any) -> Any:
        pending.flush_others(self._work, lambda: None if self._last is None else self._last.gather.read(leaves))
        found = self._going_on(leaves, structure) or self._find(leaves, structure)
        if self._ranks is None:
            entry, state = found or self._capture(fn, args, kwargs, leaves, structure)
            return self._run_entry(entry, state, leaves)
        if found is None:
            with self._ranks.compiling(self._calls):
                placing = find_models(fn, args, kwargs, self.options)
            self._ranks.agree_on_models(self._calls, placing.lines())
            with self._ranks.compiling(self._calls):
                placing.run()
                found = self._capture(fn, args, kwargs, leaves, structure)
            self._ranks.agree(self._calls, found[0].captured, found[1], found[0].pending_state)
        else:
            self._ranks.agree_on_choice(self._calls, found[0].step_graph)
        entry, state = found
        with self._ranks.running(self._calls, entry.step_graph, state):
            return self._run_entry(entry, state, leaves)

    def _run_entry(self, entry: Executable, state: list[Any], leaves: list[Any]) -> Any:
        """Run a graph; what it leaves for the next call is completed by that, or by `flush`."""
        executor = entry.executor
        if not isinstance(executor, CrossingExecutor):
            result = executor.run(state, leaves)
            self._work.taken()
            self._last_left = None
            return result
        result = executor.run(state, leaves, self._last_left if self._work.exists else None)
        self._work.taken()
        left = self._last_left = executor.left
        if left is not None:
            left.ask = self._work.flush
            complete = functools.partial(_complete, executor, left, self._ranks, self._calls)
            self._work.left(complete, left.state, executor.modules, executor.owners, executor.without_hooks)
        return result

    def _going_on(self, leaves: list[Any], structure: Any) -> tuple[Executable, list[Any]] | None:
        """The graph that left something, if it may run for this call; otherwise that is completed first."""
        entry, left = self._last, self._last_left
        if not self._work.exists or entry is None or left is None:
            return None
        left.check_unchanged(entry.executor.path)
        state = entry.gather.read(leaves)
        if state is not None and left.goes_on(state) and entry.guards.hold(leaves, structure, state):
            return entry, state
        self._work.flush()
        return None

    @property
    def has_pending(self) -> bool:
        """Whether the last call left updates for the next one (or for `flush`)."""
        return self._work.exists

    def flush(self) -> None:
        """Complete what the last call left for the next one, if anything: parameters are then what eager has.

        Needs no other rank. Happens by itself before anything that reads or writes whole models (`state_dict()`, eager
        forwards), before other graphs, and at the end of `with step:`.
        """
        self._work.release()
        self._last_left = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.flush()
        else:
            finally_flush(self._work)

    def _find(self, leaves: list[Any], structure: Any) -> tuple[Executable, list[Any]] | None:
        """A graph that may run for this call, and its inputs."""
        last = self._last
        if last is not None and (state := last.read(leaves, structure)) is not None:
            return last, state
        for entry in reversed(self._entries):
            if entry is not last and (state := entry.read(leaves, structure)) is not None:
                self._last = entry
                return entry, state
        return None

    def _capture(
        self, fn: Function, args: Args, kwargs: Kwargs, leaves: list[Any], structure: Any
    ) -> tuple[Executable, list[Any]]:
        reason = None
        pending.flush_all()
        if self._last is not None:
            like = (e for e in reversed(self._entries) if e.guards.same_structure(leaves, structure))
            nearest = next(like, self._last)  # numbers are compared with those of a call with the same structure
            state = nearest.gather.read(leaves)
            reason = nearest.guards.why_not(leaves, structure, state)
            self._numbers = self._numbers.with_changed(nearest.guards.changed_numbers(leaves, structure, state))
        step_graph, self._numbers = capture_step(fn, args, kwargs, self.options, self._numbers, self._called)
        entry = build_step(step_graph, self.options, self._lowering_cache)
        seconds = entry.captured.seconds
        self._entries.append(entry)
        if len(self._entries) > _MOST_GRAPHS:
            del self._entries[0]  # the oldest; the warning about recompiles came long before
        self.capture_seconds += seconds
        log.info("%s: %d nodes captured in %.2f s", self._name, entry.step_graph.num_nodes, seconds)
        if reason is not None:
            self.recompiles.append(Recompile(self._calls, reason))
            log.info("%s: captured again (%d graphs): %s", self._name, len(self._entries), reason)
            self._warn_if_many()
        state = entry.gather.read(leaves)
        assert state is not None, "what was just captured can be read"
        self._last = entry
        return entry, state

    @property
    def _name(self) -> str:  # the same in every process: no address of an object
        fn: Any = self._fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        return self.options.name or getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def _warn_if_many(self) -> None:
        if len(self.recompiles) > self.options.max_recompiles and not self._warned:
            self._warned = True
            reasons = "\n  ".join(str(r) for r in self.recompiles[-8:])
            warnings.warn(
                f"{self._name} was captured {len(self._entries)} times; the last reasons:\n  {reasons}\n"
                "Declare varying sizes with dynamic=..., or keep what varies out of the step.",
                RecompileWarning,
                stacklevel=5,
            )

    def reset(self) -> None:
        """Forget all graphs (and the models and optimizers they hold on to); the next call captures anew."""
        self.flush()
        self._entries.clear()
        self._last = None
        self.recompiles.clear()
        self._numbers = NumberPolicy()

    def __reduce__(self) -> Any:
        # A copy, also in another process, captures for itself: graphs belong to the objects they were captured with.
        return CompiledStep, (self._fn, self.options)

    def __repr__(self) -> str:
        return f"CompiledStep({self._name}, {len(self._entries)} graphs)"


class BoundStep:
    """A compiled method bound to its object; shares the graphs of the class's step."""

    def __init__(self, step: CompiledStep[Any, Any], instance: Any) -> None:
        self._step = step
        self._instance = instance

    @property
    def __wholestep_function__(self) -> Any:
        return self._step._fn.__get__(self._instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return call_untraced(self._step._run, self._step._fn, (self._instance, *args), kwargs)
        return self._step._run(self._step._fn, (self._instance, *args), kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> StepGraph:
        """The StepGraph of one call under the options of this step."""
        return capture_call(self._step._fn, (self._instance, *args), kwargs, self._step.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._step.__exit__(kind, error, traceback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def needs_eager(mode: str) -> UnsupportedError:
    return UnsupportedError(
        f"{mode} is on around the call. It acts on the operators that eager runs, which a captured graph does not "
        "repeat.",
        fix="leave it before the call; without parallel=, a compiled step runs in eager while it is on.",
    )


def _complete(executor: CrossingExecutor, left: Pending, ranks: Ranks | None, call: int) -> None:
    left.check_unchanged(executor.path)
    if ranks is None:
        executor.complete(left)
        return
    with ranks.completing(call):
        executor.complete(left)


def has_parameter(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (ValueError, TypeError):
        return False
