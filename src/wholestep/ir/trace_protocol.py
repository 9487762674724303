"""What a plan of `parallel/` may ask of a trace: the protocol between capture and a plan, so that neither needs to know
the other's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from wholestep.ir.user_objects.slots import ModuleSlot, Slot


class TracedMemory(Protocol):
    """The memory behind one or more tensors."""

    version: int
    """How often it was written."""


class TracedValue(Protocol):
    """One fake tensor: how it is seen from what it is a view of."""

    @property
    def base(self) -> TracedMemory: ...
    @property
    def fake(self) -> Tensor: ...
    @property
    def parent(self) -> TracedValue | None: ...
    @property
    def op(self) -> Any: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def index(self) -> int | None: ...


class TracedValues(Protocol):
    """Which node holds the contents of a fake tensor now."""

    paused: bool
    """Operators that run now are arithmetic on metadata and are not recorded."""

    def knows(self, fake: Tensor) -> bool: ...
    def value(self, fake: Tensor) -> TracedValue: ...
    def is_written(self, fake: Tensor) -> bool: ...
    def write(self, fake: Tensor, new: fx.Node) -> None: ...
    def register_result(self, fake: Tensor, node: fx.Node) -> None: ...


class TracedNodes(Protocol):
    """The graph under construction."""

    @property
    def graph(self) -> fx.Graph: ...
    def create(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node: ...
    def last(self) -> fx.Node | None: ...
    def since(self, before: fx.Node | None) -> list[fx.Node]: ...


class TraceRecorder(Protocol):
    """Records nodes while the user's function runs."""

    @property
    def nodes(self) -> TracedNodes: ...
    @property
    def values(self) -> TracedValues: ...
    def emit_function(self, target: Callable[..., Any], args: tuple[Any, ...], val: Any) -> fx.Node: ...
    def node_of(self, fake: Tensor) -> fx.Node: ...


class TracedTensor(Protocol):
    """One tensor of the user's and the fake that stands for it."""

    @property
    def real(self) -> Tensor: ...
    @property
    def fake(self) -> Tensor: ...
    @property
    def slot(self) -> Slot: ...
    @property
    def input(self) -> Tensor: ...


class TracedState(Protocol):
    """All state of the user's that a step works on."""

    @property
    def parameters(self) -> Sequence[TracedTensor]: ...
    @property
    def module_slots(self) -> Sequence[tuple[ModuleSlot, TracedTensor]]: ...


class FoundObjects(Protocol):
    """The user's objects that a step can reach."""

    @property
    def modules(self) -> Mapping[nn.Module, str]: ...
    @property
    def optimizers(self) -> Mapping[Optimizer, str]: ...
    @property
    def other_slots(self) -> Iterable[tuple[Tensor, Slot]]: ...
    @property
    def tensors(self) -> Mapping[int, tuple[Tensor, Slot]]: ...
