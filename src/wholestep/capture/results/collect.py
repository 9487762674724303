"""After the trace: what the step returned, wrote, created, rebound and removed, as a StepGraph with signature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from wholestep.capture.captured import Captured
from wholestep.capture.graph.known_values import ItemLeaf, Recipe
from wholestep.capture.graph.signing import sign
from wholestep.capture.graph.write_backs import add_write_backs
from wholestep.capture.results.bindings import Bindings
from wholestep.capture.results.changed_python import ChangedPython
from wholestep.capture.results.changed_state import bind_changed_state, refuse_changed_requires_grad
from wholestep.capture.results.returned import describe_result, returned_leaves
from wholestep.ir.effects import is_needed
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import flatten
from wholestep.ir.user_objects.slots import ABSENT
from wholestep.torch_private.fx_graphs import lazy_graph_module

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_OVERRIDDEN = frozenset({"step", "get_last_lr", "param_groups"})


def collect(capture: Capture, result: Any) -> Captured:
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
    return Captured(
        step_graph=StepGraph(gm, sign(capture, gm, bindings, copies, description)),
        inputs=[capture.inputs.slot_of[node] for node in gm.graph.nodes if node.op == "placeholder"],
        changes=bindings.changes,
        result_leaves=leaves,
        rebuild_result=None if flat.is_leaf else flat.rebuild,
        host_calls=capture.host_calls,
        stepped=list(dict.fromkeys(capture.steps_seen)),
        world=capture.world,
        table=capture.table,
        shapes=capture.shapes,
        scalar_guards=list(capture.guards.values()),
        items=items,
        placeholder_slots=dict(capture.inputs.slot_of),
        dynamic_dims=capture.dynamic_dims,
        leaf_paths=capture.leaf_paths,
        leaves=capture.flat.leaves,
        structure=capture.structure,
        volatile=python.volatile,
        rebound_variables=python.rebound_variables,
        kinds=python.kinds,
        reads=list(_reads(capture, python.volatile)),
        class_reads=[(r.obj, path, dict(r.class_values)) for r, path in capture.readers if r.class_values],
        containers=[(c, path) for c, path in capture.world.containers if _may_read(capture, path)],
        arrays=[(a, path) for a, path in capture.world.sources.arrays if _may_read(capture, path)],
        links=capture.world.links_to(capture.called),
        modules=list(capture.world.modules.items()),
        outside=capture.sources.outside,
        lifted=frozenset(slot.path for slot, _ in capture.lifted),
        number_types=capture.lifted,
        compare_numbers=capture.may_tell_numbers_apart(),
        erased=[node for node in made if node not in used],
        tensor_attributes=capture.table.attributes.own_attributes(),
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
