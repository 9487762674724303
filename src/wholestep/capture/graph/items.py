"""`.item()` while tracing: a number of the graph where the value is known at each call, otherwise refused."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, fx

from wholestep.capture.graph.inputs import Inputs
from wholestep.capture.graph.recorder import Recorder
from wholestep.capture.objects.swapped_state import StateTable
from wholestep.capture.scalars.scalar_policy import ScalarPolicy
from wholestep.capture.scalars.symbolic_scalars import ScalarHost, ScalarNode
from wholestep.errors import ControlFlowError, ItemError, WholestepError
from wholestep.ir.early_values import KNOWN_KINDS, ItemLeaf, KnownValues
from wholestep.ir.meta import asked_by, user_location
from wholestep.ir.signature import InputKind
from wholestep.torch_private.dtensor import local_of
from wholestep.torch_private.fake_tensors import without_modes


class ItemHost(ScalarHost, Protocol):
    """What items ask of the capture."""

    phase: str
    api: str
    recorder: Recorder
    table: StateTable
    inputs: Inputs
    numbers: ScalarPolicy

    def is_pinned(self, path: str) -> bool: ...


class Items:
    """The numbers that the step took out of tensors."""

    def __init__(self, host: ItemHost) -> None:
        self._host = host
        self._known = KnownValues(self._known_placeholder)
        self._known_batch = KnownValues(self._known_batch_placeholder, single=False)
        self._taken: dict[fx.Node, ScalarNode] = {}

    def item(self, tensor: Tensor, node: fx.Node) -> Any:
        """`.item()`: allowed for state that is known at the call, and inside of an optimizer."""
        known = self._taken.get(node)
        if known is not None:
            return known.as_python()
        kind = {True: float}.get(tensor.dtype.is_floating_point, bool if tensor.dtype is torch.bool else int)
        value = self._known.of(node)
        if value is None and asked_by("transformers/masking_utils.py"):
            value = self._known_batch.of(node)  # a property of the batch's mask, checked at each call
        in_optimizer = self._host.phase == "optimizer"
        if tensor.dtype.is_complex or (value is None and not in_optimizer):
            raise _value_leaves(self._host.api, tensor)
        with without_modes():
            number = value.item() if isinstance(value, Tensor) else value
        if value is not None and self._known.is_constant(node):
            return number
        if value is not None and self._host.numbers.plain:
            return number
        leaf = ItemLeaf(node, value is not None)
        where = user_location(with_text=False)
        name = f"{node.name}.item()" + (f" at {where}" if where is not None and not in_optimizer else "")
        scalar = ScalarNode(self._host, kind, number, name, leaf=leaf)
        if value is not None and self._host.is_pinned(name):
            return scalar.specialise("a plain number")
        taken = self._host.recorder.emit_function(torch.ops.aten._local_scalar_dense.default, (node,), number)
        scalar._fx = taken
        self._taken[node] = scalar
        return scalar.as_python()

    def _known_placeholder(self, node: fx.Node) -> Any | None:
        if self._host.inputs.slot_of[node].kind not in KNOWN_KINDS:
            return None
        fake = node.meta.get("val")
        tracked = self._host.table.by_fake.get(id(fake)) if isinstance(fake, Tensor) else None
        return local_of(tracked.real) if tracked is not None else fake

    def _known_batch_placeholder(self, node: fx.Node) -> Any | None:
        tracked = self._host.table.by_fake.get(id(node.meta.get("val")))
        return tracked.real if tracked is not None and tracked.slot.kind is InputKind.BATCH else None


def _value_leaves(api: str, tensor: Tensor) -> WholestepError:
    """The value of a tensor is asked for; `api`: by which name."""
    where = user_location()
    shape = tuple(tensor.shape)
    if api in ("__bool__", "is_nonzero"):
        return ControlFlowError(
            f"Python branches on the value of a tensor of shape {shape}.",
            fix="use torch.where or multiply by a mask; or decide outside of the step and pass a bool.",
            location=where,
        )
    name = {"__float__": "float()", "__int__": "int()", "__index__": "an index"}.get(api, ".item()")
    return ItemError(
        f"{name} takes the value of a tensor of shape {shape} out of the graph.",
        fix="return the tensor from the step and read its value outside.",
        location=where,
    )
