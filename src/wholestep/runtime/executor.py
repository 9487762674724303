"""Replay one captured graph: inputs in, graph, state changes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from wholestep._torch_compat import below_autograd, dtensor_over, mark_stepped
from wholestep.capture.captured import Captured, Change
from wholestep.capture.slots import BatchGradSlot, GradSlot, in_users_objects
from wholestep.ir.signature import ChangeKind
from wholestep.passes.reinplace import reinplaced
from wholestep.runtime.attached import attach
from wholestep.runtime.gather import Gather
from wholestep.runtime.guards import Guards
from wholestep.runtime.program import program


class Entry:
    """A captured graph that is ready to run."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.step_graph = captured.step_graph
        self.gather = Gather(captured.inputs, captured.leaves, captured.world.optimizers)
        self.guards = Guards(captured, self.gather)
        captured.release_batch()
        self.executable: fx.GraphModule = reinplaced(captured.step_graph)
        self._forward = program(self.executable)
        self._release = _releasable(captured)
        self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._results = captured.result_leaves
        self._rebuild = captured.rebuild_result
        self._changes = [c for c in captured.changes if c.kind is not ChangeKind.REMOVED or c not in self._release]

    def run(self, inputs: list[Any], leaves: list[Any]) -> Any:
        """Run the graph on gathered inputs and apply what it changes."""
        for change in self._release:
            change.slot.remove()
        if self._autocast:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), below_autograd():
                outputs = self._forward(*inputs)
        else:
            with below_autograd():
                outputs = self._forward(*inputs)
        del inputs
        for change in self._changes:
            _apply(change, outputs, leaves)
        for optimizer in self.captured.stepped:
            mark_stepped(optimizer)
        for call in self.captured.host_calls:
            call.scheduler.step(*call.args, **call.kwargs)
        results = [_result(kind, value, outputs) for kind, value in self._results]
        return results[0] if self._rebuild is None else self._rebuild(results)


def _result(kind: str, value: Any, outputs: tuple[Any, ...]) -> Any:
    if kind == "output":
        return outputs[value]
    if kind == "attached":
        return attach(outputs[value])
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
