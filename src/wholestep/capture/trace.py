"""Trace a step once: run the user's function on fakes, record the graph, read off what changed, put everything back."""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from wholestep.capture.effects.containers import Recorders, can_record
from wholestep.capture.effects.deferred_text import Texts, has_mark, needs_text, swap_formats
from wholestep.capture.effects.replayed_calls import ReplayedCalls
from wholestep.capture.effects.showing_calls import ShowingCalls
from wholestep.capture.graph.decisions import Decisions
from wholestep.capture.graph.dynamic_shapes import Shapes, dynamic_dims
from wholestep.capture.graph.inputs import Inputs
from wholestep.capture.graph.items import Items
from wholestep.capture.graph.recorder import Recorder
from wholestep.capture.graph.refusals import (
    HooksOfStep,
    refusal_of,
    refuse_attribute_of_a_tensor,
    refuse_hooks,
    refuse_shards,
)
from wholestep.capture.graph.tensor_values import may_replace_data
from wholestep.capture.objects.discover import World, discover
from wholestep.capture.objects.objects_found_by_calls import EarlierTraces, FoundByCall, TraceAgain, UnknownOptimizers
from wholestep.capture.objects.rebound_containers import ReboundContainers
from wholestep.capture.objects.swapped_state import StateTable, Tracked
from wholestep.capture.objects.user_code import none_swallowed
from wholestep.capture.patching.conversions import swap_conversions
from wholestep.capture.patching.intercept import FunctionMode
from wholestep.capture.patching.optimizer_steps import (
    SCHEDULER_COUNTS,
    BoundSteps,
    StateAtCalls,
    replace_optimizer_step,
    replace_scaler_steps,
    replace_scheduler_step,
)
from wholestep.capture.patching.patches import Interrupts, patched
from wholestep.capture.python_reads.attribute_reads import Attributes, ReadTracker
from wholestep.capture.python_reads.imported_modules import imports_put_right
from wholestep.capture.python_reads.process_state import ProcessSettings, RandomState
from wholestep.capture.python_reads.value_sources import ValueSources
from wholestep.capture.results.accounting import Account
from wholestep.capture.results.changed_python import classes_of, restore_classes_and_code
from wholestep.capture.results.collect import collect
from wholestep.capture.results.effect_line import Effect, LineWatch, with_line_of_effect
from wholestep.capture.results.leftover_fakes import Leftovers
from wholestep.capture.scalars.python_scalars import plain_keys
from wholestep.capture.scalars.scalar_policy import ScalarPolicy
from wholestep.capture.scalars.symbolic_scalars import ScalarNode
from wholestep.capture.scalars.tables import Tables
from wholestep.capture.scalars.traced_numbers import TracedScalars
from wholestep.errors import ItemError, Location, ParameterDataError, SideEffectError, WholestepError
from wholestep.ir.captured_step import CapturedStep, HostCall
from wholestep.ir.early_values import KnownDraws
from wholestep.ir.graph_walks import collector_paused
from wholestep.ir.iter.moves import IterationFacts, note_iteration_facts
from wholestep.ir.meta import location_of_exception, location_of_function, user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.call_tree import Flat, flatten, leaves_of, name_leaves, same_objects, same_trees
from wholestep.ir.user_objects.plain_contents import assign_contents, copy_of, own_dict, same_contents
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot, MappingSlot
from wholestep.options import Options
from wholestep.parallel.place_models import plan_hooks, sharding_hooks
from wholestep.parallel.session import Session
from wholestep.parallel.torch_wrappers import flags_of
from wholestep.progress import SILENT, Progress
from wholestep.torch_private.distributed import is_dtensor, local_of
from wholestep.torch_private.fake_tensors import FakeTensor, FakeTensorMode, new_fake_mode, storage_key
from wholestep.torch_private.modules_and_optimizers import SCALER_STEP, SCALER_TENSORS, SCALER_UNSCALE

_one_capture_at_a_time = threading.RLock()
_tracing = threading.local()


@contextmanager
def steps_as_functions() -> Iterator[None]:
    """Compiled steps that are called inside of the step run as the functions that they were made from."""
    before = is_tracing()
    _tracing.active = True
    try:
        yield
    finally:
        _tracing.active = before


def is_tracing() -> bool:
    """Whether this thread is capturing a step right now."""
    return getattr(_tracing, "active", False)


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    numbers: ScalarPolicy = ScalarPolicy(),  # noqa: B008  (frozen)
    seen: set[str] | None = None,
    earlier: EarlierTraces | None = None,
    progress: Progress = SILENT,
) -> CapturedStep:
    """Capture one call of a step. Nothing is computed and nothing of the user's is changed.

    `seen`: receives the paths of the numbers that user code got as symbolic scalars, also where the capture fails.
    """
    started = time.perf_counter()
    earlier = EarlierTraces(options) if earlier is None else earlier
    with Interrupts() as interrupts, _one_capture_at_a_time, collector_paused(), imports_put_right():
        leftovers = Leftovers()
        forget: list[Callable[[], None]] = []
        refusal: WholestepError | None = None

        def new() -> Capture:
            capture = Capture(fn, args, kwargs, options, numbers, set() if seen is None else seen, earlier)
            capture.interrupts = interrupts
            progress.stage("capture", _operators_of(capture.graph))
            return capture

        while True:
            capture = new()
            try:
                context = contextvars.copy_context()  # what the step sets in context variables goes with it
                captured = context.run(capture.run)
                break
            except TraceAgain as again:
                leftovers.clean_up(capture)
                forget.append(again.teach(earlier))
                refusal = again.refusal or refusal
            except BaseException as error:
                leftovers.clean_up(capture)
                if isinstance(error, WholestepError) and error.effect is not None:
                    capture = new()
                    error = with_line_of_effect(error, capture).with_traceback(error.__traceback__)
                    leftovers.clean_up(capture)
                for each in forget:
                    each()
                if refusal is not None and isinstance(error, Exception) and not isinstance(error, WholestepError):
                    raise Capture._located(refusal, location_of_exception(error)) from error
                raise error
        leftovers.refuse(capture, captured.step_graph, capture.release(), context)
        earlier.refuse_caches_of_other_defaults(leftovers.cleared)
    signature = captured.step_graph.signature
    facts = IterationFacts(captured.late_outputs(), signature.creates_optimizer_state)
    note_iteration_facts(captured.step_graph.gm, facts)
    return replace(captured, seconds=time.perf_counter() - started)


def _operators_of(graph: fx.Graph) -> Callable[[], str]:
    """How far a trace is; the graph is not held."""
    held = weakref.ref(graph)
    return lambda: "capture" if (found := held()) is None else f"capture, {len(found.nodes):,} operators so far"


class Capture:
    """One trace. Host of the recorder, the scalars and the patches."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        numbers: ScalarPolicy,
        seen: set[str],
        earlier: EarlierTraces,
    ) -> None:
        self.fn = fn
        self.options = options
        self.numbers = numbers
        self.erased: list[fx.Node] = []
        """Nodes of the trace that were removed from the graph because nothing needs them."""
        self.scalars = TracedScalars(self, numbers, seen)
        self.phase = "forward"
        self.module_path = ""
        self.flat: Flat = flatten((args, kwargs))
        self.structure = leaves_of((args, kwargs))[1]
        self.leaf_paths = name_leaves(fn, self.flat, len(args))
        self._traces_hooks = options.hooks == "trace" or (options.hooks == "auto" and options.parallel is None)
        leaves = zip(self.leaf_paths, self.flat.leaves, strict=True)
        self.world: World = discover(fn, leaves, earlier.calls, hooks=self._traces_hooks)
        self._earlier = earlier
        self.met: Any = None
        self.called: set[int] = set()
        self._behind = UnknownOptimizers(self.world)
        self.shapes = Shapes()
        self.dynamic_dims = dynamic_dims(options, self.leaf_paths, self.flat.leaves)
        if self.dynamic_dims:
            self.shapes.declare()
        self.fake_mode: FakeTensorMode = new_fake_mode(self.shapes.env)
        self.graph = fx.Graph()
        self.recorder: Recorder = Recorder(self.graph, self.fake_mode, self)
        self.table: StateTable = StateTable(
            self.world, self.fake_mode, self.scalars.make, self.scalars.lift, numbers.lifts
        )
        self.inputs = Inputs(self.recorder, self.world, self.table)
        self.decisions = Decisions(self, self._guard_value)
        self.items = Items(self, self.scalars)
        self.host_calls: list[HostCall] = []
        self.at_calls = StateAtCalls()
        self.skip_flags: dict[Optimizer, fx.Node] = {}
        self.snapshots: list[Attributes] = []
        self.readers: list[tuple[ReadTracker, str]] = []
        self.texts = Texts(self)
        self.effects = ReplayedCalls(self)
        self.recorded: Recorders = Recorders(self, earlier.written)
        self.rebound: ReboundContainers = ReboundContainers(self, earlier.rebound)
        self.tables: Tables = Tables(self, earlier.tables)
        self.showing: ShowingCalls = ShowingCalls(self)
        self.sources = ValueSources(self)
        self.copies = [(c, path, copy_of(c)) for c, path in self.world.containers]
        self.steps_seen: list[Optimizer] = []
        self.step_lines: dict[Optimizer, Location | None] = {}
        """The line that called the `step()` of each optimizer last."""
        self.running_step: Optimizer | None = None
        self._bound_steps = BoundSteps(self)
        self.account = Account(self)
        self.api = ""
        self.interrupts = Interrupts()
        self.session: Session | None = None
        """What the plan does while the step is traced."""
        self.classes: dict[int, tuple[Any, str, type]] = {}
        """Objects of the user's by identity, with their paths and classes."""
        self.line_watch: LineWatch | None = None
        """Searches for the line of an effect; only after a refusal."""
        self.hooks = HooksOfStep([])
        self.given: Any = None
        """The arguments that the step is traced with."""

    def run(self) -> CapturedStep:
        rng = RandomState(self.world)
        self.settings = ProcessSettings()
        try:
            self._build_inputs()
            if self.options.parallel is None:
                refuse_shards(self.table.tracked.values())
            elif self.options.parallel.wrapped:
                self.world.variables += flags_of(self.world)
            if not self._traces_hooks:
                refuse_hooks(self.world, self.table.parameters, plan_hooks(self.world))
            with self._swapped():
                self._begin_session()
                result = self._trace(rng)
                self.shapes.refuse_fixed()
                captured = collect(self, result)
                self.account.check(captured.step_graph.gm.graph)
                self.world.forget_search()
        except WholestepError as error:
            if error.location is not None:
                raise
            raise self._located(error, self._line_of(error)) from error.__cause__
        finally:
            self.settings.restore()
            rng.restore()
            self.scalars.release()
        return captured

    def _begin_session(self) -> None:
        if self.options.parallel is not None:
            self.session = Session(self.options.parallel, self.world, self.table, self.recorder)
            if self.session.wrappers is not None:
                self.session.wrappers.enter()

    def _build_inputs(self) -> None:
        self.table.build()
        self.fake_leaves: list[Any] = []
        for i, leaf in enumerate(self.flat.leaves):
            if isinstance(leaf, Tensor):
                tracked = self.table.tracked.get(id(leaf)) or self._batch_leaf(leaf, i)
                self.fake_leaves.append(tracked.fake)
            elif self.numbers.lifts(self.leaf_paths[i]) and type(leaf) in (int, float):
                slot = BatchSlot(InputKind.HYPER_PARAMETER, self.leaf_paths[i], None, i)
                self.fake_leaves.append(self.scalars.lift(slot, leaf))
            else:
                self.fake_leaves.append(self.sources.stand_ins.of(leaf, self.leaf_paths[i]))

    def _batch_leaf(self, leaf: Tensor, i: int) -> Tracked:
        path = self.leaf_paths[i]
        slot = BatchSlot(InputKind.BATCH, path, None, i)
        dims = self.dynamic_dims.get(i)
        if not dims:
            return self.table.track_input(leaf, slot)
        return self.table.track_input(leaf, slot, self.shapes.fake_of(self.fake_mode, leaf, i, dims, path))

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        try:
            self.table.remove_hooks(sharding_hooks(self.world))
            self.hooks = HooksOfStep(self.table.parameters)
            self.rebound.swap_in()
            self.table.swap_in()
            for tracked in list(self.table.tracked.values()):
                self.inputs.tensor(tracked)
            if self._traces_hooks:
                self.hooks.trace()
            self._swap_python_objects()
            self.account.begin()
            yield
        finally:
            self.sources.reads.stop()
            self.scalars.restore_items()
            for snapshot in reversed(self.snapshots):
                snapshot.restore()
            self.hooks.restore()
            self.table.restore()
            self.rebound.restore()
            self.account.restore()
            self._behind.restore()
            for _, slot, value in self.world.variables:
                if value is ABSENT:
                    slot.remove()
                elif slot.get() is not value:
                    slot.set(value)
            restore_classes_and_code(self)
            for container, _, contents in self.copies:
                if not same_contents(contents, container):
                    assign_contents(container, contents)

    def _swap_python_objects(self) -> None:
        self.classes = classes_of(self.world)
        for module, path in self.world.modules.items():
            self.snapshots.append(Attributes(module, path))
            self._lift_numbers(module, path)
        internal = frozenset({"param_groups", "state", "step"})
        for optimizer, path in self.world.optimizers.items():
            self.snapshots.append(Attributes(optimizer, path, internal))
            self._lift_numbers(optimizer, path)
            replace_optimizer_step(self, optimizer)
        for scaler, path in self.world.scalers.items():
            self.snapshots.append(Attributes(scaler, path, frozenset({*SCALER_TENSORS, SCALER_STEP, SCALER_UNSCALE})))
            replace_scaler_steps(self, scaler)
        for scheduler, path in self.world.schedulers.items():
            self.snapshots.append(Attributes(scheduler, path, frozenset({"step", "get_last_lr"}) | SCHEDULER_COUNTS))
            replace_scheduler_step(self, scheduler, path)
            self._track_reads(scheduler, path)
        for holder, path in self.world.holders.values():
            self.follow_holder(holder, path)
        for name, slot, value in self.world.variables:
            if self.numbers.lifts(name) and type(value) in (int, float) and type(slot.get()) in (int, float):
                slot.set(self.scalars.lift(replace(slot, kind=InputKind.HYPER_PARAMETER), value))
        for container, path in self.world.containers:
            self.scalars.lift_items(container, path)

    def follow_holder(self, holder: Any, path: str) -> None:
        """Record what the step reads of a plain object, and what it sets."""
        self.classes[id(holder)] = (holder, path, type(holder))
        self.snapshots.append(Attributes(holder, path))
        self._lift_numbers(holder, path)
        self._track_reads(holder, path)

    def dicts_of_attributes(self) -> set[int]:
        """Dicts that are the attributes of plain objects (`self.__dict__ = self._shared_state`), by identity: their
        entries are compared and set one by one."""
        return {id(snapshot.now) for snapshot in self.snapshots}

    def _track_reads(self, holder: Any, path: str) -> None:
        self.readers.append((self.sources.reads.track(holder, path), path))

    def _lift_numbers(self, holder: Any, path: str) -> None:
        for key, value in list(own_dict(holder).items()):
            where = f"{path}.{key}"
            if self.numbers.lifts(where) and type(value) in (int, float):
                slot = MappingSlot(InputKind.HYPER_PARAMETER, where, None, own_dict(holder), key)
                own_dict(holder)[key] = self.scalars.lift(slot, value)

    def _trace(self, rng: RandomState) -> Any:
        fake_args, fake_kwargs = self.given = self.flat.rebuild(self.fake_leaves)
        with ExitStack() as stack:
            stack.enter_context(patched(self))
            if not self.numbers.plain:
                stack.callback(swap_conversions(self._earlier.conversions))
                stack.callback(swap_formats(self.texts, self._earlier.formats))
            # Functions from torch.compile run as written; with fullgraph=True Dynamo would refuse to under our modes.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.fake_mode)
            stack.enter_context(self.recorder)
            stack.enter_context(FunctionMode(self))
            stack.enter_context(KnownDraws())
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
            _tracing.active = True
            stack.callback(lambda: setattr(_tracing, "active", False))
            if self.session is not None:
                stack.enter_context(self.session.saved_tensors())
            stack.enter_context(self.showing.recorded())
            stack.enter_context(self.sources.followed())
            stack.callback(self.interrupts.shield)  # the first to run
            self.interrupts.allow()
            try:
                with (
                    nullcontext() if self.line_watch is None else self.line_watch.watching(),
                    none_swallowed(),
                    rng.watched(),
                ):
                    result = plain_keys(self.fn(*fake_args, **fake_kwargs))
                if self.session is not None:
                    self.session.finish()
                self.shapes.add_conditions(self.scalars.emit_scalar, self.recorder.node_of)
                self.shapes.close()
                self.decisions.release()
                self._again_if_met()
            except WholestepError as error:
                raise self._located(error) from error.__cause__
            except (ValueError, TypeError, KeyError) as error:
                if has_mark(str(error)):  # `float(text)`
                    raise needs_text("a conversion", location_of_exception(error)) from error
                raise
            except AttributeError as error:
                refuse_attribute_of_a_tensor(error, self.table.by_fake.get(id(error.obj)))
                raise
            except RuntimeError as error:
                refused = refusal_of(error)
                if refused is None:
                    raise
                raise refused from error
        self._refuse_changed_arguments(fake_args, fake_kwargs)
        self.hooks.check(self.table.by_fake)
        rng.check_untouched()
        self.settings.refuse_left_changed()
        return result

    def _refuse_changed_arguments(self, fake_args: Any, fake_kwargs: Any) -> None:
        """The trace worked on copies of the containers among the arguments; a change to them would be lost."""
        leaves, structure = leaves_of((fake_args, fake_kwargs))
        if structure != self.structure or not same_objects(leaves, self.fake_leaves):
            raise SideEffectError(
                "the step changes the contents of a list or dict among its arguments, which a replay would not repeat.",
                fix="return the value from the step instead.",
            ).seen_by(Effect(lambda capture: leaves_of(capture.given), same_trees))

    @staticmethod
    def _located(error: WholestepError, otherwise: Location | None = None) -> WholestepError:
        """An error raised without a line gets the deepest line of the user's code."""
        if error.location is not None:
            return error
        where = location_of_exception(error) or otherwise
        return error.at(where)

    def _line_of(self, error: WholestepError) -> Location | None:
        """The line for an error found after the trace: of the optimizer's step that it names, or of the function."""
        for optimizer, path in self.world.optimizers.items():
            if path in error.what and optimizer in self.step_lines:
                return self.step_lines[optimizer]
        return location_of_function(self.fn)

    def _again_if_met(self) -> None:
        """Trace again with an optimizer whose call the step hid (`except:`), or whose groups it changed."""
        met = self.met if self.met is not None else self._behind.changed()
        if met is not None:
            raise FoundByCall(met)

    def knows_formats(self, codes: list[CodeType]) -> bool:
        """Whether an earlier trace asked for these formats already, so that another one would not help."""
        return all(code in self._earlier.formats for code in codes)

    def may_record(self, container: Any) -> bool:
        """Whether writes to a container can be recorded in another trace; not where they were to be in this one."""
        known = any(container is each for each in self._earlier.written)
        return not known and can_record(container, self.world.places.get(id(container), []))

    def begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch is about to run the `step` of an optimizer."""
        self._bound_steps.begin(optimizer, args, kwargs)

    def end_step(self, optimizer: Optimizer) -> None:
        """It has run."""
        self._bound_steps.end(optimizer)

    def release(self) -> list[tuple[weakref.ref[Tensor], fx.Node]]:
        """Drop all fakes but those that the graph needs; returns weak references to all, with their nodes."""
        if self.session is not None:
            self.session.release()
        self.fake_leaves, self.given, self.snapshots, self.readers, self.session = [], None, [], [], None
        self.account, self._bound_steps, self.at_calls = Account(self), BoundSteps(self), StateAtCalls()
        self.effects.release()
        self.recorded.release()
        self.rebound.release()
        self.tables.release()
        self.recorder.reshaped.clear()
        self.inputs.release()
        self.shapes.release()
        self.table.release_fakes()
        return self.recorder.values.release()

    def creation_skipped_if(self, optimizer: Optimizer, flag: fx.Node) -> None:
        """State that this optimizer creates appears only where the flag is false."""
        self.skip_flags[optimizer] = flag

    def stand_in(self, real: Tensor) -> Tensor:
        """The fake for a real tensor that the step's code holds, if there is one."""
        tracked = self.table.tracked.get(id(real))
        return real if tracked is None else tracked.fake

    def replace_data(self, tensor: Tensor, new: Tensor) -> None:
        """`tensor.data = new`: from here on the tensor has the memory of the other one."""
        source = new if isinstance(new, FakeTensor) or is_dtensor(new) else self.lift(new)
        if self.session is not None or not may_replace_data(tensor, source):
            raise ParameterDataError(
                f"the step replaces .data of a tensor of shape {tuple(tensor.shape)} by one of shape "
                f"{tuple(new.shape)}, {new.dtype}, strides {tuple(new.stride())}.",
                fix="write into it under torch.no_grad(): param.copy_(new); change its size or type outside of the "
                "step."
                if self.session is None
                else "write into it under torch.no_grad(): param.copy_(new).",
                location=user_location(),
            )
        self.recorder.values.set_data(tensor, source)

    def address_of(self, fake: Tensor) -> int:
        """`data_ptr()`: of the tensor that a fake stands for, or that it is a view of."""
        tracked = self.table.by_fake.get(id(fake)) or self._base_of_view(fake)
        if tracked is None:
            raise ItemError(
                f".data_ptr() asks for the address of a tensor of shape {tuple(fake.shape)} that a graph computes.",
                fix="compare tensors that outlive the step, or do it outside.",
                location=user_location(),
            )
        begin = int(tracked.fake.storage_offset()) * tracked.fake.element_size()
        return int(tracked.real.data_ptr()) + int(fake.storage_offset()) * fake.element_size() - begin

    def _base_of_view(self, fake: Tensor) -> Tracked | None:
        """The tensor of the user's whose memory a fake shows, at a place that is the same in each call."""
        if type(fake.storage_offset()) is not int:
            return None
        return next((t for t in self.table.tracked.values() if storage_key(t.fake) == storage_key(fake)), None)

    def real_value(self, placeholder: fx.Node) -> Any | None:
        """The value that an input has in the call that is traced; None for a generator."""
        fake = placeholder.meta.get("val")
        tracked = self.table.by_fake.get(id(fake)) if isinstance(fake, Tensor) else None
        return local_of(tracked.real) if tracked is not None else fake

    def _guard_value(self, node: fx.Node, value: Any) -> Any:
        return self.items.guard(node, value)

    def _decide_size(self, expression: Any) -> bool | None:
        node = self.shapes.condition(expression, self.scalars.emit_scalar, self.recorder.node_of)
        return self.decisions.decide(node) if isinstance(node, fx.Node) else None

    def _assume_size(self, expression: Any) -> int | None:
        node = self.shapes.condition(expression, self.scalars.emit_scalar, self.recorder.node_of)
        return self.decisions.number(node) if isinstance(node, fx.Node) else None

    def before_operator(self) -> None:
        self.shapes.add_conditions(self.scalars.emit_scalar, self.recorder.node_of)
        self.interrupts.check()
        self.settings.check_operator()

    def path_of_module(self, module: nn.Module) -> str:
        return self.world.modules.get(module, self.module_path)

    def in_recompute(self) -> bool:
        return torch.is_grad_enabled()

    def lift(self, tensor: Tensor) -> Tensor:
        return self.inputs.lift(tensor)

    def constant(self, tensor: Tensor) -> fx.Node:
        return self.inputs.constant(tensor)

    def generator(self, generator: torch.Generator) -> fx.Node:
        return self.inputs.generator(generator)

    def item(self, tensor: Tensor, node: fx.Node) -> Any:
        return self.items.item(tensor, node)

    def tolist(self, tensor: Tensor) -> Any:
        return self.items.tolist(local := local_of(tensor), self.recorder.node_of(local))

    def shape_arg(self, value: Any) -> Any:
        return self.shapes.node(value, self.scalars.emit_scalar, self.recorder.node_of)

    def begin_data_sizes(self) -> bool:
        began = self.shapes.begin_data_sizes(self.fake_mode)
        env = self.shapes.declare()
        env.decide, env.assume = self._decide_size, self._assume_size
        return began

    def size_of(self, scalar: ScalarNode) -> torch.SymInt:
        """The size for a scalar that is known only when the graph runs."""
        self.begin_data_sizes()
        self.recorder.note_symbols()
        self.scalars.is_size = True
        return self.shapes.size_of(scalar.fx_arg(), self.scalars.emit_scalar)

    def name_data_sizes(self, node: fx.Node, tensor: Tensor) -> None:
        self.shapes.name_data_sizes(node, tensor, self.scalars.emit_scalar)
