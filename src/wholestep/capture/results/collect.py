"""After the trace: what the step returned, wrote, created, rebound and removed, as a frozen record.

Leaves of the result become outputs of the graph, or stay the objects they are; the signature describes in the user's
terms what every input, output and change is.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import ItemsView, Iterator, KeysView, Set, ValuesView
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, MethodWrapperType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.effects.container_stand_ins import StandInContainer
from wholestep.capture.effects.deferred_text import has_mark
from wholestep.capture.graph.functional_forms import add_write_backs
from wholestep.capture.objects.user_code import is_installed, is_user_code
from wholestep.capture.python_reads.attribute_reads import holds_tensor
from wholestep.capture.python_reads.clocks import refuse_clocks
from wholestep.capture.python_reads.outside_reads import STATE_READS
from wholestep.capture.python_reads.stand_ins import real_of
from wholestep.capture.results.bindings import PLAIN_CONSTANTS, Bindings
from wholestep.capture.results.changed_python import ChangedPython
from wholestep.capture.results.changed_state import bind_changed_state
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import ParameterDataError, SideEffectError, UnsupportedError
from wholestep.ir.captured_step import (
    ArgumentSpec,
    CallResult,
    CapturedStep,
    Change,
    DynamicSizesSpec,
    GuardSpecs,
    ParamGroupSpec,
    ScalarCondition,
)
from wholestep.ir.deferred import ItemLeaf
from wholestep.ir.early_values import Recipe
from wholestep.ir.effects import is_needed
from wholestep.ir.groups import group_table
from wholestep.ir.io.node_values import tensor_spec
from wholestep.ir.io.result_tree import describe, describe_deferred, describe_leaf
from wholestep.ir.signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    Signature,
    StateChange,
    TensorSpec,
    WriteBack,
)
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import Flat, flatten
from wholestep.ir.user_objects.slots import (
    ABSENT,
    BatchSlot,
    CellSlot,
    ClassSlot,
    ComputedSlot,
    LocalSlot,
    ModuleSlot,
    Slot,
    in_users_objects,
)
from wholestep.torch_private.distributed import describe_placement, is_dtensor, local_of, spec_of
from wholestep.torch_private.fake_tensors import FakeTensor, version_of
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.modules_and_optimizers import VALIDATION_OF_DISTRIBUTIONS

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_OVERRIDDEN = frozenset({"step", "get_last_lr", "param_groups"})
"""What is replaced in schedulers and wrappers of optimizers while a step is traced."""


def collect(capture: Capture, result: Any) -> CapturedStep:
    """Turn the recorded nodes into a StepGraph. The user's objects still hold fakes."""
    bindings = Bindings(capture)
    flat = flatten(result)
    leaves = returned_leaves(capture, bindings, flat)
    description = describe_result(flat, leaves, bindings)
    bind_changed_state(capture, bindings)
    python = ChangedPython(capture, bindings)
    python.bind()
    capture.table.attributes.bind(capture.table, bindings)
    effects = capture.effects.bind(bindings)
    capture.texts.refuse_unused()
    for call in capture.host_calls:
        call.leaves[:] = [leaf for leaf in call.leaves if leaf in bindings.late_leaves]
    if capture.numbers.plain:
        for node in capture.items.sources.values():
            bindings.logged(node)
    copies = add_write_backs(capture, [node for _, _, node in bindings.outputs])
    items = _item_recipe(capture)  # before dead nodes go
    made = list(capture.graph.nodes)
    _finish(capture.graph, [node for _, _, node in bindings.outputs])
    used = set(capture.graph.nodes)
    gm = lazy_graph_module(_Root(capture.inputs.constants), capture.graph, "WholeStep")
    capture.erased = [node for node in made if node not in used]
    inputs = tuple(capture.inputs.slot_of[node] for node in gm.graph.nodes if node.op == "placeholder")
    if capture.account.went_back:
        _refuse_inference_tensors(capture, inputs)
    return CapturedStep(
        step_graph=StepGraph(gm, sign(capture, gm, bindings, copies, description)),
        inputs=inputs,
        changes=tuple(bindings.changes),
        result_leaves=tuple(leaves),
        rebuild_result=None if flat.is_leaf else flat.rebuild,
        host_calls=tuple(capture.host_calls),
        stepped=tuple(dict.fromkeys(capture.steps_seen)),
        guards=_guard_specs(capture, bindings, python, items),
        deferred=bindings.sources,
        effects=tuple(effects),
        items_taken=_items_taken(capture, bindings, used),
        compare_scalars=capture.scalars.may_tell_apart(),
        clock_readings=tuple(capture.sources.clocks.readings),
    )


def _refuse_inference_tensors(capture: Capture, inputs: tuple[Slot, ...]) -> None:
    """Eager cannot save a tensor for the backward that was made under `torch.inference_mode()`."""
    for slot in inputs:
        if isinstance(slot, ComputedSlot):
            continue
        leaf = capture.flat.leaves[slot.index] if isinstance(slot, BatchSlot) else slot.get()
        real = capture.table.real_of(leaf)
        if isinstance(real, Tensor) and real.is_inference():
            raise UnsupportedError(
                f"{slot.path} was made under torch.inference_mode(), and the step computes gradients.",
                fix="make it under torch.no_grad(), or clone() it before the step.",
            )


def _guard_specs(capture: Capture, bindings: Bindings, python: ChangedPython, items: Recipe | None) -> GuardSpecs:
    """What the graph assumes of the user's objects. Those still hold fakes: values are read by `guards/`, later."""
    world, table, sources = capture.world, capture.table, capture.world.sources
    parameters = [(in_users_objects(t.slot), t.real) for t in table.tracked.values()]
    outside = capture.sources.outside
    attributes = capture.dicts_of_attributes()
    weakly_held = {id(ref()) for ref, _ in sources.weak.values()} & world.holders.keys()
    """Plain objects that a guard does not keep alive, unless the step read something of them."""
    skipped = attributes | {id(written.container) for written in python.written}
    containers = [(c, path) for c, path in world.containers if id(c) not in skipped and _may_read(capture, path)]
    return GuardSpecs(
        arguments=_arguments(capture),
        sizes=DynamicSizesSpec(capture.dynamic_dims, capture.shapes.sources, capture.shapes.env),
        modules=tuple(world.modules.items()),
        parameters=tuple((tracked.real, tracked.slot) for tracked in table.parameters),
        module_tensors=tuple((slot, tracked.real) for slot, tracked in table.module_slots),
        loose_parameters=tuple(
            (slot, real)
            for slot, real in parameters
            if slot.kind is InputKind.PARAMETER and not isinstance(slot, BatchSlot | ModuleSlot)
        ),
        optimizers=dict(world.optimizers),
        param_groups={
            optimizer: tuple(ParamGroupSpec(tuple(g.params), g.options, dict(g.constants)) for g in groups)
            for optimizer, groups in table.groups.items()
        },
        scalers=dict(world.scalers),
        nested_state=tuple(table.structures),
        same_tensors=tuple(table.same_tensors),
        tensor_attributes=tuple(table.attributes.specs()),
        variables=(*(each for each in world.variables if not capture.rebound.holds(each[1])), *python.elements_read),
        rebound_variables=python.rebound_variables,
        volatile=python.volatile,
        kinds=tuple(python.kinds),
        reads=tuple(_reads(capture, python.volatile)),
        class_reads=tuple(_class_reads(capture)),
        containers=tuple(containers),
        optimizer_containers=tuple(table.swapped_containers),
        written=tuple(python.written),
        arrays=tuple((a, path) for a, path in sources.arrays if _may_read(capture, path) and capture.sources.counts(a)),
        lru_caches=tuple((c, path) for c, path, info in sources.lru_caches.values() if c.cache_info() != info),
        links=tuple(world.links_to(capture.called)),
        classes=dict(sources.classes),
        classes_set_by_step=frozenset(c.slot.owner for c in bindings.changes if isinstance(c.slot, ClassSlot)),
        functions=tuple(sources.functions),
        reads_param_groups=world.reads_param_groups,
        types=tuple(each for each in capture.classes.values() if id(each[0]) not in weakly_held),
        weak=tuple((ref, path) for ref, path in sources.weak.values() if ref() is not None),
        libraries=tuple(sources.libraries.values()),
        whole_reads=tuple(
            (r.obj, path, r.before.keys() - _overridden(r.obj)) for r, path in capture.readers if r.read_whole
        ),
        abstract_classes=tuple(sources.abstract_classes.values()),
        codes=tuple(world.codes.values()),
        builtin_names=tuple((namespace, frozenset(names)) for namespace, names in world.builtin_names.values()),
        thread_locals=tuple(sources.thread_locals),
        environment=dict(outside.environment),
        whole_environment=outside.whole_environment,
        call_results=(*outside.call_results.values(), *_counts_and_seeds(capture)),
        files=tuple(outside.files.values()),
        lifted=frozenset(slot.path for slot, _ in capture.scalars.lifted),
        scalar_types=tuple(capture.scalars.lifted),
        conditions=tuple(
            ScalarCondition(guard.describe(), tuple(guard.expression.leaves()), guard.holds)
            for guard in capture.scalars.guards.values()
        ),
        items=items,
        placeholder_slots=dict(capture.inputs.slot_of),
    )


def _counts_and_seeds(capture: Capture) -> Iterator[CallResult]:
    """Properties of tensors and generators that user code reads by name (`_version`, `initial_seed`). Frameworks name
    most of them somewhere, and what they do with them is no part of a step."""
    world = capture.world
    codes = [code for _, code in world.codes.values() if is_user_code(code) and not is_installed(code)]
    named = {name for code in codes for name in (*code.co_names, *code.co_consts)}
    if "_version" in named:
        for tensor, slot in world.tensors.values():
            if id(tensor) not in capture.table.tracked:
                yield CallResult(f"{slot.path}._version", partial(version_of, tensor), version_of(tensor))
    if "initial_seed" in named:
        for generator, path in world.generators.values():
            yield CallResult(f"{path}.initial_seed()", generator.initial_seed, generator.initial_seed())
    if world.sources.counts_in_decimal:
        yield _state_read("decimal.getcontext()")
    reads_levels = bool({"level", "disabled"} & named)
    for logger, path in world.sources.loggers.values() if reads_levels else ():
        level = attrgetter("level", "disabled")
        yield CallResult(f"({path}.level, {path}.disabled)", partial(level, logger), level(logger))
    for name in {"__doc__", "__annotations__", "__subclasses__"} & named:
        owners: list[Any] = [*world.sources.classes, *(fn for fn, _ in world.codes.values())]
        for owner in owners:
            if hasattr(owner, name):
                is_method = name == "__subclasses__"
                call = partial(type.__subclasses__, owner) if is_method else partial(getattr, owner, name)
                yield CallResult(f"{owner.__qualname__}.{name}", call, copy.copy(call()))
    if id(numpy) in world.sources.libraries or any(type(array) is numpy.ndarray for array, _ in world.sources.arrays):
        yield _state_read("numpy.geterr()")
        yield _state_read("numpy.get_printoptions()")


def _state_read(name: str) -> CallResult:
    return CallResult(name, STATE_READS[name], STATE_READS[name]())


def _arguments(capture: Capture) -> ArgumentSpec:
    leaves, lifted = capture.flat.leaves, {slot.path for slot, _ in capture.scalars.lifted}
    tracked = capture.table.tracked
    return ArgumentSpec(
        structure=capture.structure,
        paths=tuple(capture.leaf_paths),
        slots=tuple(tracked[id(leaf)].slot if isinstance(leaf, Tensor) else None for leaf in leaves),
        constants={
            i: leaf
            for i, leaf in enumerate(leaves)
            if not isinstance(leaf, Tensor) and capture.leaf_paths[i] not in lifted
        },
    )


def _item_recipe(capture: Capture) -> Recipe | None:
    read = [leaf for guard in capture.scalars.guards.values() for leaf in guard.expression.leaves()]
    nodes = [leaf.node for leaf in read if isinstance(leaf, ItemLeaf)]
    return Recipe(nodes) if nodes else None


def _items_taken(capture: Capture, bindings: Bindings, used: set[fx.Node]) -> dict[int, fx.Node]:
    items = bindings.items() | capture.items.sources
    return {number: node for number, node in items.items() if node in used}


def _finish(graph: fx.Graph, outputs: list[Any]) -> None:
    """Set the outputs of the graph, and remove nodes and inputs that these do not need."""
    made = list(graph.nodes)
    graph.output(tuple(outputs))
    graph.eliminate_dead_code(is_needed)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if not node.users:
            graph.erase_node(node)
    for node in made:
        if node.op != "placeholder" and "val" in node.meta:
            node.meta["val"] = _without_history(node.meta["val"])


def _without_history(val: Any) -> Any:
    """The value without autograd's graph, which would keep everything alive that it saved."""
    if isinstance(val, Tensor):
        return val.detach() if val.requires_grad else val
    if type(val) in (list, tuple) and any(isinstance(each, Tensor) and each.requires_grad for each in val):
        return type(val)(map(_without_history, val))
    return val


def _reads(capture: Capture, volatile: dict[int, set[str]]) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """What the step read of plain objects and does not set itself."""
    lifted = {slot.path for slot, _ in capture.scalars.lifted}
    for reader, path in capture.readers:
        before = next(s for s in capture.snapshots if s.obj is reader.obj).before
        skip = volatile.get(id(reader.obj), set())
        values = {}
        for name in reader.names:
            where = f"{path}.{name}"
            if where in lifted or name in _overridden(reader.obj):
                continue
            if name not in skip:
                values[name] = capture.table.real_container(capture.table.whole_of(before.get(name, ABSENT)))
        if values:
            yield reader.obj, path, values


def _whole_reads(capture: Capture) -> Iterator[tuple[Any, str, Set[str]]]:
    for reader, path in capture.readers:
        if reader.read_whole:
            yield reader.obj, path, reader.before.keys() - _overridden(reader.obj)


def _overridden(obj: Any) -> frozenset[str]:
    """Attributes of an object that the trace sets itself."""
    return _OVERRIDDEN if isinstance(obj, LRScheduler | Optimizer) else frozenset()


def _class_reads(capture: Capture) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """What the step read of the classes of plain objects, except for what tracing switches off."""
    for reader, path in capture.readers:
        values = {name: value for name, value in reader.class_values.items() if name != VALIDATION_OF_DISTRIBUTIONS}
        yield reader.obj, path, values


def _may_read(capture: Capture, path: str) -> bool:
    """A container in an attribute of a plain object counts only if the step read that attribute."""
    holding = [(reader, holder) for reader, holder in capture.readers if path.startswith(holder + ".")]
    if not holding:
        return True
    reader, holder = max(holding, key=lambda found: len(found[1]))
    return path[len(holder) + 1 :].split(".")[0].split("[")[0] in reader.names


class _Root(torch.nn.Module):
    """Owner of the constants of a graph."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in constants.items():
            self.register_buffer(name, tensor)


def sign(
    capture: Capture, gm: fx.GraphModule, bindings: Bindings, copies: list[tuple[fx.Node, fx.Node]], result: Any
) -> Signature:
    """Describe a graph that is complete. `result`: the tree that the step returns."""
    guards = [g.describe() for g in capture.scalars.guards.values()] + [
        text for text, _ in DynamicSizesSpec(env=capture.shapes.env).assumed()
    ]
    return Signature(
        inputs=tuple(_input(n, capture.inputs.slot_of[n]) for n in gm.graph.nodes if n.op == "placeholder"),
        outputs=tuple(OutputSpec(kind, path, _spec_of(node)) for kind, path, node in bindings.outputs),
        write_backs=tuple(WriteBack(target.name, value.name) for target, value in copies),
        state_changes=tuple(_change(change) for change in bindings.changes),
        result=result,
        guards=tuple(guards),
        rng=tuple(capture.recorder.random_devices),
        host_calls=tuple(f"{call.path}.step()" for call in capture.host_calls),
        dynamic={name: (dim.min, dim.max) for name, (dim, _) in capture.shapes.symbols.items()},
        groups=group_table(gm, {} if capture.session is None else capture.session.axis_names()),
    )


def _input(node: fx.Node, slot: Slot) -> InputSpec:
    placement = describe_placement(slot.spec) if isinstance(slot, LocalSlot) else ""
    return InputSpec(node.name, slot.kind, slot.path, _spec_of(node), slot.of, placement)


def _change(change: Change) -> StateChange:
    slot = change.slot
    constant = change.constant if isinstance(change.constant, PLAIN_CONSTANTS) else repr(change.constant)
    return StateChange(change.kind, slot.kind, slot.path, change.output, constant, change.unless, slot.of)


def _spec_of(node: Any) -> TensorSpec | None:
    fake = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tensor_spec(fake) if isinstance(fake, Tensor) else None


def returned_leaves(capture: Capture, bindings: Bindings, result: Flat) -> list[tuple[str, Any]]:
    """How the runtime gets each leaf of the result: see `Captured.result_leaves`."""
    pairs = zip(result.leaves, result.paths, strict=True)
    return [leaf_of(capture, bindings, leaf, f"result{path}") for leaf, path in pairs]


def describe_result(result: Flat, leaves: list[tuple[str, Any]], bindings: Bindings) -> Any:
    """The tree of the result for the signature."""

    def output_of(value: Any) -> int | dict[str, Any] | None:
        if not isinstance(value, _Found):
            return None
        kind, found = value.found
        if kind == "sharded":
            return int(found[0])
        if kind == "deferred":
            return describe_deferred(bindings.outputs_of(found))
        return int(found) if kind in ("output", "attached", "detached") else describe_leaf(found)

    return describe(result.rebuild([_Found(leaf) for leaf in leaves]), output_of)


def leaf_of(capture: Capture, bindings: Bindings, leaf: Any, path: str) -> tuple[str, Any]:
    """How the runtime gets one value that it hands to the user."""

    def output(node: Any) -> int:
        return bindings.output(OutputKind.RESULT, path, node)

    refuse_clocks(leaf, path)
    if isinstance(leaf, StandInContainer) and path.startswith("result"):
        raise SideEffectError(
            f"{path} is {leaf.wholestep_recorder.path}, which the step also writes: a replay cannot return it.",
            fix="return what is new in it, and read it outside of the step.",
        )
    leaf = capture.table.whole_of(real_of(leaf))
    if is_dtensor(leaf):
        return "sharded", (output(capture.recorder.node_of(local_of(leaf))), spec_of(leaf))
    if isinstance(leaf, Tensor):
        if bindings.refuse_part_of_replaced(leaf, path) is not None:
            raise ParameterDataError(
                f"{path} shares memory with a parameter whose .data the step sets to it.", fix="clone() it."
            )
        is_users = id(leaf) in capture.table.by_fake or id(leaf) in capture.table.tracked
        node, fake = _tensor(capture, leaf)
        if fake.is_floating_point() and not fake.requires_grad and not is_users:
            return "detached", output(node)
        return "attached" if fake.requires_grad and not fake.is_leaf else "output", output(node)
    if has_mark(leaf):
        return "deferred", bindings.read_after(capture.texts.deferred(leaf))
    scalar = scalar_of(leaf)
    if scalar is not None and scalar.is_deferred:
        return "deferred", bindings.deferred(scalar)
    if scalar is not None:
        return "output", output(scalar.fx_arg())
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        node = capture.shape_arg(leaf)
        return ("output", output(node)) if isinstance(node, fx.Node) else ("value", node)
    if isinstance(leaf, GeneratorType) or _hides_tensor(leaf) or _binds_tensor(capture, leaf):
        raise UnsupportedError(
            f"{path} is a {type(leaf).__name__} with tensors inside, which the graph cannot rebuild.",
            fix="return the tensors in a dict, tuple or list; or register the class with "
            "torch.utils._pytree.register_dataclass.",
        )
    return "value", leaf


def _tensor(capture: Capture, leaf: Tensor) -> tuple[fx.Node, Tensor]:
    """The node that holds a returned tensor, and the fake that stands for it."""
    tracked = capture.table.by_fake.get(id(leaf))
    if not isinstance(leaf, FakeTensor):
        tracked = capture.table.tracked.get(id(leaf))
        leaf = capture.lift(leaf)
    if tracked is None:
        return capture.recorder.node_of(leaf), leaf
    return next(node for node in capture.inputs.slot_of if node.meta.get("val") is tracked.input), leaf


def _hides_tensor(value: Any) -> bool:
    """Whether a pytree leaf holds tensors of the trace in its attributes."""
    if isinstance(value, torch.nn.Module | Optimizer | type):
        return False
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return holds_tensor(list(value))
    return any(holds_tensor(v) for v in getattr(value, "__dict__", {}).values())


def _binds_tensor(capture: Capture, value: Any, depth: int = 0) -> bool:
    """Whether a function, `partial`, bound method or iterator that the step made holds tensors of the trace."""
    if depth > 5 or isinstance(value, torch.nn.Module | Optimizer | ModuleType | type):
        return False
    if depth > 0 and holds_tensor(value):
        return True
    if isinstance(value, FunctionType):
        users = {id(slot.cell) for _, slot, _ in capture.world.variables if isinstance(slot, CellSlot)}
        cells = [cell for cell in value.__closure__ or () if id(cell) not in users]
        parts = [contents for cell in cells for contents in gc.get_referents(cell)]
        parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType | BuiltinFunctionType | MethodWrapperType):
        parts = [value.__self__]
    else:
        iterates = hasattr(type(value), "__next__") or isinstance(value, tuple | list)
        parts = gc.get_referents(value) if iterates else []
    return any(_binds_tensor(capture, part, depth + 1) for part in parts)


class _Found:
    """A leaf of the result while the description is built."""

    def __init__(self, found: tuple[str, Any]) -> None:
        self.found = found
