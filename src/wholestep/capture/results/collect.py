"""After the trace: what the step returned, wrote, created, rebound and removed, as a StepGraph with signature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from wholestep.capture.graph.signing import sign
from wholestep.capture.graph.write_backs import add_write_backs
from wholestep.capture.results.bindings import Bindings
from wholestep.capture.results.changed_python import ChangedPython
from wholestep.capture.results.changed_state import bind_changed_state, refuse_changed_requires_grad
from wholestep.capture.results.returned import describe_result, returned_leaves
from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.dynamic_sizes import DynamicSizes
from wholestep.ir.effects import is_needed
from wholestep.ir.guard_specs import ArgumentSpec, GuardSpecs, ParamGroupSpec, ScalarCondition
from wholestep.ir.known_values import ItemLeaf, Recipe
from wholestep.ir.signature import InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import flatten
from wholestep.ir.user_objects.slots import ABSENT, BatchSlot, ClassSlot, ModuleSlot, in_users_objects
from wholestep.torch_private.fx_graphs import lazy_graph_module

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_OVERRIDDEN = frozenset({"step", "get_last_lr", "param_groups"})


def collect(capture: Capture, result: Any) -> CapturedStep:
    """Turn the recorded nodes into a StepGraph. The user's objects still hold fakes."""
    bindings = Bindings(capture)
    flat = flatten(result)
    leaves = returned_leaves(capture, bindings, flat)
    description = describe_result(flat, leaves)
    bind_changed_state(capture, bindings)
    python = ChangedPython(capture, bindings)
    python.bind()
    capture.table.attributes.bind(capture.table, bindings)
    refuse_changed_requires_grad(capture.table)
    copies = add_write_backs(capture)
    items = _item_recipe(capture)  # before dead nodes go
    made = list(capture.graph.nodes)
    _finish(capture.graph, [node for _, _, node in bindings.outputs])
    used = set(capture.graph.nodes)
    gm = lazy_graph_module(_Root(capture.inputs.constants), capture.graph, "WholeStep")
    capture.erased = [node for node in made if node not in used]
    return CapturedStep(
        step_graph=StepGraph(gm, sign(capture, gm, bindings, copies, description)),
        inputs=tuple(capture.inputs.slot_of[node] for node in gm.graph.nodes if node.op == "placeholder"),
        changes=tuple(bindings.changes),
        result_leaves=tuple(leaves),
        rebuild_result=None if flat.is_leaf else flat.rebuild,
        host_calls=tuple(capture.host_calls),
        stepped=tuple(dict.fromkeys(capture.steps_seen)),
        guards=_guard_specs(capture, bindings, python, items),
        compare_scalars=capture.may_tell_numbers_apart(),
    )


def _guard_specs(capture: Capture, bindings: Bindings, python: ChangedPython, items: Recipe | None) -> GuardSpecs:
    """What the graph assumes of the user's objects. Those still hold fakes: values are read by `guards/`, later."""
    world, table, sources = capture.world, capture.table, capture.world.sources
    parameters = [(in_users_objects(t.slot), t.real) for t in table.tracked.values()]
    outside = capture.sources.outside
    return GuardSpecs(
        arguments=_arguments(capture),
        sizes=DynamicSizes(capture.dynamic_dims, capture.shapes.sources, capture.shapes.env),
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
            optimizer: tuple(ParamGroupSpec(tuple(group.params), dict(group.constants)) for group in groups)
            for optimizer, groups in table.groups.items()
        },
        scalers=dict(world.scalers),
        nested_state=tuple(table.structures),
        same_tensors=tuple(table.same_tensors),
        tensor_attributes=tuple(table.attributes.specs()),
        variables=tuple(world.variables),
        rebound_variables=python.rebound_variables,
        volatile=python.volatile,
        kinds=tuple(python.kinds),
        reads=tuple(_reads(capture, python.volatile)),
        class_reads=tuple((r.obj, path, dict(r.class_values)) for r, path in capture.readers if r.class_values),
        containers=tuple((c, path) for c, path in world.containers if _may_read(capture, path)),
        arrays=tuple((a, path) for a, path in sources.arrays if _may_read(capture, path)),
        links=tuple(world.links_to(capture.called)),
        classes=dict(sources.classes),
        classes_set_by_step=frozenset(c.slot.owner for c in bindings.changes if isinstance(c.slot, ClassSlot)),
        functions=tuple(sources.functions),
        thread_locals=tuple(sources.thread_locals),
        environment=dict(outside.environment),
        whole_environment=outside.whole_environment,
        files=tuple(outside.files.values()),
        lifted=frozenset(slot.path for slot, _ in capture.lifted),
        scalar_types=tuple(capture.lifted),
        conditions=tuple(
            ScalarCondition(guard.describe(), tuple(guard.expression.leaves()), guard.holds)
            for guard in capture.guards.values()
        ),
        items=items,
        placeholder_slots=dict(capture.inputs.slot_of),
    )


def _arguments(capture: Capture) -> ArgumentSpec:
    leaves, lifted = capture.flat.leaves, {slot.path for slot, _ in capture.lifted}
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
    read = [leaf for guard in capture.guards.values() for leaf in guard.expression.leaves()]
    nodes = [leaf.node for leaf in read if isinstance(leaf, ItemLeaf)]
    return Recipe(nodes) if nodes else None


def _finish(graph: fx.Graph, outputs: list[Any]) -> None:
    """Give the graph its outputs; what they do not need goes, and so do inputs that nothing reads."""
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
    lifted = {slot.path for slot, _ in capture.lifted}
    for reader, path in capture.readers:
        before = next(s for s in capture.snapshots if s.obj is reader.obj).before
        skip = volatile.get(id(reader.obj), set())
        values = {}
        for name in reader.names:
            where = f"{path}.{name}"
            if where in lifted or name in _OVERRIDDEN:
                continue
            if name not in skip:
                values[name] = before.get(name, ABSENT)
        yield reader.obj, path, values


def _may_read(capture: Capture, path: str) -> bool:
    """A container in an attribute of a plain object counts only if the step read that attribute."""
    for reader, holder in capture.readers:
        if path.startswith(holder + "."):
            name = path[len(holder) + 1 :].split(".")[0].split("[")[0]
            return name in reader.names
    return True


class _Root(torch.nn.Module):
    """Owner of the constants of a graph."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in constants.items():
            self.register_buffer(name, tensor)
