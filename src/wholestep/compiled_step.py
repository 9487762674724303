"""`CompiledStep`: keeps a list of executables, runs the one whose guards hold for a call, and compiles if none does.

The hot path is `_run`, `_find`, `_run_entry`. Around it: ranks agree before a first run, pending updates of the last
call are completed or become a part of this one, and recompilations are recorded with their reasons.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, ParamSpec, Self, TypeVar

from torch import fx

from wholestep.artefact.file_format import write_file, write_saved
from wholestep.artefact.saved_graph import CaptureFacts
from wholestep.capture.graph.dynamic_shapes import SeenSizes
from wholestep.capture.objects.discover import find_models
from wholestep.capture.scalars.scalar_policy import ScalarPolicy, first_difference, quiet
from wholestep.capture.trace import is_tracing
from wholestep.cross_iteration import pending_updates
from wholestep.cross_iteration.executor import CrossingExecutor, Pending
from wholestep.cross_iteration.pending_updates import PendingWork, finally_flush
from wholestep.errors import (
    DynamicShapeError,
    EagerWarning,
    LowerWarning,
    OptionError,
    RecompileWarning,
    UnsupportedError,
    called,
)
from wholestep.ir.meta import user_location, warn_user
from wholestep.ir.signature import InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.lower.report import Lowering as LoweringReport
from wholestep.options import Options
from wholestep.parallel.in_eager import communicating_in_eager, why_not_in_eager
from wholestep.ranks.channel import DEADLINE
from wholestep.ranks.step_ranks import RankOptions, Ranks
from wholestep.refused_steps import REFUSALS, CannotCaptureError, Refusal, Refusals, is_refusal
from wholestep.shown_step import ShownStep
from wholestep.simulate.measured_step import MeasuredStep
from wholestep.step import (
    BoundGraph,
    Executable,
    Shared,
    StepCall,
    capture_call,
    compile_step,
    needs_eager,
    resolve,
    saved_step,
    with_plan_of_models,
)
from wholestep.stored_graphs import StoredGraphs
from wholestep.torch_private.aot import call_untraced, is_dynamo_tracing
from wholestep.torch_private.distributed import default_group
from wholestep.torch_private.modes import AutocastBlock, autocast_caches_casts, mode_that_needs_eager
from wholestep.warmup import warm_up

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_MAX_GRAPHS = 128
LAST = "last_train_step"
"""A keyword of every compiled step: no update is pending after this call."""

log = logging.getLogger("wholestep")


@dataclass(frozen=True)
class Recompile:
    """Why a step was captured again."""

    call: int
    """Which call of the step it was, from 1."""
    reason: str

    def __str__(self) -> str:
        return f"call {self.call}: {self.reason}"


class CompiledStep(ShownStep, Generic[P, R]):
    """A training step that runs as one graph. Call it like the function that was passed to `ws.compile`."""

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        if not callable(fn):
            raise OptionError(
                f"ws.compile got {called(fn)}, which cannot be called.",
                fix="pass the function that does one step: ws.compile(train_step, ...).",
            )
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.options = resolve(options)
        """The first call may add a plan, if torch has made the models parallel (`with_plan_of_models`)."""
        self.recompiles: list[Recompile] = []
        """Why each capture after the first happened."""
        self.capture_seconds = 0.0
        """Time spent capturing, over all graphs."""
        self._entries: list[Executable] = []
        self._last: Executable | None = None
        self._pending: Pending | None = None
        """The pending updates of the last call; valid while `_pending_work.exists`."""
        self._calls = 0
        self._shared = self._new_shared()
        self._warned = False
        self._modes_warned: set[str] = set()
        self._refusals = Refusals()
        self._sizes = SeenSizes()
        self._autocast = AutocastBlock()
        self._weights_written = False
        """Whether a call in the current autocast block wrote parameters."""
        self._ranks = self._ranks_of_plan()
        self._pending_work = PendingWork()
        weakref.finalize(self, finally_flush, self._pending_work).atexit = False
        self._has_own_last = has_parameter(fn, LAST)

    def _new_shared(self) -> Shared:
        """The state before the first capture under these options. It does not hold the step."""
        here = weakref.ref(self)
        one_plan = None if self.options.parallel is None else functools.partial(_one_plan, here)
        return Shared.of(self.options, self._name, functools.partial(_speaks, here), one_plan)

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
        """The graph module that ran last: with compiled regions and in-place updates."""
        return self._last.graph_module if self._last is not None else None

    @property
    def lowering(self) -> LoweringReport | None:
        """Which nodes of the graph that ran last were compiled, and why the others were not; None without Inductor."""
        return None if self._last is None else self._last.lowering

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_tracing():
            return call_untraced(self._run, self._fn, args, kwargs)  # type: ignore[no-any-return]
        result: R = self._run(self._fn, args, kwargs)
        return result

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> StepGraph:
        """The StepGraph of one call under the options of this step; nothing runs, and no state changes."""
        return capture_call(self._fn, args, kwargs, self.options)

    def warmup(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Capture and compile what this call and those after it need. Nothing runs, and no state changes; with a plan,
        models are placed on ranks as by a first call, and all ranks must do it."""
        warm_up(self, self._fn, args, kwargs)

    def save(self, path: str | os.PathLike[str], *, kernels: bool = False) -> None:
        """Write all graphs of this step to a file that `ws.load` runs without tracing. `kernels`: with those that
        Inductor compiled in this process. ArtefactError names what cannot be saved."""
        write_file(path, write_saved(saved_step(self._name, self._fn, self.options, self._entries, kernels=kernels)))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return BoundStep(self, instance)

    def _run(self, fn: Function, args: Args, kwargs: Kwargs) -> Any:
        if is_tracing():
            return fn(*args, **kwargs)  # a compiled step inside of another one becomes a part of its graph
        last = False if self._has_own_last else bool(kwargs.pop(LAST, False))
        mode = mode_that_needs_eager()
        if mode is not None:
            return self._run_in_eager(mode, fn, args, kwargs)
        under_autocast = autocast_caches_casts()
        if under_autocast:
            self._refuse_stale_casts()
        self._calls += 1
        leaves, structure = leaves_of((args, kwargs))
        refusal: Refusal | None = None
        pending_updates.suspend()
        try:
            result = self._run_one(StepCall(fn, args, kwargs, leaves, structure))
        except CannotCaptureError as error:
            refusal = error.refusal
        finally:
            pending_updates.resume()
        if refusal is not None:
            result = self._run_refused(fn, args, kwargs, refusal)
        if under_autocast and refusal is None:
            self._autocast.enter()  # a capture has cleared the cache
            self._weights_written = self._weights_written or self._last_wrote_parameters()
        if last:
            self.flush()
        return result

    def _refuse_stale_casts(self) -> None:
        """Eager casts a weight once per autocast block: a second call would train on the casts of the first."""
        if not self._autocast.enter():
            self._weights_written = False
        elif self._weights_written:
            raise UnsupportedError(
                "the call is in the same torch.autocast block as an earlier call, which changed the weights. Eager "
                "would use the weights as they were cast before that change.",
                fix="put torch.autocast into the step, or around each call; or pass cache_enabled=False to it.",
                location=user_location(),
            )

    def _last_wrote_parameters(self) -> bool:
        if self._last is None:
            return False
        signature = self._last.step_graph.signature
        parameters = {each.name for each in signature.inputs if each.kind is InputKind.PARAMETER}
        return any(each.target in parameters for each in signature.write_backs)

    def _run_in_eager(self, mode: str, fn: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call the plain function, because a mode around the call acts on operators and a replay would ignore it."""
        if self._ranks is not None:
            with self._ranks.compiling(self._calls):  # posts the error to the other ranks
                raise needs_eager(mode)
        if mode not in self._modes_warned:
            self._modes_warned.add(mode)
            warn_user(
                f"{self._name} runs in eager while {mode} is active around the call: it acts on the operators of the "
                "eager step, which a captured graph does not run.",
                EagerWarning,
            )
        self.flush()
        pending_updates.flush_all()
        return fn(*args, **kwargs)

    def _prepare(self, fn: Function, args: Args, kwargs: Kwargs) -> None:
        """Capture a graph for the next call if there is none, so that a refusal is raised before anything runs."""
        if mode_that_needs_eager() is not None:
            return
        leaves, structure = leaves_of((args, kwargs))
        pending_updates.suspend()
        self._calls += 1
        try:
            if self._find(leaves, structure) is None:
                self._compile(StepCall(fn, args, kwargs, leaves, structure))
        finally:
            self._calls -= 1
            pending_updates.resume()

    def _run_one(self, call: StepCall) -> Any:
        """Run a call by a graph. Raises CannotCaptureError before anything ran, if on_refusal is "eager"."""
        leaves = call.leaves
        pending_updates.flush_others(
            self._pending_work, lambda: None if self._last is None else self._last.gather.read(leaves)
        )
        found = self._find_pending(leaves, call.structure) or self._find(leaves, call.structure)
        if found is None:
            self._take_plan(call)
        if self._ranks is None:
            return self._run_entry(*(found or self._compile(call)), leaves)
        entry, state = self._agree_on_executable(self._ranks, call, found)
        with self._ranks.running(self._calls, entry.step_graph, state):
            return self._run_entry(entry, state, leaves)

    def _agree_on_executable(
        self, ranks: Ranks, call: StepCall, found: tuple[Executable, list[Any]] | None
    ) -> tuple[Executable, list[Any]]:
        """An executable for a call, and its inputs, once all ranks have one that fits."""
        if found is not None:
            always = self.options.on_refusal == "eager"
            refused = ranks.agree_on_choice(self._calls, found[0].step_graph, always=always)
        else:
            made = self._compile_on_ranks(ranks, call)
            if isinstance(made, Refusal):
                self._refuse(made)
            found = made
            refused = ranks.agree(self._calls, found[0].captured, found[1], found[0].pending_state)
        if refused:
            raise CannotCaptureError(Refusal.of_ranks(refused))
        return found

    def _compile_on_ranks(self, ranks: Ranks, call: StepCall) -> tuple[Executable, list[Any]] | Refusal:
        """Place the models of a call and compile it. A refusal is not an error: the other ranks need not stop."""
        with ranks.compiling(self._calls):
            placing = find_models(call.fn, call.args, call.kwargs, self.options)
        ranks.agree_on_models(self._calls, placing.lines())
        with ranks.compiling(self._calls):
            placing.run()
            try:
                return self._compile(call)
            except CannotCaptureError as error:
                return error.refusal

    def _take_plan(self, call: StepCall) -> None:
        """Use the options with the plan of the models, if torch has made them parallel."""
        if self._refusals.final is not None:
            self._refuse(self._refusals.final)
        try:
            options = with_plan_of_models(call.fn, call.args, call.kwargs, self.options)
        except REFUSALS as error:
            refusal = self._refusal_of(error)
        else:
            if options is not self.options:
                self.flush()
                self.options = options
                self._shared = self._new_shared()
                self._ranks = self._ranks_of_plan()
            return
        self._ranks = self._ranks or Ranks(self._name, RankOptions(DEADLINE))
        self._refuse(refusal)

    def _refusal_of(self, error: Exception) -> Refusal:
        """The refusal that an error is; raises the error where the plain function may not run instead."""
        if self.options.on_refusal == "raise":
            raise error
        why = why_not_in_eager(self.options.parallel)
        if why:
            error.add_note(f'on_refusal="eager" does not apply: {why}.')
            raise error
        return Refusal.of(error)

    def _refuse(self, refusal: Refusal) -> NoReturn:
        """Raise CannotCaptureError, once all ranks are about to run the plain function."""
        if self._ranks is not None:
            self._ranks.agree_on_refusal(self._calls, refusal.text)
        raise CannotCaptureError(refusal)

    def _run_refused(self, fn: Function, args: Args, kwargs: Kwargs, refusal: Refusal) -> Any:
        """Run the plain function for a call that cannot be captured; on several ranks, all of them do."""
        self.flush()
        pending_updates.flush_all()
        if not refusal.may_be_the_users:
            self._refusals.warn(self._name, self._calls, refusal)
        plan = self.options.parallel
        if self._ranks is None:
            result = fn(*args, **kwargs)
        else:
            own = plan is not None and not plan.wrapped
            models = find_models(fn, args, kwargs, self.options).models if own else []
            with self._ranks.running_in_eager(self._calls), communicating_in_eager(plan, models):
                result = fn(*args, **kwargs)
        self._refusals.warn(self._name, self._calls, refusal)
        self._refusals.note(refusal)
        return result

    def _run_entry(self, entry: Executable, state: list[Any], leaves: list[Any]) -> Any:
        """Run a graph. Its pending updates are completed by the next call, or by `flush`."""
        executor, work = entry.executor, self._pending_work
        if not isinstance(executor, CrossingExecutor):
            result = executor.run(state, leaves)
            work.clear()
            self._pending = None
            return result
        result = executor.run(state, leaves, self._pending if work.exists else None)
        work.clear()
        updates = self._pending = executor.pending
        if updates is not None:
            updates.flush = work.flush
            complete = functools.partial(_complete, executor, updates, self._ranks, self._calls)
            work.set(complete, updates.state, executor.modules, executor.owners, executor.without_hooks)
        return result

    def _find_pending(self, leaves: list[Any], structure: Any) -> tuple[Executable, list[Any]] | None:
        """The entry with pending updates, if its guards hold for this call; otherwise the updates are completed."""
        entry, updates = self._last, self._pending
        if not self._pending_work.exists or entry is None or updates is None:
            return None
        updates.check_unchanged(entry.executor.path)
        state = entry.gather.read(leaves)
        if state is not None and updates.fits(state) and entry.guards.hold(leaves, structure, state):
            return entry, state
        self._pending_work.flush()
        return None

    @property
    def has_pending(self) -> bool:
        """Whether updates of the last call are pending."""
        return self._pending_work.exists

    def flush(self) -> None:
        """Complete the pending updates of the last call, if there are any: parameters are then what eager has.

        Needs no other rank. It is done automatically before code that reads or writes whole models (`state_dict()`,
        eager forwards), before other graphs run, and at the end of `with step:`.
        """
        self._pending_work.release()
        self._pending = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.flush()
        else:
            finally_flush(self._pending_work)

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
        """Compile an executable for a call for which no guards hold. Also returns its inputs."""
        reason = None
        pending_updates.flush_all()
        if self._last is not None:
            similar = (e for e in reversed(self._entries) if e.guards.same_structure(call.leaves, call.structure))
            nearest = next(similar, self._last)  # scalars are compared with those of a call with the same structure
            state = nearest.gather.read(call.leaves)
            reason = nearest.guards.why_not(call.leaves, call.structure, state)
            changed = nearest.guards.changed_scalars(call.leaves, call.structure, state)
            self._shared.scalars = self._shared.scalars.with_changed(changed)
        with self._shared.progress.compiling(self._calls):
            entry = self._new_executable(call)
        self._sizes.note(call.leaves, call.structure)
        seconds = entry.captured.seconds
        self._entries.append(entry)
        self._write_artefacts(entry)
        if len(self._entries) > _MAX_GRAPHS:
            del self._entries[0]  # the oldest; RecompileWarning was given long before
        self.capture_seconds += seconds
        log.info("%s: %d nodes captured in %.2f s", self._name, entry.step_graph.num_nodes, seconds)
        if reason is not None:
            self.recompiles.append(Recompile(self._calls, reason))
            log.info("%s: captured again (%d graphs): %s", self._name, len(self._entries), reason)
            self._warn_if_many()
        state = entry.gather.read(call.leaves)
        assert state is not None, "the inputs of a new capture exist"
        self._last = entry
        return entry, state

    def _new_executable(self, call: StepCall) -> Executable:
        stored = StoredGraphs.of(call, self.options)
        if (found := stored.find(call, self.options, self._shared)) is not None:
            return found
        graph = self._capture(call)
        facts = CaptureFacts.of(graph.captured, call.fn, call.leaves, call.structure)
        entry = self._with_symbolic_sizes(call, graph) or compile_step(graph, self.options, self._shared)
        entry.facts = facts
        stored.add(self._name, call.fn, entry)
        return entry

    def _with_symbolic_sizes(self, call: StepCall, graph: BoundGraph) -> Executable | None:
        """An executable for all sizes of the dimensions that were found to vary; None if there are none, or if it would
        compute something else than `graph`, which is for the sizes of this call."""
        if self.options.dynamic is not None or self.options.memory_budget is not None or graph.captured.runs_once:
            return None
        why: object = ""
        while sizes := self._sizes.varying(call.leaves, call.structure):
            options = replace(self.options, dynamic=sizes)
            try:
                with quiet():
                    symbolic = compile_step(call, options, self._shared, end="graph")
                why = first_difference(symbolic.captured, graph.captured)
                if why is None:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error", LowerWarning)
                        return compile_step(symbolic, options, self._shared)
            except DynamicShapeError as error:
                why = error
                if error.fixed:
                    self._sizes.fix(call.structure, error.fixed)
                    continue
            except Exception as error:  # whatever it is, the graph for this size is right
                why = error
            self._sizes.give_up(call.structure)
        if why:
            log.info("%s: one graph for each size: %s", self._name, str(why).partition("\n")[0])
        return None

    def _capture(self, call: StepCall) -> BoundGraph:
        try:
            return compile_step(call, self.options, self._shared, end="graph")
        except Exception as error:
            if not is_refusal(error):
                raise
            refusal = self._refusal_of(error)
        raise CannotCaptureError(refusal)

    def _warn_if_many(self) -> None:
        if len(self.recompiles) > self.options.max_recompiles and not self._warned:
            self._warned = True
            reasons = "\n  ".join(str(r) for r in self.recompiles[-8:])
            warn_user(
                f"{self._name} was captured {len(self._entries)} times. The last reasons:\n  {reasons}\n"
                "Declare sizes that vary with dynamic=..., or compute other values that vary outside of the step.",
                RecompileWarning,
            )

    def reset(self) -> None:
        """Delete all graphs (and their references to models and optimizers); the next call captures again."""
        self.flush()
        self._entries.clear()
        self._last = None
        self.recompiles.clear()
        self._shared.scalars = ScalarPolicy()
        self._refusals = Refusals()
        self._sizes = SeenSizes()

    def __reduce__(self) -> Any:
        # A copy, also in another process, captures again: graphs are bound to the objects they were captured with.
        return type(self), (self._fn, self.options.given)


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

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Capture and compile what calls of this method need, as `CompiledStep.warmup`."""
        warm_up(self._step, self._step._fn, (self._instance, *args), kwargs)

    def profile(self, *args: Any, steps: int = 5, **kwargs: Any) -> MeasuredStep:
        """Measure real calls of this method, as `CompiledStep.profile`."""
        return self._step.profile(self._instance, *args, steps=steps, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._step.__exit__(kind, error, traceback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def _speaks(step: weakref.ref[CompiledStep[Any, Any]]) -> bool:
    """Whether this process reports the progress of compilations."""
    found = step()
    if found is None or found._ranks is None:
        group = default_group()
        return group is None or group.rank() == 0
    return found._ranks.speaks(found._calls)


def _one_plan(step: weakref.ref[CompiledStep[Any, Any]], key: str, make: Callable[[], str], of_first: bool) -> str:
    """The plan that all ranks use for graphs with this key."""
    found = step()
    return make() if found is None or found._ranks is None else found._ranks.one_plan(found._calls, key, make, of_first)


def _complete(executor: CrossingExecutor, updates: Pending, ranks: Ranks | None, call: int) -> None:
    updates.check_unchanged(executor.path)
    if ranks is None:
        executor.complete(updates)
        return
    with ranks.completing(call):
        executor.complete(updates)


def has_parameter(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (ValueError, TypeError):
        return False
