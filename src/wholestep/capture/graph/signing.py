"""The signature of a captured graph: what its inputs, outputs and changes are in the user's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from wholestep.capture.results.bindings import PLAIN_CONSTANTS, Bindings
from wholestep.ir.captured_step import Change
from wholestep.ir.dynamic_sizes import DynamicSizes
from wholestep.ir.groups import group_table
from wholestep.ir.io.node_values import tensor_spec
from wholestep.ir.signature import InputSpec, OutputSpec, Signature, StateChange, TensorSpec, WriteBack
from wholestep.ir.user_objects.slots import LocalSlot, Slot
from wholestep.torch_private.dtensor import describe_placement

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture


def sign(
    capture: Capture, gm: fx.GraphModule, bindings: Bindings, copies: list[tuple[fx.Node, fx.Node]], result: Any
) -> Signature:
    """Describe a graph that is complete. `result`: the tree that the step returns."""
    guards = [g.describe() for g in capture.guards.values()] + [
        text for text, _ in DynamicSizes(env=capture.shapes.env).assumed()
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
