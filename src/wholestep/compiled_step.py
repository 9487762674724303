"""A compiled step: it runs the executable whose guards hold for a call, and compiles another where none does.

The hot path is `_run`, `_find`, `_run_entry`. Around it: ranks agree before a first run, updates that the last call
left pending are completed or taken up, and recompilations are noted with their reasons.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Self, TypeVar

from torch import fx

from wholestep.capture.scalars.scalar_policy import NumberPolicy
from wholestep.capture.trace import find_models, is_tracing
from wholestep.cross_iteration import pending
from wholestep.cross_iteration.executor import CrossingExecutor
from wholestep.cross_iteration.iterations import Pending
from wholestep.cross_iteration.pending import PendingWork, finally_flush
from wholestep.errors import EagerWarning, OptionError, RecompileWarning
from wholestep.ir.meta import warn_user
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.lower.report import Lowering as LoweringReport
from wholestep.options import Options
from wholestep.ranks.step_ranks import RankOptions, Ranks
from wholestep.step import (
    Executable,
    ResolvedOptions,
    Shared,
    StepCall,
    capture_call,
    compile_step,
    needs_eager,
    resolve,
    with_plan_of_models,
)
from wholestep.torch_private.aot import call_untraced, is_dynamo_tracing
from wholestep.torch_private.modes import mode_that_needs_eager

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_MOST_GRAPHS = 128
LAST = "last_train_step"
"""A keyword of every compiled step: nothing is left pending after this call."""

log = logging.getLogger("wholestep")


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
        self.options = resolve(options)
        """With a plan from the call on whose models torch has made parallel."""
        self.recompiles: list[Recompile] = []
        """Why each capture after the first happened."""
        self.capture_seconds = 0.0
        """Time spent capturing, over all graphs."""
        self._entries: list[Executable] = []
        self._last: Executable | None = None
        self._last_left: Pending | None = None
        """What the last call left for the next one; void unless `_work` says that it exists."""
        self._calls = 0
        self._shared = Shared.of(self.options)
        self._warned = False
        self._modes_warned: set[str] = set()
        self._ranks = self._ranks_of_plan()
        self._work = PendingWork()
        weakref.finalize(self, finally_flush, self._work).atexit = False
        self._has_own_last = has_parameter(fn, LAST)

    def _ranks_of_plan(self) -> Ranks | None:
        plan = self.options.parallel
        if plan is None:
            return None
        groups = [axis.group for axis in plan.axes]
        return Ranks(self._name, RankOptions(plan.deadline, plan.axis_ranks, groups, plan.per_rank))

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
        last = False if self._has_own_last else bool(kwargs.pop(LAST, False))
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
            warn_user(
                f"{self._name} runs in eager while {mode} is on around the call: it acts on the operators that eager "
                "runs, which a captured graph does not repeat.",
                EagerWarning,
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
                self._compile(StepCall(fn, args, kwargs, leaves, structure))
        finally:
            self._calls -= 1
            pending.resume()

    def _run_one(self, fn: Function, args: Args, kwargs: Kwargs, leaves: list[Any], structure: Any) -> Any:
        pending.flush_others(self._work, lambda: None if self._last is None else self._last.gather.read(leaves))
        found = self._going_on(leaves, structure) or self._find(leaves, structure)
        if found is None:
            self._take_plan(with_plan_of_models(fn, args, kwargs, self.options))
        if self._ranks is None:
            entry, state = found or self._compile(StepCall(fn, args, kwargs, leaves, structure))
            return self._run_entry(entry, state, leaves)
        if found is None:
            with self._ranks.compiling(self._calls):
                placing = find_models(fn, args, kwargs, self.options)
            self._ranks.agree_on_models(self._calls, placing.lines())
            with self._ranks.compiling(self._calls):
                placing.run()
                found = self._compile(StepCall(fn, args, kwargs, leaves, structure))
            self._ranks.agree(self._calls, found[0].captured, found[1], found[0].pending_state)
        else:
            self._ranks.agree_on_choice(self._calls, found[0].step_graph)
        entry, state = found
        with self._ranks.running(self._calls, entry.step_graph, state):
            return self._run_entry(entry, state, leaves)

    def _take_plan(self, options: ResolvedOptions) -> None:
        """From now on the step communicates as its models do."""
        if options is not self.options:
            self.flush()
            self.options, self._shared = options, Shared.of(options)
            self._ranks = self._ranks_of_plan()

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

    def _compile(self, call: StepCall) -> tuple[Executable, list[Any]]:
        """An executable for a call that none fits, and its inputs."""
        reason = None
        pending.flush_all()
        if self._last is not None:
            like = (e for e in reversed(self._entries) if e.guards.same_structure(call.leaves, call.structure))
            nearest = next(like, self._last)  # numbers are compared with those of a call with the same structure
            state = nearest.gather.read(call.leaves)
            reason = nearest.guards.why_not(call.leaves, call.structure, state)
            changed = nearest.guards.changed_numbers(call.leaves, call.structure, state)
            self._shared.scalars = self._shared.scalars.with_changed(changed)
        entry = compile_step(call, self.options, self._shared)
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
        state = entry.gather.read(call.leaves)
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
            warn_user(
                f"{self._name} was captured {len(self._entries)} times; the last reasons:\n  {reasons}\n"
                "Declare varying sizes with dynamic=..., or keep what varies out of the step.",
                RecompileWarning,
            )

    def reset(self) -> None:
        """Forget all graphs (and the models and optimizers they hold on to); the next call captures anew."""
        self.flush()
        self._entries.clear()
        self._last = None
        self.recompiles.clear()
        self._shared.scalars = NumberPolicy()

    def __reduce__(self) -> Any:
        # A copy, also in another process, captures for itself: graphs belong to the objects they were captured with.
        return type(self), (self._fn, self.options.given)

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
