"""What a captured graph assumed of the user's objects, as data: `guards/` builds its checks from it.

Specs hold the user's objects and the values that those had at capture, never the batch of that call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from wholestep.ir.dynamic_sizes import DynamicSizes
from wholestep.ir.known_values import Recipe
from wholestep.ir.user_objects.slots import BatchSlot, ModuleSlot, Slot


@dataclass(frozen=True)
class ArgumentSpec:
    """The arguments of a call."""

    structure: Any
    """Equal for arguments that are nested alike."""
    paths: Sequence[str]
    """What each leaf is called."""
    slots: Sequence[Slot | None]
    """By leaf, where a tensor was found first: among the arguments, or in the user's objects. None: no tensor."""
    constants: Mapping[int, Any]
    """Non-tensor leaves that the graph assumes."""

    @property
    def found_elsewhere(self) -> list[tuple[int, Slot]]:
        """Tensors among the arguments that are state of the user's objects as well."""
        return [(i, s) for i, s in enumerate(self.slots) if s is not None and not isinstance(s, BatchSlot)]


@dataclass(frozen=True)
class ParamGroupSpec:
    """A param group: its parameters, and the options that are constants of the graph."""

    params: Sequence[Tensor]
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class ScalarCondition:
    """The graph is right only while an expression of scalar inputs has one value."""

    text: str
    leaves: Sequence[Any]
    """Slots, and items of tensors (`ItemLeaf`), that the expression is computed from."""
    holds: Callable[[Callable[[Any], Any], dict[int, Any]], bool]
    """Takes what gives the value of a leaf, and a memo that conditions share."""


@dataclass(frozen=True, eq=False)
class ObjectLink:
    """One step from an object to another, by which an object that the step calls is reached."""

    parent: Any
    child: Any
    path: str
    """Of the child."""
    read: Callable[[], Any] | None
    """What the link leads to now; None where it has no name (an iterator's list)."""

    def holds(self) -> bool:
        """Whether the link still leads to the same object."""
        if self.read is None:
            return any(found is self.child for found in gc.get_referents(self.parent))
        try:
            return self.read() is self.child
        except (AttributeError, KeyError, IndexError, ValueError, TypeError):
            return False


@dataclass(frozen=True, eq=False)
class TensorAttributesSpec:
    """Python attributes that user code put on one tensor."""

    slot: Slot
    real: Tensor | None
    """None for a tensor of the batch."""
    before: Mapping[str, Any]
    set_by_step: frozenset[str]
    """Attributes whose value the step sets or that are inputs: only their type is under a guard."""


class FileRead(Protocol):
    """A file as the step read it."""

    path: str

    def is_same(self) -> bool:
        """Whether it still is."""


@dataclass(frozen=True)
class GuardSpecs:
    """All assumptions of one captured graph."""

    arguments: ArgumentSpec
    sizes: DynamicSizes = field(default_factory=DynamicSizes)
    modules: Sequence[tuple[nn.Module, str]] = ()
    parameters: Sequence[tuple[Tensor, Slot]] = ()
    module_tensors: Sequence[tuple[ModuleSlot, Tensor]] = ()
    """Parameters and buffers by the places in modules where they lie."""
    loose_parameters: Sequence[tuple[Slot, Tensor]] = ()
    """Parameters that lie outside of modules (in a list, in a param group)."""
    optimizers: Mapping[Optimizer, str] = field(default_factory=dict)
    param_groups: Mapping[Optimizer, Sequence[ParamGroupSpec]] = field(default_factory=dict)
    scalers: Mapping[Any, str] = field(default_factory=dict)
    nested_state: Sequence[tuple[Slot, Any]] = ()
    """Lists and dicts in optimizer state, and their structure."""
    same_tensors: Sequence[tuple[Slot, Slot]] = ()
    """Places in optimizer state that hold one tensor."""
    tensor_attributes: Sequence[TensorAttributesSpec] = ()
    variables: Sequence[tuple[str, Slot, Any]] = ()
    """Closure variables, globals, class attributes: path, place, value."""
    rebound_variables: Mapping[str, tuple[Slot, Any]] = field(default_factory=dict)
    """Variables that the step itself binds anew, and what kind of value they held."""
    volatile: Mapping[int, set[str]] = field(default_factory=dict)
    """By identity of an object, the attributes that the step itself sets."""
    kinds: Sequence[tuple[Mapping[str, Any], str, str, Any]] = ()
    """Attributes that the step sets and may have read: where they are, and what kind of value they held."""
    reads: Sequence[tuple[Any, str, Mapping[str, Any]]] = ()
    """Plain objects, their paths, and the attributes that the step read with the values they had."""
    class_reads: Sequence[tuple[Any, str, Mapping[str, Any]]] = ()
    """The same for plain values that the step read from the classes of such objects."""
    containers: Sequence[tuple[Any, str]] = ()
    """Lists and dicts that the step may have read."""
    arrays: Sequence[tuple[Any, str]] = ()
    """NumPy arrays and the like that the step may have read."""
    links: Sequence[ObjectLink] = ()
    classes: Mapping[type, str] = field(default_factory=dict)
    classes_set_by_step: frozenset[type] = frozenset()
    functions: Sequence[tuple[FunctionType, str, frozenset[str]]] = ()
    """Functions of the user's, and the names of their attributes."""
    thread_locals: Sequence[tuple[Any, str]] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    whole_environment: Mapping[Any, Any] | None = None
    files: Sequence[FileRead] = ()
    lifted: frozenset[str] = frozenset()
    """Paths of the scalars that are inputs because they changed between two calls."""
    scalar_types: Sequence[tuple[Slot, type]] = ()
    """Where those scalars lie, and of which type they are."""
    conditions: Sequence[ScalarCondition] = ()
    items: Recipe | None = None
    """Computes the scalars inside of state tensors that conditions depend on."""
    placeholder_slots: Mapping[fx.Node, Slot] = field(default_factory=dict)


def constants_of(specs: GuardSpecs) -> Iterable[tuple[str, Any]]:
    """Plain values that the graph assumes, by path: arguments, variables, attributes."""
    for i, value in specs.arguments.constants.items():
        yield specs.arguments.paths[i], value
    for path, _, value in specs.variables:
        yield path, value
    for _, path, values in (*specs.reads, *specs.class_reads):
        for name, value in values.items():
            yield f"{path}.{name}", value
