"""What slots hold after the graph ran: an output of the graph, a constant, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from wholestep.capture.effects.deferred_text import has_mark
from wholestep.capture.graph.functional_forms import replaced_data_in
from wholestep.capture.python_reads.clocks import refuse_clocks
from wholestep.capture.python_reads.stand_ins import real_of
from wholestep.capture.results.effect_line import value_effect
from wholestep.capture.scalars.symbolic_scalars import ScalarNode, scalar_of
from wholestep.errors import ParameterDataError, SideEffectError, UnsupportedError
from wholestep.ir.captured_step import Change
from wholestep.ir.deferred import DeferredNumber, DeferredSources, HostLeaf, ItemLeaf, ShownLeaf, SizeLeaf
from wholestep.ir.signature import ChangeKind, OutputKind
from wholestep.ir.user_objects.slots import ABSENT, LocalSlot, SameMemorySlot, Slot
from wholestep.torch_private.distributed import is_dtensor, local_of, spec_of
from wholestep.torch_private.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

PLAIN_CONSTANTS = (int, float, bool, str, type(None))
"""Types of values that a replay can set again."""


class Bindings:
    """The outputs of the graph so far, and the changes to slots that take them."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._recorder = capture.recorder
        self.outputs: list[tuple[OutputKind, str, Any]] = []
        self.changes: list[Change] = []
        self._output_index: dict[Any, int] = {}
        self._bound_nodes: set[fx.Node] = set()
        self._kept: dict[int, tuple[Tensor, int | None]] = {}
        """Tensors that are state after the step, by identity, with their outputs."""
        self.late_leaves: set[HostLeaf] = set()
        """Scalars that host calls set and something else takes."""
        self._read_after: dict[Any, int] = {}
        self._read_before: list[Slot] = []
        self.sources = DeferredSources(self._read_after, self._read_before)
        """Where the leaves of deferred scalars are read."""
        self._containers = {id(container): path for container, path in capture.world.containers}

    def output(self, kind: OutputKind, path: str, node: Any) -> int:
        """The index of the output that holds a node."""
        key = (kind, node)
        if kind is not OutputKind.RESULT and key in self._output_index:
            return self._output_index[key]
        self.outputs.append((kind, path, node))
        self._output_index[key] = len(self.outputs) - 1
        return len(self.outputs) - 1

    def bind(
        self, slot: Slot, new: Any, *, created: bool, flag: fx.Node | None = None, after_calls: bool = False
    ) -> None:
        """After the graph ran, and the schedulers if `after_calls`, the slot holds `new`."""
        refuse_clocks(new, slot.path)
        new = real_of(new)
        unless = self.skipped(flag)
        kind = ChangeKind.CREATED if created else ChangeKind.REBOUND
        if new is ABSENT:
            self.changes.append(Change(ChangeKind.REMOVED, slot, unless=unless, after_calls=after_calls))
            return
        scalar = scalar_of(new)
        if is_dtensor(new):
            slot = LocalSlot(slot.kind, slot.path, slot.of, slot, spec_of(new))
            new = local_of(new)
        if _is_subclass(new):
            raise UnsupportedError(
                f"the step sets {slot.path} to a {type(new).__name__}; tensor subclasses are not captured.",
                fix="keep plain tensors in state (for a low-bit optimizer: use the plain one), or run in eager.",
                location=self._recorder.subclass_lines.get(type(new)),
            )
        if isinstance(new, Tensor):
            self._refuse_unrepeatable(slot, new)
            source = new if isinstance(new, FakeTensor) else self._capture.lift(new)
            parameter = self.refuse_part_of_replaced(source, slot.path)
            if parameter is not None:
                self.changes.append(Change(kind, SameMemorySlot(slot.kind, slot.path, slot.of, slot, parameter)))
                return
            index = self._state_output(source, slot.path)
            self.changes.append(Change(kind, slot, output=index, unless=unless, after_calls=after_calls))
        elif scalar is not None and scalar.is_deferred:
            self.changes.append(
                Change(kind, slot, deferred=self.deferred(scalar), unless=unless, after_calls=after_calls)
            )
        elif scalar is not None:
            value = scalar.fx_arg()
            if isinstance(value, fx.Node):
                index = self.output(OutputKind.STATE, slot.path, value)
                self.changes.append(Change(kind, slot, output=index, unless=unless, after_calls=after_calls))
            else:
                self.changes.append(
                    Change(ChangeKind.CONSTANT, slot, constant=value, unless=unless, after_calls=after_calls)
                )
        elif has_mark(new):
            number = self.read_after(self._capture.texts.deferred(new))
            self.changes.append(Change(kind, slot, deferred=number, unless=unless, after_calls=after_calls))
        elif _is_constant(new := _without_symbolic_scalars(new)):
            self.changes.append(Change(ChangeKind.CONSTANT, slot, constant=new, unless=unless, after_calls=after_calls))
        else:
            raise SideEffectError(
                f"the step sets {slot.path} to a {type(new).__name__}, which a replay cannot repeat.",
                fix="set it outside of the step.",
            ).seen_by(value_effect(slot.get))

    def refuse_part_of_replaced(self, tensor: Tensor, path: str) -> Slot | None:
        """The parameter whose `.data` the step set to this very tensor, which outlives it; a part of it is refused."""
        if not self._recorder.values.replaced() or id(tensor) in self._capture.table.by_fake:
            return None
        tracked = replaced_data_in(self._capture, tensor)
        if tracked is None:
            return None
        fake = tracked.input
        if tensor.shape != fake.shape or tensor.storage_offset() != fake.storage_offset():
            raise ParameterDataError(
                f"{path} shares a part of its memory with {tracked.slot.path}, because the step sets .data to it.",
                fix="clone() what you keep.",
            )
        return tracked.slot

    def skipped(self, flag: fx.Node | None) -> int | None:
        """The index of the output that says whether a change is skipped."""
        return self.output(OutputKind.PREDICATE, "optimizer step skipped", flag) if flag is not None else None

    def deferred(self, scalar: ScalarNode) -> DeferredNumber:
        """A number that is known only after the graph ran; the graph returns what it is computed from."""
        return self.read_after(scalar.deferred())

    def read_after(self, number: DeferredNumber) -> DeferredNumber:
        """Let the graph return what a number or text is computed from."""
        for leaf in number.leaves:
            if isinstance(leaf, ItemLeaf):
                if leaf not in self._read_after:
                    self._read_after[leaf] = self.logged(leaf.node)
            elif isinstance(leaf, SizeLeaf | ShownLeaf):
                self._read_after.setdefault(leaf, self.logged(leaf.node))
            elif isinstance(leaf, HostLeaf):
                self.late_leaves.add(leaf)
            elif isinstance(leaf, Slot) and leaf not in self._read_before:
                self._read_before.append(leaf)
        return number

    def items(self) -> dict[int, fx.Node]:
        """The tensors of items whose value is read after the run, by the index of the item."""
        return {leaf.number: leaf.node for leaf in self._read_after if isinstance(leaf, ItemLeaf) and leaf.number}

    def logged(self, node: fx.Node) -> int:
        """The output for a tensor whose value is read after the run."""
        if (key := (OutputKind.LOGGED, node)) in self._output_index:
            return self._output_index[key]
        number = sum(kind is OutputKind.LOGGED for kind, _, _ in self.outputs)
        return self.output(OutputKind.LOGGED, f"logged[{number}]", node)

    def outputs_of(self, number: DeferredNumber) -> list[int]:
        """The outputs of the graph that a scalar is computed from."""
        return sorted({self._read_after[leaf] for leaf in number.leaves if leaf in self._read_after})

    def refuse_shared(self, path: str) -> None:
        """Refuse a change to a list or dict that two places of an optimizer share."""
        other = self._capture.table.shared.get(path)
        if other is not None:
            raise UnsupportedError(
                f"the step changes {path}, which is the same object as {other}.", fix="give each its own copy."
            )

    def own_container(self, container: Any, path: str) -> None:
        """Refuse a list or dict that is in two places: a replay would make two lists or dicts."""
        other = self._containers.setdefault(id(container), path)
        if other != path:
            raise UnsupportedError(
                f"{path} and {other} are the same {type(container).__name__}.", fix="keep a copy in one of them."
            )

    def _state_output(self, source: Tensor, path: str) -> int:
        """The output for a tensor that outlives the step: one for all places that hold the same tensor."""
        _, index = self._kept.get(id(source), (source, None))
        if index is None:
            index = self.output(OutputKind.STATE, path, self._own_memory(self._recorder.node_of(source)))
            self._kept[id(source)] = (source, index)
        return index

    def _refuse_unrepeatable(self, slot: Slot, new: Tensor) -> None:
        """Refuse a tensor that requires grad: a replay would leave one without the flag."""
        made_here = isinstance(new, FakeTensor) and id(new) not in self._capture.table.by_fake
        if made_here and new.requires_grad and new.is_leaf:
            raise SideEffectError(
                f"the step sets {slot.path} to a tensor that requires grad, and a replay would leave one without.",
                fix="keep it without grad: tensor.detach().",
            ).seen_by(value_effect(slot.get))

    def _own_memory(self, node: fx.Node) -> fx.Node:
        """The node, or a copy: state that outlives the step shares memory with no input and with no other state."""
        if node.op != "placeholder" and node not in self._bound_nodes:
            self._bound_nodes.add(node)
            return node
        return self._recorder.emit(torch.ops.aten.clone.default, node)


def _without_symbolic_scalars(value: Any) -> Any:
    """A tuple or list with its symbolic scalars specialised; anything else unchanged."""
    if type(value) not in (tuple, list) or all(scalar_of(item) is None for item in value):
        return value
    scalars = [(item, scalar_of(item)) for item in value]
    why = "a tuple or list that outlives the step"
    return type(value)(item if scalar is None else scalar.specialise(why) for item, scalar in scalars)


def _is_subclass(value: Any) -> bool:
    """Whether a value is a tensor with its own dispatch."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return False
    return type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(item, PLAIN_CONSTANTS) for item in value)
    return isinstance(value, PLAIN_CONSTANTS)
