"""Replay a graph whose updates cross into the next iteration: a run leaves them pending, and takes up what the last one
left."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import fx

from wholestep.cross_iteration.iterations import Iterations, Pending
from wholestep.cross_iteration.late_tensor import LateTensor
from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.signature import InputKind
from wholestep.ir.step_graph import MemoryReport
from wholestep.ir.user_objects.slots import GradSlot, ModuleSlot, Slot, in_users_objects
from wholestep.runtime.executor import Executor
from wholestep.torch_private.dtensor import local_of


class CrossingExecutor(Executor):
    """Runs the setup graph first, and the main graph while updates are pending."""

    def __init__(self, captured: CapturedStep, iterations: Iterations, memory: MemoryReport | None = None) -> None:
        super().__init__(captured, iterations.main, self._iterate, memory=memory)
        self.iterations = iterations
        self.left: Pending | None = None
        """What the last run left for the next one."""
        self._taken: Pending | None = None
        """What the run under way takes up."""
        late = iterations.late
        self._late = [c for c in self._changes if c.output in late]
        self._changes = [c for c in self._changes if c.output not in late or c.output is None]

    def run(self, inputs: list[Any], leaves: list[Any], pending: Pending | None = None) -> Any:
        """Run one iteration. `pending`: what the last one left."""
        if pending is not None and pending.is_looked_at:
            for change in self._release:
                change.slot.remove()
            self.complete(pending, current=False)
            pending = None
        self._taken = pending
        try:
            result = super().run(inputs, leaves)
        finally:
            self._taken = None
        return result

    def _iterate(self, *inputs: Any) -> tuple[Any, ...]:
        self.left = None
        outputs, self.left = self.iterations.run(list(inputs), self._taken)
        return outputs

    def _apply_changes(self, outputs: tuple[Any, ...], leaves: list[Any]) -> None:
        super()._apply_changes(outputs, leaves)
        for change in self._late:
            assert change.output is not None
            assert self.left is not None
            change.slot.set(self.left.stand_in(change.output, self._values[change.output]))

    def complete(self, pending: Pending, *, current: bool = True) -> None:
        """Do what a run left. `current`: its gradients are still those of the parameters."""
        with self._mode():
            pending.complete()
        for change in self._late if current else ():
            if change.output in pending.late and isinstance(local_of(change.slot.get()), LateTensor):
                change.slot.set(pending.late[change.output])  # the user has not put something else there, or None

    @cached_property
    def _values(self) -> list[Any]:
        """The metadata of the graph's outputs."""
        results: Any = next(iter(reversed(self.captured.step_graph.gm.graph.nodes))).args[0]
        return [value.meta.get("val") if isinstance(value, fx.Node) else value for value in results]

    @cached_property
    def _state_slots(self) -> list[Slot]:
        """Where state lies whose update crosses."""
        return [in_users_objects(self.captured.inputs[i]) for i in self.iterations.state]

    @cached_property
    def owners(self) -> tuple[Any, ...]:
        """Modules that hold state which crosses, and the optimizers: what is asked for a state_dict."""
        modules = dict.fromkeys(slot.module for slot in self._state_slots if isinstance(slot, ModuleSlot))
        return (*modules, *self.captured.guards.optimizers)

    @cached_property
    def without_hooks(self) -> tuple[Slot, ...]:
        """Where state that crosses lies in objects that have no hook for reads: scalers, and gradients that are read
        by the graph (those that are made anew are late outputs)."""
        scaler = InputKind.SCALER_STATE
        return tuple(slot for slot in self._state_slots if isinstance(slot, GradSlot) or slot.kind is scaler)

    @cached_property
    def modules(self) -> dict[int, Any]:
        """All modules that the step knows, by identity."""
        return {id(module): module for module, _ in self.captured.guards.modules}
