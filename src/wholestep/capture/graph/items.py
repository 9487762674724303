"""`.item()` and `.tolist()` return symbolic scalars while tracing.

torch.linspace(0, 1, 9)[3].item()    computed from no input: a plain number
state["step"].item()     known before the step runs: computed from single-element state. A branch on it is a guard
loss.item()              known after the graph ran. It may be returned, stored, printed and computed with; where it
                         reaches a tensor it is a node of the graph; a branch on it is refused
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, fx

from wholestep.capture.graph.decisions import Decisions
from wholestep.capture.graph.inputs import Inputs
from wholestep.capture.graph.recorder import Recorder
from wholestep.capture.objects.swapped_state import StateTable
from wholestep.capture.patching.packed_sequences import batch_of_packed, is_asked_by_rnn
from wholestep.capture.scalars.scalar_policy import ScalarPolicy
from wholestep.capture.scalars.symbolic_scalars import ScalarHost, ScalarNode
from wholestep.errors import ControlFlowError, ItemError, WholestepError
from wholestep.ir.deferred import ItemLeaf, Number, SizeLeaf
from wholestep.ir.early_values import KNOWN_KINDS, KnownValues
from wholestep.ir.meta import asked_by, user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.slots import Slot
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import without_modes

_MOST_ELEMENTS = 65_536
_BRANCHES = ("__bool__", "is_nonzero")
_CONVERSIONS = {"__float__": "float", "__int__": "int", "__index__": "int"}


class ItemHost(Protocol):
    """What `Items` needs from the capture."""

    phase: str
    api: str
    recorder: Recorder
    table: StateTable
    inputs: Inputs
    numbers: ScalarPolicy
    decisions: Decisions


class ScalarMaker(ScalarHost, Protocol):
    """What `Items` needs from the scalars of the trace."""

    def is_pinned(self, path: str) -> bool: ...

    def note_deferred(self) -> None: ...


class Items:
    """The scalars that the step read from tensors."""

    def __init__(self, host: ItemHost, scalars: ScalarMaker) -> None:
        self._host = host
        self._scalars = scalars
        self._known = KnownValues(self._known_placeholder)
        self._known_batch = KnownValues(self._known_batch_placeholder, single=False)
        self._constants = KnownValues(lambda placeholder: None, single=False)
        self._taken: dict[tuple[fx.Node, int | None], ScalarNode | Number] = {}
        self._held: dict[fx.Node, fx.Node] = {}
        self._flat: dict[fx.Node, fx.Node] = {}
        self._tried = 0
        self.sources: dict[int, fx.Node] = {}
        """Tensors of items that were unknown and reach the graph, or for which a trace with plain scalars gave a trial
        value, by the index of the item."""

    def item(self, tensor: Tensor, node: fx.Node) -> Any:
        """`.item()` of a tensor, whose contents a node holds."""
        api = self._host.api
        if (size := batch_of_packed(node)) is not None:
            return size
        taken = self._taken.get((node, None))
        if taken is not None and not (isinstance(taken, ScalarNode) and taken.is_deferred):
            return taken.as_python() if isinstance(taken, ScalarNode) else taken
        value = self._known.of(node)
        if value is None:
            value = self._constants.of_constant(node)
        if value is None and (asked_by("transformers/masking_utils.py") or is_asked_by_rnn()):
            value = self._known_batch.of(node)  # a property of the batch's mask, or its size; checked at each call
        if value is None:
            if api in _BRANCHES and not tensor.dtype.is_complex:
                answer = self._branch(tensor, node)
                if answer is not None:
                    return answer
            if tensor.dtype.is_complex or api in _BRANCHES:
                raise _value_leaves(api, tensor)
            if api in _CONVERSIONS and not self._host.numbers.plain:
                self._scalars.before_conversion(_CONVERSIONS[api])
                raise _value_leaves(api, tensor)
            return self._deferred(tensor, node, None)
        if tensor.dtype.is_complex:
            raise _value_leaves(api, tensor)
        with without_modes():
            number = value.item() if isinstance(value, Tensor) else value
        if self._known.is_constant(node) or self._host.numbers.plain:
            return number
        leaf = ItemLeaf(node, known=True)
        name = self._name(node)
        scalar = ScalarNode(self._scalars, _kind(tensor), number, name, leaf=leaf)
        if self._scalars.is_pinned(name):
            return scalar.specialise("a plain number")
        if api in _CONVERSIONS and self._host.phase != "optimizer":
            self._scalars.before_conversion(_CONVERSIONS[api])  # `int(self.queue_ptr)`: a scalar in the next trace
        scalar._fx = self._host.recorder.emit_function(torch.ops.aten._local_scalar_dense.default, (node,), number)
        self._taken[node, None] = scalar
        return scalar.as_python()

    def _branch(self, tensor: Tensor, node: fx.Node) -> bool | None:
        if tensor.numel() != 1:
            return None
        if tensor.dtype is not torch.bool:
            node = self._host.recorder.emit(torch.ops.aten.ne.Scalar, node, 0)
        return self._host.decisions.decide(node)

    def guard(self, node: fx.Node, value: Number) -> Any:
        """Fix the value of a node that is known before the step runs."""
        scalar = ScalarNode(self._scalars, type(value), value, self._name(node), leaf=ItemLeaf(node, known=True))
        return scalar.specialise("a branch")

    def decide(self, scalar: ScalarNode) -> Number | None:
        """Which way a branch on a scalar goes that is known only when the graph runs, or the value of an integer; None
        if that is refused."""
        if any(not isinstance(leaf, ItemLeaf | SizeLeaf | Slot) for leaf in scalar.leaves()):
            return None
        node, decisions = scalar.fx_arg(), self._host.decisions
        if not isinstance(node, fx.Node):
            return None
        return decisions.decide(node) if scalar.kind is bool else decisions.number(node)

    def tolist(self, tensor: Tensor, node: fx.Node) -> Any:
        """`.tolist()`: one scalar per element."""
        if tensor.dtype.is_complex or tensor.numel() > _MOST_ELEMENTS:
            raise _value_leaves("tolist", tensor)
        if tensor.dim() == 0:
            return self.item(tensor, node)
        constant = self._constants.of_constant(node)
        if constant is not None:
            with without_modes():
                return constant.tolist()
        found = [self._deferred(tensor, node, i) for i in range(tensor.numel())]
        for size in reversed(tensor.shape[1:]):
            found = [found[i : i + size] for i in range(0, len(found), size)] if size else []
        return found if tensor.numel() else _empty(list(tensor.shape))

    def _deferred(self, tensor: Tensor, node: fx.Node, index: int | None) -> Any:
        """A scalar that is known after the graph ran; a trial value in a trace with plain scalars."""
        taken = self._taken.get((node, index))
        if taken is None:
            trial = self._trial(tensor.dtype)
            real = self._host.decisions.value_of(node)
            if isinstance(real, Tensor):
                trial = _element(real, index)
            held = self._held.get(node)
            if held is None:
                held = self._held[node] = self._host.recorder.values.as_it_is(tensor)
            if self._host.numbers.plain:
                taken = trial
                self.sources[self._tried] = held
            else:
                self._scalars.note_deferred()
                leaf = ItemLeaf(held, known=False, index=index, trial=trial, number=self._tried)
                taken = ScalarNode(self._scalars, _kind(tensor), None, self._name(node, index), leaf=leaf)
            self._taken[node, index] = taken
        return taken.as_python() if isinstance(taken, ScalarNode) else taken

    def _trial(self, dtype: torch.dtype) -> Number:
        """The next trial value, in the order of the step: values that differ from each other."""
        self._tried += 1
        if dtype is torch.bool:
            return self._tried % 2 == 0
        return (self._tried * 0.6180339887) % 0.8 + 0.1 if dtype.is_floating_point else 2 + self._tried % 5

    def _name(self, node: fx.Node, index: int | None = None) -> str:
        where = user_location(with_text=False)
        place = "" if index is None else f"[{index}]"
        name = f"{node.name}{place}.item()"
        return f"{name} at {where}" if where is not None and self._host.phase != "optimizer" else name

    def emit(self, leaf: ItemLeaf, trial: Number) -> fx.Node:
        """The node for a scalar that reaches a tensor."""
        recorder, node = self._host.recorder, leaf.node
        self.sources[leaf.number] = node
        if leaf.index is not None:
            flat = self._flat.get(node)
            if flat is None:
                flat = self._flat[node] = recorder.emit(torch.ops.aten.reshape.default, node, [-1])
            node = recorder.emit(torch.ops.aten.select.int, flat, 0, leaf.index)
        return recorder.emit_function(torch.ops.aten._local_scalar_dense.default, (node,), trial)

    def _known_placeholder(self, node: fx.Node) -> Any | None:
        if self._host.inputs.slot_of[node].kind not in KNOWN_KINDS:
            return None
        fake = node.meta.get("val")
        tracked = self._host.table.by_fake.get(id(fake)) if isinstance(fake, Tensor) else None
        return local_of(tracked.real) if tracked is not None else fake

    def _known_batch_placeholder(self, node: fx.Node) -> Any | None:
        tracked = self._host.table.by_fake.get(id(node.meta.get("val")))
        return tracked.real if tracked is not None and tracked.slot.kind is InputKind.BATCH else None


def _element(tensor: Tensor, index: int | None) -> Number:
    with without_modes():
        number: Number = (tensor if index is None else tensor.flatten()[index]).item()
    return number


def _kind(tensor: Tensor) -> type:
    return float if tensor.dtype.is_floating_point else bool if tensor.dtype is torch.bool else int


def _empty(shape: list[int]) -> list[Any]:
    """The nested lists of a tensor without elements."""
    return [] if not shape or not shape[0] else [_empty(shape[1:]) for _ in range(shape[0])]


def _value_leaves(api: str, tensor: Tensor) -> WholestepError:
    """The error where code needs the value of a tensor; `api`: the name of the call."""
    where = user_location()
    shape = tuple(tensor.shape)
    if api in _BRANCHES:
        return ControlFlowError(
            f"Python branches on the value of a tensor of shape {shape}.",
            fix="use torch.where or multiply by a mask; decide outside of the step and pass a bool; or, where the "
            "branch only checks (raise, assert) and nearly always goes one way, compile with assume=True.",
            location=where,
        )
    name = {"__float__": "float()", "__int__": "int()", "__index__": "an index", "tolist": ".tolist()"}
    return ItemError(
        f"{name.get(api, '.item()')} takes the value of a tensor of shape {shape} out of the graph.",
        fix="return the tensor from the step and read its value outside; or take it with .item(), if it is only "
        "returned, stored or printed.",
        location=where,
    )
