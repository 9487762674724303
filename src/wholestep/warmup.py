"""`step.warmup(*args)`: capture and compile what the first calls need, without running anything.

    step.warmup(model, optimizer, batch)
        1  the graph of the first call                    creates optimizer state
        2  stand-ins for what that graph would create     empty tensors, not written; step counts as they would be
        3  the graph of the calls after it, compiled
        4  the stand-ins are removed

A stand-in decides nothing silently: the second graph has guards like any other, so if a later call finds something else
than the stand-ins promised (a branch on a value, say), it is captured as it would be without a warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep.cross_iteration import pending_updates
from wholestep.ir.captured_step import CapturedStep, Change
from wholestep.ir.effects import draws
from wholestep.ir.io.node_values import size_hint
from wholestep.ir.signature import ChangeKind
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.ir.user_objects.slots import ABSENT, BatchAttributeSlot, Slot
from wholestep.refused_steps import CannotCaptureError
from wholestep.step import Executable, StepCall, needs_eager
from wholestep.torch_private.modes import mode_that_needs_eager

_MOST_EVALUATED = 1000
"""Nodes behind the value of a single element, above which it is not computed."""


def warm_up(step: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Prepare a compiled step for a call and those after it. `fn`: its function."""
    mode = mode_that_needs_eager()
    if mode is not None:
        raise needs_eager(mode)
    call = StepCall(fn, args, kwargs, *leaves_of((args, kwargs)))
    pending_updates.suspend()
    try:
        step._take_plan(call)
        with state_after(_executable_for(step, call).captured):
            _executable_for(step, call)
    except CannotCaptureError as error:
        step._refusals.warn(step._name, step._calls, error.refusal)  # its calls will run as the plain function
    finally:
        pending_updates.resume()


def _executable_for(step: Any, call: StepCall) -> Executable:
    """The executable for a call, compiled if there is none; on several ranks, once all have one."""
    found = step._find(call.leaves, call.structure)
    if step._ranks is None:
        entry: Executable = (found or step._compile(call))[0]
    else:
        step._calls += 1
        entry = step._agree_on_executable(step._ranks, call, found)[0]
    return entry


@contextmanager
def state_after(captured: CapturedStep) -> Iterator[None]:
    """The user's objects as they would be after a run, as far as graphs depend on it: which gradients and which
    optimizer state there are. What is there already keeps its values. Everything is put back."""
    outputs = captured.step_graph.gm.graph.find_nodes(op="output")[0].args[0]
    states = [_StateBefore(optimizer) for optimizer in captured.stepped]
    before: list[tuple[Slot, Any]] = []
    try:
        for change in captured.changes:
            if change.deferred is None and change.unless is None and not isinstance(change.slot, BatchAttributeSlot):
                before.append((change.slot, change.slot.get()))
                _apply(change, outputs)
        yield
    finally:
        for slot, value in reversed(before):
            slot.remove() if value is ABSENT else slot.set(value)
        for state in states:
            state.restore()


def _apply(change: Change, outputs: Sequence[Any]) -> None:
    if change.output is not None:
        change.slot.set(_stand_in(outputs[change.output]))
    elif change.kind is ChangeKind.REMOVED:
        change.slot.remove()
    else:
        change.slot.set(change.constant)


def _stand_in(node: fx.Node) -> Tensor:
    """A tensor of the form of what a node computes; a single element has its value, if no input decides it."""
    fake = node.meta["val"]
    sizes, strides = ([size_hint(size) for size in each] for each in (fake.shape, fake.stride()))
    found = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
    if found.numel() == 1:
        value = _value_of(node)
        found.copy_(value) if value is not None else found.zero_()
    return found


def _value_of(node: fx.Node) -> Tensor | None:
    """What a node computes, if no input is behind it."""
    behind, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in behind:
                behind.add(source)
                todo.append(source)
    if len(behind) > _MOST_EVALUATED or any(each.op != "call_function" or draws(each) for each in behind):
        return None
    values: dict[fx.Node, Any] = {}
    for each in node.graph.nodes:
        if each in behind:
            args, kwargs = fx.node.map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = each.target(*args, **kwargs)
        if each is node:
            break
    found = values[node]
    return found if isinstance(found, Tensor) else None


class _StateBefore:
    """The entries of an optimizer's state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._entries = [
            (owner, entry, dict(entry) if isinstance(entry, dict) else None) for owner, entry in optimizer.state.items()
        ]

    def restore(self) -> None:
        """Remove entries that were added, and what was added to others."""
        state = self._optimizer.state
        known = {id(owner) for owner, _, _ in self._entries}
        for owner in [each for each in state if id(each) not in known]:
            del state[owner]
        for _, entry, contents in self._entries:
            if contents is not None and entry.keys() != contents.keys():
                entry.clear()
                entry.update(contents)
