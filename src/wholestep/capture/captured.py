"""What a trace hands to the runtime: the StepGraph, and the slots of the user's objects that go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.capture.graph.dynamic_shapes import Shapes
from wholestep.capture.graph.known_values import Recipe
from wholestep.capture.objects.reachable import Link
from wholestep.capture.objects.swapped_state import StateTable
from wholestep.capture.python_reads.outside_reads import OutsideReads
from wholestep.capture.scalars.scalars import ScalarGuard
from wholestep.ir.signature import ChangeKind
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.slots import BatchSlot, Slot

if TYPE_CHECKING:
    from wholestep.capture.objects.discover import World
    from wholestep.capture.objects.tensor_attributes import OwnAttributes


@dataclass(frozen=True)
class HostCall:
    """`scheduler.step()` inside of the step: Python that the runtime repeats after the graph."""

    scheduler: Any
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Change:
    """A slot that is created, rebound, removed or set to a constant after the graph ran."""

    kind: ChangeKind
    slot: Slot
    output: int | None = None
    constant: Any = None
    unless: int | None = None


@dataclass
class Captured:
    """Everything the runtime needs to replay a step."""

    step_graph: StepGraph
    inputs: list[Slot]
    """One per placeholder."""
    changes: list[Change]
    result_leaves: list[tuple[str, Any]]
    """Leaves of the user's result: ("output", i), ("attached", i) for one that requires grad in
    eager, ("detached", i) for one that does not, ("value", object) or ("host", number)."""
    rebuild_result: Callable[[list[Any]], Any] | None
    """None where the result is a single leaf."""
    host_calls: list[HostCall]
    stepped: list[Optimizer]
    """Optimizers whose step() is in the graph."""
    world: World
    table: StateTable
    shapes: Shapes
    scalar_guards: list[ScalarGuard]
    items: Recipe | None
    """Computes the numbers inside of state tensors that the guards look at."""
    placeholder_slots: dict[Any, Slot]
    dynamic_dims: dict[int, dict[int, Any]]
    leaf_paths: list[str]
    leaves: list[Any]
    structure: Any
    volatile: dict[int, set[str]] = field(default_factory=dict)
    """By identity of an object, the attributes that the step itself sets."""
    rebound_variables: dict[str, tuple[Slot, Any]] = field(default_factory=dict)
    """Closure variables and globals that the step itself binds anew, and what kind of thing they held."""
    kinds: list[tuple[dict[str, Any], str, str, Any]] = field(default_factory=list)
    """Attributes that the step sets and may have read: where they are, and what kind of thing they held."""
    reads: list[tuple[Any, str, dict[str, Any]]] = field(default_factory=list)
    """Plain objects, their paths, and the attributes that the step read with the values they had."""
    class_reads: list[tuple[Any, str, dict[str, Any]]] = field(default_factory=list)
    """The same for plain values that the step read from the classes of such objects."""
    containers: list[tuple[Any, str]] = field(default_factory=list)
    """Lists and dicts that the step may have read."""
    arrays: list[tuple[Any, str]] = field(default_factory=list)
    """NumPy arrays and the like that the step may have read."""
    links: list[Link] = field(default_factory=list)
    """By which the objects that the step calls are reached."""
    modules: list[tuple[nn.Module, str]] = field(default_factory=list)
    lifted: frozenset[str] = frozenset()
    """Paths of the numbers that are inputs because they changed between two calls."""
    number_types: list[tuple[Slot, type]] = field(default_factory=list)
    """Where those numbers lie, and of which type they are."""
    compare_numbers: bool = False
    """Whether code that is not torch's may have told graph numbers from plain ones."""
    outside: OutsideReads = field(default_factory=OutsideReads)
    """Environment variables and files that the step read."""
    erased: list[Any] = field(default_factory=list)
    """Nodes of the trace that are not in the graph: nothing needs them."""
    tensor_attributes: Iterable[OwnAttributes] = ()
    """Python attributes on the user's tensors."""
    seconds: float = 0.0

    def release_batch(self) -> None:
        """Let go of the arguments of the captured call; their shapes are in the guards."""
        self.leaves[:] = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.table.release(BatchSlot)
