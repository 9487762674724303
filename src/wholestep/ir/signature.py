"""What every input and output of a StepGraph is: the typed side of the graph.

    inputs        one per placeholder, in order; each says what it is and where the user finds it
    outputs       one per value of the output node: a leaf of the user's result or a piece of new state
    write_backs   the epilogue: `copy_(placeholder, value)` nodes that update state in place
    state_changes state that a step creates, rebinds to another tensor, removes, or sets to a Python constant
    groups        the process groups that the graph's collectives name, in the order in which they first appear

Paths are written the way a person would reach the value: `model.fc.weight`, `model.fc.weight.grad`,
`optimizer.state[model.fc.weight].exp_avg`, `optimizer.param_groups[0].lr`, `batch['x']`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class InputKind(StrEnum):
    """What a graph input is to the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    SCALER_STATE = "scaler_state"
    HYPER_PARAMETER = "hyper_parameter"
    RNG_STATE = "rng_state"
    BATCH = "batch"
    CAPTURED = "captured"
    """A tensor that the step reaches through a closure, a global or an attribute."""


class OutputKind(StrEnum):
    """What a graph output is to the user."""

    RESULT = "result"
    """A tensor leaf of what the step returns."""
    STATE = "state"
    """A tensor that some state slot is rebound to."""
    LOGGED = "logged"
    """A tensor whose value the step's Python took (`loss.item()`): it is read after the graph ran."""
    PREDICATE = "predicate"
    """A flag that tells the runtime whether conditional state changes apply (a skipped optimizer step)."""


class ChangeKind(StrEnum):
    """How a state slot changes other than by writing into its tensor."""

    CREATED = "created"
    REBOUND = "rebound"
    REMOVED = "removed"
    CONSTANT = "constant"
    """The slot takes a Python value (a number, a string, None) that is the same on every replay of this graph."""


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of a tensor input or output; dimensions that are symbolic are strings such as `s0`."""

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: str
    device: str
    requires_grad: bool = False


@dataclass(frozen=True)
class InputSpec:
    """One placeholder. `tensor` is None for numbers and generators; `of` is the parameter a state belongs to."""

    name: str
    kind: InputKind
    path: str
    tensor: TensorSpec | None = None
    of: str | None = None
    placement: str = ""
    """For a part of a sharded tensor: what the whole is and how it lies on the mesh, `S(0) of [16, 8] over dp=2`."""


@dataclass(frozen=True)
class OutputSpec:
    """One value of the output node."""

    kind: OutputKind
    path: str
    tensor: TensorSpec | None = None


@dataclass(frozen=True)
class WriteBack:
    """The epilogue writes the value of node `value` into placeholder `target`."""

    target: str
    value: str


@dataclass(frozen=True)
class StateChange:
    """After the graph ran, slot `path` is bound to output `output` (or to `constant`, or removed).

    `unless` names an output (a predicate): where that is true, the change does not happen.
    """

    kind: ChangeKind
    slot: InputKind
    path: str
    output: int | None = None
    constant: int | float | str | bool | None = None
    unless: int | None = None
    of: str | None = None


@dataclass(frozen=True)
class GroupSpec:
    """A process group: its name in this process, the mesh axis that it belongs to ("" if unknown) and its size (0)."""

    name: str
    axis: str = ""
    size: int = 0


@dataclass(frozen=True)
class Signature:
    """Inputs, outputs and effects of a StepGraph. `result` is the user's return value with leaves
    `{"output": i}` for tensors and `{"value": v}` for everything else (see `ir.result_tree`)."""

    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[OutputSpec, ...] = ()
    write_backs: tuple[WriteBack, ...] = ()
    state_changes: tuple[StateChange, ...] = ()
    result: object = None
    guards: tuple[str, ...] = ()
    """The conditions under which this graph may run, as text for people."""
    host_calls: tuple[str, ...] = ()
    """Python calls (LR schedulers) that the runtime repeats around the graph."""
    dynamic: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Range of each symbolic dimension."""
    rng: tuple[str, ...] = ()
    """Devices whose default generator the graph draws from: its state is an input and an output that no node names.
    Generators that the step names are inputs of kind `rng_state`."""
    groups: tuple[GroupSpec, ...] = ()
    """Names differ from rank to rank; axis and size say which group is meant (`ir.groups`)."""

    @property
    def creates_optimizer_state(self) -> bool:
        """Whether this is a first step: its graph gives state that an optimizer did not have."""
        return any(
            change.kind is ChangeKind.CREATED and change.slot is InputKind.OPTIMIZER_STATE
            for change in self.state_changes
        )

    def of_kind(self, kind: InputKind) -> Iterator[InputSpec]:
        """The inputs of one kind, in order."""
        return (spec for spec in self.inputs if spec.kind is kind)

    def input(self, name: str) -> InputSpec:
        """The input with that placeholder name."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise KeyError(name)
