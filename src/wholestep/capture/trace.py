"""Trace a step once: run the user's function on fakes, record the graph, read off what changed, put everything back."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from wholestep._torch_compat import (
    SCALER_STEP,
    SCALER_TENSORS,
    SCALER_UNSCALE,
    FakeTensorMode,
    generator_key,
    is_dtensor,
    local_of,
    new_fake_mode,
    without_modes,
)
from wholestep.capture.amp import select_instead_of_branch
from wholestep.capture.arguments import dynamic_dims, name_leaves
from wholestep.capture.captured import Captured, HostCall
from wholestep.capture.collect import collect
from wholestep.capture.discover import World, discover
from wholestep.capture.hooks import refuse_hooks, trace_parameter_hooks
from wholestep.capture.host_numbers import HostNumber, LastRateSlot
from wholestep.capture.intercept import FunctionMode
from wholestep.capture.known import KNOWN_KINDS, ItemLeaf, KnownValues
from wholestep.capture.location import asked_by, location_of_exception, user_location
from wholestep.capture.patches import patched
from wholestep.capture.plain import assign_contents, copy_of, same_contents, skeleton
from wholestep.capture.python_state import Attributes, ReadTracker
from wholestep.capture.random_state import RandomState, default_generators
from wholestep.capture.recorder import Recorder
from wholestep.capture.scalars import Number, ScalarGuard, ScalarNode, scalar_of
from wholestep.capture.shapes import Shapes
from wholestep.capture.slots import BatchSlot, GeneratorSlot, MappingSlot, Slot
from wholestep.capture.state import StateTable, Tracked
from wholestep.capture.tree import Flat, flatten, leaves_of, same_objects
from wholestep.errors import (
    CapturedTensorError,
    ControlFlowError,
    ItemError,
    Location,
    OptimizerClosureError,
    RandomStateError,
    SideEffectError,
    UnsupportedError,
    WholestepError,
)
from wholestep.ir.known_draws import KnownDraws
from wholestep.ir.signature import InputKind
from wholestep.options import Options
from wholestep.parallel.place import Placing, plan_hooks, sharding_hooks
from wholestep.parallel.plan import Plan
from wholestep.parallel.session import Session

_one_capture_at_a_time = threading.RLock()
_tracing = threading.local()


def is_tracing() -> bool:
    """Whether this thread is capturing a step right now."""
    return getattr(_tracing, "active", False)


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    symbolic_numbers: frozenset[str] = frozenset(),
) -> Captured:
    """Capture one call of a step. Nothing is computed and nothing of the user's is changed."""
    started = time.perf_counter()
    with _one_capture_at_a_time:
        capture = Capture(fn, args, kwargs, options, symbolic_numbers)
        captured = capture.run()
    captured.seconds = time.perf_counter() - started
    return captured


def find_models(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan) -> Placing:
    """The models and optimizers of a step that are not yet in the form of a plan."""
    flat = flatten((args, kwargs))
    return Placing(plan, discover(fn, zip(name_leaves(fn, flat, len(args)), flat.leaves, strict=True)))


class Capture:
    """One trace. Host of the recorder, the scalars and the patches."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        symbolic_numbers: frozenset[str],
    ) -> None:
        self.fn = fn
        self.options = options
        self.symbolic_numbers = symbolic_numbers
        self.phase = "forward"
        self.module_path = ""
        self.flat: Flat = flatten((args, kwargs))
        self.structure = leaves_of((args, kwargs))[1]
        self.leaf_paths = name_leaves(fn, self.flat, len(args))
        self.world: World = discover(fn, zip(self.leaf_paths, self.flat.leaves, strict=True))
        self.contents = [(c, path, skeleton(c)) for c, path in self.world.containers]
        self.shapes = Shapes()
        self.dynamic_dims = dynamic_dims(options, self.leaf_paths, self.flat.leaves)
        if self.dynamic_dims:
            self.shapes.declare()
        self.fake_mode: FakeTensorMode = new_fake_mode(self.shapes.env)
        self.graph = fx.Graph()
        self.recorder = Recorder(self.graph, self.fake_mode, self)
        self.table = StateTable(self.world, self.fake_mode, self.make_scalar)
        self.constants: dict[str, Tensor] = {}
        self.guards: dict[str, ScalarGuard] = {}
        self.host_calls: list[HostCall] = []
        self.skip_flags: dict[Optimizer, fx.Node] = {}
        self.slot_of: dict[fx.Node, Slot] = {}
        self.snapshots: list[Attributes] = []
        self.readers: list[tuple[ReadTracker, str]] = []
        self.copies = [(c, path, copy_of(c)) for c, path in self.world.containers]
        self.lifted: dict[int, Tensor] = {}
        self.scalar_slots: dict[int, Slot] = {}
        self.steps_seen: list[Optimizer] = []
        self.api = ""
        self._leaf_nodes: dict[int, fx.Node] = {}
        self._generators: dict[int, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None
        self._known = KnownValues(self._known_placeholder)
        self._known_batch = KnownValues(self._known_batch_placeholder, single=False)
        self._item_nodes: dict[fx.Node, ScalarNode] = {}
        self.session: Session | None = None
        """What the plan does while tracing."""

    # The way of one capture.

    def run(self) -> Captured:
        rng = RandomState(self.world)
        try:
            self._build_inputs()
            if self.options.parallel is None:
                self._refuse_shards()
            if self.options.hooks == "refuse":
                refuse_hooks(self.world, self.table.parameters, plan_hooks(self.world))
            with self._swapped():
                self._begin_session()
                result = self._trace(rng)
                self.shapes.refuse_fixed()
                captured = collect(self, result)
        finally:
            rng.restore()
        return captured

    def _refuse_shards(self) -> None:
        for tracked in self.table.tracked.values():
            if is_dtensor(tracked.real):
                raise UnsupportedError(
                    f"{tracked.slot.path} is a shard of a tensor (a DTensor), and this step has no plan.",
                    fix="compile the step with the parallel= plan that the model was sharded by; for a model that "
                    "something else sharded, start from the plain model.",
                )

    def _begin_session(self) -> None:
        if self.options.parallel is not None:
            self.session = Session(self.options.parallel, self.world, self.table, self.recorder)

    def _build_inputs(self) -> None:
        self.table.build()
        self.fake_leaves: list[Any] = []
        for i, leaf in enumerate(self.flat.leaves):
            if isinstance(leaf, Tensor):
                tracked = self.table.tracked.get(id(leaf)) or self._batch_leaf(leaf, i)
                self.fake_leaves.append(tracked.fake)
            else:
                self.fake_leaves.append(leaf)

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
            self.table.swap_in()
            for tracked in list(self.table.tracked.values()):
                self._placeholder_for(tracked)
            if self.options.hooks == "trace":
                trace_parameter_hooks(self.table.parameters)
            self._swap_python_objects()
            yield
        finally:
            for reader, _ in self.readers:
                reader.stop()
            for snapshot in reversed(self.snapshots):
                snapshot.restore()
            self.table.restore()
            for _, slot, value in self.world.variables:
                if slot.get() is not value:
                    slot.set(value)
            for container, _, contents in self.copies:
                if not same_contents(contents, container):
                    assign_contents(container, contents)

    def _swap_python_objects(self) -> None:
        for module, path in self.world.modules.items():
            self.snapshots.append(Attributes(module, path))
            self._lift_numbers(module, path)
        internal = frozenset({"param_groups", "state", "step"})
        for optimizer, path in self.world.optimizers.items():
            self.snapshots.append(Attributes(optimizer, path, internal))
            self._lift_numbers(optimizer, path)
            self._wrap_optimizer(optimizer)
        for scaler, path in self.world.scalers.items():
            self.snapshots.append(Attributes(scaler, path, frozenset({*SCALER_TENSORS, SCALER_STEP, SCALER_UNSCALE})))
            vars(scaler)[SCALER_STEP] = lambda *a, **k: select_instead_of_branch(self, *a, **k)
            vars(scaler)[SCALER_UNSCALE] = functools.partial(self._unscale, getattr(scaler, SCALER_UNSCALE))
        for scheduler, path in self.world.schedulers.items():
            self.snapshots.append(Attributes(scheduler, path, frozenset({"step", "get_last_lr"})))
            self._wrap_scheduler(scheduler, path)
            self._track_reads(scheduler, path)
        for holder, path in self.world.holders.values():
            self.snapshots.append(Attributes(holder, path))
            self._lift_numbers(holder, path)
            self._track_reads(holder, path)
        for name, slot, value in self.world.variables:
            if name in self.symbolic_numbers and type(value) in (int, float):
                lifted = replace(slot, kind=InputKind.HYPER_PARAMETER)
                slot.set(self.make_scalar(lifted, value))

    def _track_reads(self, holder: Any, path: str) -> None:
        reader = ReadTracker(holder)
        reader.start()
        self.readers.append((reader, path))

    def _lift_numbers(self, holder: Any, path: str) -> None:
        for key, value in list(vars(holder).items()):
            where = f"{path}.{key}"
            if where in self.symbolic_numbers and type(value) in (int, float):
                slot = MappingSlot(InputKind.HYPER_PARAMETER, where, None, vars(holder), key)
                vars(holder)[key] = self.make_scalar(slot, value)

    def _trace(self, rng: RandomState) -> Any:
        fake_args, fake_kwargs = self.flat.rebuild(self.fake_leaves)
        with ExitStack() as stack:
            stack.enter_context(patched(self))
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
            try:
                result = self.fn(*fake_args, **fake_kwargs)
                if self.session is not None:
                    self.session.finish()
            except WholestepError as error:
                raise self._located(error) from error.__cause__
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise _mixed(location_of_exception(error)) from error
        self._refuse_changed_arguments(fake_args, fake_kwargs)
        rng.check_untouched()
        return result

    def _refuse_changed_arguments(self, fake_args: Any, fake_kwargs: Any) -> None:
        """The trace worked on copies of the containers among the arguments; a change to them would be lost."""
        leaves, structure = leaves_of((fake_args, fake_kwargs))
        if structure != self.structure or not same_objects(leaves, self.fake_leaves):
            raise SideEffectError(
                "the step changes the contents of a list or dict among its arguments, which a replay would not repeat.",
                fix="return the value from the step instead.",
            )

    @staticmethod
    def _located(error: WholestepError) -> WholestepError:
        """An error raised without a line gets the deepest line of the user's code."""
        if error.location is not None:
            return error
        where = location_of_exception(error)
        return type(error)(error.what, fix=error.fix, node=error.node, location=where, around=error.around)

    # Optimizers and schedulers while tracing.

    def _wrap_optimizer(self, optimizer: Optimizer) -> None:
        original = optimizer.step

        def step(closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if closure is not None:
                raise OptimizerClosureError(
                    "optimizer.step(closure) may evaluate the model any number of times.",
                    fix="compute the loss and call backward() before optimizer.step(), without a closure.",
                    location=user_location(),
                )
            if self.host_calls:
                raise SideEffectError(
                    f"{self.host_calls[-1].path}.step() comes before an optimizer's step, which would see the new "
                    "learning rate in this same call.",
                    fix="call scheduler.step() after optimizer.step(), as torch asks for.",
                    location=user_location(),
                )
            before, self.phase = self.phase, "optimizer"
            self.steps_seen.append(optimizer)
            try:
                if self.session is not None:
                    return self.session.optimizer_step(optimizer, lambda: original(*args, **kwargs))
                return original(*args, **kwargs)
            finally:
                self.phase = before

        vars(optimizer)["step"] = step

    def _unscale(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any) -> Any:
        if self.session is None:
            return original(optimizer, *args)
        return self.session.unscale(optimizer, lambda: original(optimizer, *args))

    def _wrap_scheduler(self, scheduler: Any, path: str) -> None:
        def step(*args: Any, **kwargs: Any) -> None:
            if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
                raise ItemError(
                    f"{path}.step() takes the value of a tensor.",
                    fix="return the tensor from the step and call the scheduler outside of it.",
                    location=user_location(),
                )
            self.host_calls.append(HostCall(scheduler, path, args, kwargs))
            self._hide_hyper_parameters(scheduler.optimizer)

        def get_last_lr() -> list[Any]:
            slots = [
                LastRateSlot(InputKind.HYPER_PARAMETER, f"{path}.get_last_lr()[{i}]", None, scheduler, i)
                for i in range(len(scheduler.optimizer.param_groups))
            ]
            if any(call.scheduler is scheduler for call in self.host_calls):
                return [HostNumber(slot.path, slot.get) for slot in slots]
            return [self.make_scalar(slot, slot.get()) for slot in slots]

        vars(scheduler)["step"] = step
        vars(scheduler)["get_last_lr"] = get_last_lr

    def _hide_hyper_parameters(self, optimizer: Optimizer) -> None:
        """From here on the learning rates of this optimizer are what the scheduler will make of them."""
        for group in optimizer.param_groups:
            for key, value in group.items():
                scalar = scalar_of(value)
                if scalar is not None and isinstance(scalar.leaf, Slot):
                    group[key] = HostNumber(scalar.leaf.path, scalar.leaf.get)

    def creation_skipped_if(self, optimizer: Optimizer, flag: fx.Node) -> None:
        """State that this optimizer creates appears only where the flag is false."""
        self.skip_flags[optimizer] = flag

    # Host of the recorder.

    def path_of_module(self, module: nn.Module) -> str:
        return self.world.modules.get(module, self.module_path)

    def in_recompute(self) -> bool:
        return torch.is_grad_enabled()

    def _placeholder_for(self, tracked: Tracked) -> fx.Node:
        node = self._placeholder(tracked.slot)
        self.recorder.values.register_input(tracked.input, node)
        return node

    def _placeholder(self, slot: Slot) -> fx.Node:
        """A new input, after the ones there are."""
        first = next(iter(self.graph.nodes), None)
        if self._last_placeholder is not None:
            point = self.graph.inserting_after(self._last_placeholder)
        elif first is not None:
            point = self.graph.inserting_before(first)
        else:
            point = self.graph.inserting_before()
        with point:
            node = self.graph.placeholder(_identifier(slot.path))
        self._last_placeholder = node
        self.slot_of[node] = slot
        return node

    def lift(self, tensor: Tensor) -> Tensor:
        """A real tensor that the step's code holds becomes an input, if a later call can find it again."""
        known = self.lifted.get(id(tensor))
        if known is not None:
            return known
        tracked = self.table.tracked.get(id(tensor))
        if tracked is None:
            found = self.world.tensors.get(id(tensor))
            if found is None:
                raise CapturedTensorError(
                    f"the step reads a tensor of shape {tuple(tensor.shape)} that is not reachable from its arguments, "
                    "closure, globals or modules, so a later call could not find it again.",
                    fix="pass it as an argument, or keep it as a buffer or attribute of a module.",
                    location=user_location(),
                )
            if tensor.requires_grad:
                raise CapturedTensorError(
                    f"{found[1].path} requires grad and cannot be exchanged where it is kept.",
                    fix="make it a parameter of a module, or pass it as an argument.",
                    location=user_location(),
                )
            tracked = self.table.track_input(tensor, found[1])
            self._placeholder_for(tracked)
        self.lifted[id(tensor)] = tracked.fake
        return tracked.fake

    def constant(self, tensor: Tensor) -> fx.Node:
        """Data that the step's own code wrote down, kept with the graph."""
        name = f"_constant{len(self.constants)}"
        with without_modes():
            self.constants[name] = tensor.detach().clone()
        node = self.graph.create_node("get_attr", name)
        node.meta["constant"] = self.constants[name]
        return node

    def generator(self, generator: torch.Generator) -> fx.Node:
        """A generator that the step draws from by name is an input."""
        key = generator_key(generator)
        known = self._generators.get(key)
        if known is None:
            generator, path = self.world.generators.get(key) or default_generators().get(key, (generator, ""))
            if not path:
                raise RandomStateError(
                    "the step draws from a generator that a later call could not find again.",
                    fix="pass the generator as an argument or keep it in a variable that the step names.",
                    location=user_location(),
                )
            slot = GeneratorSlot(InputKind.RNG_STATE, path, None, generator)
            known = self._placeholder(slot)
            self._generators[key] = known
        return known

    def shape_arg(self, value: Any) -> Any:
        return self.shapes.node(value, self.emit_scalar, self.recorder.node_of)

    # Host of the scalars.

    def make_scalar(self, slot: Slot, value: Number) -> Any:
        """A number in a slot becomes a scalar of the graph."""
        kind = float if isinstance(value, float) else int
        return ScalarNode(self, kind, kind(value), slot.path, leaf=slot).as_python()

    def emit_scalar(self, target: Callable[..., Any], args: tuple[Any, ...], value: Number | None) -> fx.Node:
        return self.recorder.emit_function(target, args, value)

    def leaf_scalar(self, leaf: Any, value: Number | None) -> fx.Node:
        if id(leaf) not in self._leaf_nodes:
            node = self._placeholder(leaf)
            node.meta["val"] = value
            self._leaf_nodes[id(leaf)] = node
        return self._leaf_nodes[id(leaf)]

    def shape_scalar(self, symbol: Any) -> tuple[fx.Node, Number]:
        wrap: Any = torch.SymInt
        return self.shape_arg(wrap(symbol)), symbol.hint

    def add_guard(self, guard: ScalarGuard) -> None:
        self.guards.setdefault(guard.key, guard)

    def location_here(self) -> Location | None:
        return user_location()

    def item(self, tensor: Tensor, node: fx.Node) -> Any:
        """`.item()`: allowed for state that is known at the call, and inside of an optimizer."""
        known = self._item_nodes.get(node)
        if known is not None:
            return known.as_python()
        kind = {True: float}.get(tensor.dtype.is_floating_point, bool if tensor.dtype is torch.bool else int)
        value = self._known.of(node)
        if value is None and asked_by("transformers/masking_utils.py"):
            value = self._known_batch.of(node)  # a property of the batch's mask, checked at each call
        if tensor.dtype.is_complex or (value is None and self.phase != "optimizer"):
            raise self._value_leaves(tensor)
        with without_modes():
            number = value.item() if isinstance(value, Tensor) else value
        if value is not None and self._known.is_constant(node):
            return number
        leaf = ItemLeaf(node, value is not None)
        where = user_location(with_text=False)
        name = f"{node.name}.item()" + (f" at {where}" if where is not None and self.phase != "optimizer" else "")
        scalar = ScalarNode(self, kind, number, name, leaf=leaf)
        scalar._fx = self.recorder.emit_function(torch.ops.aten._local_scalar_dense.default, (node,), number)
        self._item_nodes[node] = scalar
        return scalar.as_python()

    def _known_placeholder(self, node: fx.Node) -> Any | None:
        slot = self.slot_of[node]
        if slot.kind not in KNOWN_KINDS:
            return None
        fake = node.meta.get("val")
        tracked = self.table.by_fake.get(id(fake)) if isinstance(fake, Tensor) else None
        return local_of(tracked.real) if tracked is not None else fake

    def _known_batch_placeholder(self, node: fx.Node) -> Any | None:
        tracked = self.table.by_fake.get(id(node.meta.get("val")))
        return tracked.real if tracked is not None and tracked.slot.kind is InputKind.BATCH else None

    def _value_leaves(self, tensor: Tensor) -> WholestepError:
        where = user_location()
        shape = tuple(tensor.shape)
        if self.api in ("__bool__", "is_nonzero"):
            return ControlFlowError(
                f"Python branches on the value of a tensor of shape {shape}.",
                fix="use torch.where or multiply by a mask; or decide outside of the step and pass a bool.",
                location=where,
            )
        name = {"__float__": "float()", "__int__": "int()", "__index__": "an index"}.get(self.api, ".item()")
        return ItemError(
            f"{name} takes the value of a tensor of shape {shape} out of the graph.",
            fix="return the tensor from the step and read its value outside.",
            location=where,
        )


def _identifier(path: str) -> str:
    name = "".join(c if c.isalnum() else "_" for c in path).strip("_")
    while "__" in name:
        name = name.replace("__", "_")
    return name if name and not name[0].isdigit() else f"input_{name}"


def _mixed(location: Location | None) -> UnsupportedError:
    return UnsupportedError(
        "an operator got a sharded parameter together with a plain tensor. Outside of a module's forward a parameter "
        "is what this rank has of it.",
        fix="move the computation into the forward of a module, where parameters are whole; or take the whole of it: "
        "parameter.full_tensor().",
        location=location,
    )
