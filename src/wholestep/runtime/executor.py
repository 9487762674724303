"""Replay one captured graph: inputs in, graph, state changes out.

Where updates cross into the next iteration (`runtime.iterations`), a run leaves them behind, and takes up what the last
one left.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from wholestep.capture.captured import Captured, Change
from wholestep.cross_iteration.iterations import Iterations, Pending, iterations_of
from wholestep.cross_iteration.late_tensor import LateTensor
from wholestep.errors import LowerWarning
from wholestep.guards.all_guards import Guards
from wholestep.ir.reinplace import reinplace, reinplaced
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.user_objects.slots import BatchGradSlot, GradSlot, ModuleSlot, Slot, in_users_objects
from wholestep.lower.report import Lowering as LoweringReport
from wholestep.lower.report import found_lowering
from wholestep.lower.step import Lowering
from wholestep.remat.measure import bytes_at_most, held_bytes
from wholestep.runtime.attached import attach
from wholestep.runtime.gather import Gather
from wholestep.runtime.program import program
from wholestep.torch_private.autograd import below_autograd
from wholestep.torch_private.dtensor import dtensor_over, local_of
from wholestep.torch_private.modules_and_optimizers import mark_stepped

log = logging.getLogger("wholestep")


class Entry:
    """A captured graph that is ready to run."""

    def __init__(
        self,
        captured: Captured,
        lowering: Lowering | None = None,
        make_program: Callable[[fx.GraphModule], Callable[..., Any]] = program,
    ) -> None:
        """`lowering`: how to compile parts of the graph; None runs it operator by operator. `make_program`: another way
        to make a function of the graph in normal form."""
        self._make_program = make_program
        self.captured = captured
        self.step_graph = captured.step_graph
        self.gather = Gather(captured.inputs, captured.leaves, captured.world.optimizers)
        self.guards = Guards(captured, self.gather)
        if lowering is not None and lowering.compiles and not _can_be_read(captured, self.gather):
            lowering = None
        captured.release_batch()
        self.iterations = _iterations(captured)
        self.left: Pending | None = None
        """What the last run left for the next one."""
        self._measures = self.step_graph.memory is not None
        """Whether the next run is the one that tells how much memory it needs."""
        self._written: tuple[int, ...] = ()
        """Places of the inputs that compiled regions update without telling autograd."""
        self.executable = self._make_executable(lowering)
        self.guards.add_conditions_on_sizes()
        self._forward = self._make_forward(lowering)
        self._release = _releasable(captured)
        self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._results = captured.result_leaves
        self._rebuild = captured.rebuild_result
        self._changes = [c for c in captured.changes if c.kind is not ChangeKind.REMOVED or c not in self._release]
        late = () if self.iterations is None else self.iterations.late
        self._late = [c for c in self._changes if c.output in late]
        self._changes = [c for c in self._changes if c.output not in late or c.output is None]

    def _make_executable(self, lowering: Lowering | None) -> fx.GraphModule:
        compiles = lowering is not None and lowering.compiles
        once = runs_once(self.captured)
        if self.iterations is not None:
            if lowering is not None and compiles and not once:
                self.iterations.lower(lowering)
            return self.iterations.main
        lowered = lowering.step(self.step_graph, runs_once=once) if lowering is not None and compiles else None
        if lowering is None or lowered is None:
            return reinplaced(self.step_graph)
        self._written = lowering.written(self.step_graph, lowered)
        reinplace(lowered.graph)
        return lowered

    def _make_forward(self, lowering: Lowering | None) -> Callable[..., Any] | None:
        if self.iterations is not None:
            if self._make_program is not program:
                self.iterations.run_as(self._make_program)
            return None
        if self._make_program is not program:
            return self._make_program(self.step_graph.gm)  # as people read it, before updates are in place
        if lowering is not None and not runs_once(self.captured):
            batch = [i for i, spec in enumerate(self.step_graph.signature.inputs) if spec.kind is InputKind.BATCH]
            replayed = lowering.replayed(self.executable, batch, program)
            if replayed is not None:
                written = {write.target for write in self.step_graph.signature.write_backs}
                inputs = self.step_graph.signature.inputs
                self._written = tuple(i for i, spec in enumerate(inputs) if spec.name in written)
                return replayed
        return program(self.executable)

    def run(self, inputs: list[Any], leaves: list[Any], pending: Pending | None = None) -> Any:
        """Run the graph on gathered inputs and apply what it changes. `pending`: what the last run left."""
        for change in self._release:
            change.slot.remove()
        if pending is not None and pending.is_looked_at:
            self.complete(pending, current=False)
            pending = None
        with self._without_autocast() if self._autocast else below_autograd():
            if self._measures:
                outputs = self._measured_outputs(inputs, pending)
            else:
                outputs = self._outputs(inputs, pending)
        if self._written:
            increment_version([inputs[i] for i in self._written])
        del inputs
        for change in self._changes:
            _apply(change, outputs, leaves)
        if self.left is not None:
            for change in self._late:
                assert change.output is not None
                change.slot.set(self.left.stand_in(change.output, self._values[change.output]))
        for optimizer in self.captured.stepped:
            mark_stepped(optimizer)
        for call in self.captured.host_calls:
            call.scheduler.step(*call.args, **call.kwargs)
        results = [_result(kind, value, outputs) for kind, value in self._results]
        return results[0] if self._rebuild is None else self._rebuild(results)

    def complete(self, pending: Pending, *, current: bool = True) -> None:
        """Do what a run left. `current`: its gradients are still those of the parameters."""
        with self._without_autocast() if self._autocast else below_autograd():
            pending.complete()
        for change in self._late if current else ():
            if change.output in pending.late and isinstance(local_of(change.slot.get()), LateTensor):
                change.slot.set(pending.late[change.output])  # the user has not put something else there, or None

    def _measured_outputs(self, inputs: list[Any], pending: Pending | None) -> tuple[Any, ...]:
        """The first run of a graph with a memory budget tells what it needs."""
        report = self.step_graph.memory
        assert report is not None
        self._measures = False
        device = torch.device(report.device)
        held = held_bytes(inputs, device)
        outputs, most = bytes_at_most(lambda: self._outputs(inputs, pending), device)
        report.measured_peak = None if most is None else held + most
        found: tuple[Any, ...] = outputs
        return found

    def _outputs(self, inputs: list[Any], pending: Pending | None) -> tuple[Any, ...]:
        if self.iterations is None:
            assert self._forward is not None
            found: tuple[Any, ...] = self._forward(*inputs)
            return found
        self.left = None
        outputs, self.left = self.iterations.run(inputs, pending)
        return outputs

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), below_autograd():
            yield

    @property
    def lowering(self) -> LoweringReport | None:
        """What was compiled, and why the rest was not."""
        return found_lowering(self.executable)

    @cached_property
    def _values(self) -> list[Any]:
        """What the outputs of the graph look like."""
        results: Any = next(iter(reversed(self.step_graph.gm.graph.nodes))).args[0]
        return [value.meta.get("val") if isinstance(value, fx.Node) else value for value in results]

    def path(self, place: int) -> str:
        """What an input of the graph is called."""
        return self.captured.inputs[place].path

    @cached_property
    def owners(self) -> tuple[Any, ...]:
        """Modules that hold state which crosses, and the optimizers: what is asked for a state_dict."""
        places = () if self.iterations is None else self.iterations.state
        slots = [in_users_objects(self.captured.inputs[i]) for i in places]
        modules = dict.fromkeys(slot.module for slot in slots if isinstance(slot, ModuleSlot))
        return (*modules, *self.captured.world.optimizers)

    @cached_property
    def without_hooks(self) -> tuple[Slot, ...]:
        """Where state that crosses lies in objects that tell nobody when they are read: scalers, and gradients that
        are kept (those that are made anew are late outputs)."""
        places = () if self.iterations is None else self.iterations.state
        slots = [in_users_objects(self.captured.inputs[i]) for i in places]
        return tuple(slot for slot in slots if isinstance(slot, GradSlot) or slot.kind is InputKind.SCALER_STATE)

    @cached_property
    def modules(self) -> dict[int, Any]:
        """All modules that the step knows, by identity."""
        return {id(module): module for module, _ in self.captured.modules}


def _can_be_read(captured: Captured, gather: Gather) -> bool:
    """Whether the memory of all inputs is what compiled code takes it for: not that of `z.conj().imag`, which is read
    with the other sign. Guards tell such tensors from others."""
    values = gather.read(captured.leaves) or []
    negated = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.is_neg()]
    paths = [captured.inputs[i].path for i in negated]
    if paths:
        what = f"{paths[0]} is a negated view, which compiled code cannot read: the step runs operator by operator."
        warnings.warn(LowerWarning(f"{what} Give it {paths[0]}.resolve_neg()."), stacklevel=2)
    return not paths


def _iterations(captured: Captured) -> Iterations | None:
    if captured.items is not None:
        log.info("updates stay in their own iteration: whether the graph may run depends on the contents of state")
        return None
    return iterations_of(captured.step_graph)


def late_outputs_of(captured: Captured) -> tuple[int, ...]:
    """Outputs that only become gradients which the graph itself does not read: they may come late."""
    read = {id(slot.param) for slot in map(in_users_objects, captured.inputs) if isinstance(slot, GradSlot)}
    shown = {value[0] if kind == "sharded" else value for kind, value in captured.result_leaves if kind != "value"}
    users: dict[int, list[Change]] = {}
    for change in captured.changes:
        for output in {change.output, change.unless} - {None}:
            users.setdefault(output, []).append(change)  # type: ignore[arg-type]
    found = []
    for output, changes in users.items():
        slot = in_users_objects(changes[0].slot)
        plain = len(changes) == 1 and changes[0].unless is None and output not in shown
        if plain and isinstance(slot, GradSlot) and id(slot.param) not in read:
            found.append(output)
    return tuple(sorted(found))


def _result(kind: str, value: Any, outputs: tuple[Any, ...]) -> Any:
    if kind == "output":
        return outputs[value]
    if kind == "attached":
        return attach(outputs[value])
    if kind == "detached":
        found = outputs[value]  # `p.detach()` may come as the parameter itself, updated in place
        return found.detach() if found.requires_grad else found
    if kind == "sharded":
        return dtensor_over(outputs[value[0]], value[1])
    return value.read() if kind == "host" else value


def _apply(change: Change, outputs: tuple[Any, ...], leaves: list[Any]) -> None:
    if isinstance(change.slot, BatchGradSlot):
        assert change.output is not None
        leaves[change.slot.index].grad = outputs[change.output]
        return
    if change.unless is not None and bool(outputs[change.unless]):
        return
    if change.output is not None:
        change.slot.set(outputs[change.output])
    elif change.kind is ChangeKind.REMOVED:
        change.slot.remove()
    else:
        change.slot.set(change.constant)


def runs_once(captured: Captured) -> bool:
    """Whether the graph makes optimizer state that is there in the next call, which then has a graph of its own."""
    made = (change for change in captured.changes if change.kind is ChangeKind.CREATED)
    return any(change.slot.kind is InputKind.OPTIMIZER_STATE for change in made)


def _releasable(captured: Captured) -> list[Change]:
    """Gradients that eager drops or replaces before it needs the memory: dropped before the graph runs.

    Only where the graph does not read them and no condition can keep them.
    """
    read = {id(slot.param) for slot in map(in_users_objects, captured.inputs) if isinstance(slot, GradSlot)}
    found = []
    for change in captured.changes:
        slot = in_users_objects(change.slot)
        if isinstance(slot, GradSlot) and change.unless is None and id(slot.param) not in read:
            found.append(change)
    return found


__all__ = ["Entry", "Tensor"]
