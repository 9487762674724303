"""What leaves capture: the graph of a step, and how its inputs, state and results are found in the user's objects.

Frozen data. `guards/` decides from it whether the graph may run, `runtime/` reads inputs and applies changes by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from wholestep.ir.guard_specs import GuardSpecs
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.slots import GradSlot, Slot, in_users_objects


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


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """One captured call of a step."""

    step_graph: StepGraph
    inputs: Sequence[Slot]
    """One per placeholder."""
    changes: Sequence[Change]
    result_leaves: Sequence[tuple[str, Any]]
    """Leaves of the user's result: ("output", i), ("attached", i) for one that requires grad in
    eager, ("detached", i) for one that does not, ("value", object) or ("host", number)."""
    rebuild_result: Callable[[list[Any]], Any] | None
    """None where the result is a single leaf."""
    host_calls: Sequence[HostCall]
    stepped: Sequence[Optimizer]
    """Optimizers whose step() is in the graph."""
    guards: GuardSpecs
    compare_scalars: bool = False
    """Whether code that is not torch's may have told scalar inputs from plain numbers: a second trace has to agree."""
    seconds: float = 0.0

    @property
    def runs_once(self) -> bool:
        """Whether the graph makes optimizer state that is there in the next call, which then has its own graph."""
        made = (change for change in self.changes if change.kind is ChangeKind.CREATED)
        return any(change.slot.kind is InputKind.OPTIMIZER_STATE for change in made)

    def unread_gradients(self) -> list[Change]:
        """Changes of gradients that the graph does not read and that no condition can prevent."""
        read = {id(slot.param) for slot in map(in_users_objects, self.inputs) if isinstance(slot, GradSlot)}
        found = []
        for change in self.changes:
            slot = in_users_objects(change.slot)
            if isinstance(slot, GradSlot) and change.unless is None and id(slot.param) not in read:
                found.append(change)
        return found

    def late_outputs(self) -> tuple[int, ...]:
        """Outputs that only become gradients which the graph itself does not read: they may come late."""
        shown = {value[0] if kind == "sharded" else value for kind, value in self.result_leaves if kind != "value"}
        users: dict[int, list[Change]] = {}
        for change in self.changes:
            for output in {change.output, change.unless} - {None}:
                users.setdefault(output, []).append(change)  # type: ignore[arg-type]
        unread = set(map(id, self.unread_gradients()))
        alone = (output for output, changes in users.items() if len(changes) == 1 and id(changes[0]) in unread)
        return tuple(sorted(output for output in alone if output not in shown))
