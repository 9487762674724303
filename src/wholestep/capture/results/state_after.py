"""The user's objects as a run of a graph would leave them, while the next call is traced: nothing runs.

with state_after(captured):      gradients, optimizer state and containers as after the first call: empty tensors
    trace the next call          a warm-up keeps its graph
                                 a step that reads a list and makes it longer is refused before anything ran

def train_step(x):
    self.losses.append(loss)
    return sum(self.losses)      call 1: [] before it, as if the list were filled once; call 2: refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep.capture.effects.containers import GrowsEachCallError
from wholestep.capture.scalars.scalar_policy import quiet
from wholestep.ir.captured_step import CapturedStep, Change
from wholestep.ir.deferred import FilledLeaf, FreshContainer, ReplayedCall
from wholestep.ir.effects import draws
from wholestep.ir.io.node_values import size_hint
from wholestep.ir.signature import ChangeKind
from wholestep.ir.user_objects.plain_contents import assign_contents, copy_of
from wholestep.ir.user_objects.slots import ABSENT, BatchAttributeSlot, BatchSlot, SequenceSlot, Slot
from wholestep.torch_private.distributed import dtensor_over

_MOST_EVALUATED = 1000
"""Nodes behind the value of a single element, above which it is not computed."""


def refuse_what_grows(captured: CapturedStep, trace_next: Callable[[], object]) -> None:
    """Raise at the first call what the second would raise: a list that was empty, is read and grows in each call.

    One that is filled once (`if not self.cache: ...`) is found to be by the trace of the next call.
    """
    was_read_empty = any(each.keys is not None and not each.keys for each in captured.guards.written)
    if not was_read_empty and not any(map(_puts_new_container, captured.effects)):
        return
    error: GrowsEachCallError | None = None
    with state_after(captured), quiet():
        try:
            trace_next()
        except GrowsEachCallError as found:
            error = found
        except Exception:
            return  # of stand-ins that have no values, or an error that the next call raises itself
    if error is not None:
        raise error


def _puts_new_container(call: ReplayedCall) -> bool:
    """Whether a call puts a list or dict that the step made under a new key: the next call finds it there."""
    holder = getattr(call.function, "__self__", None)
    if not isinstance(holder, dict) or getattr(call.function, "__name__", "") != "__setitem__":
        return False
    key, value = call.args
    return isinstance(value, FreshContainer) and not isinstance(value.empty, tuple) and key not in holder


@contextmanager
def state_after(captured: CapturedStep) -> Iterator[None]:
    """The user's objects as they would be after a run, as far as graphs depend on it: which gradients and which
    optimizer state there are, and what lists and dicts hold. What is there already keeps its values. Everything is put
    back."""
    values = _Values(captured)
    states = [_StateBefore(optimizer) for optimizer in captured.stepped]
    contents = [(each.container, copy_of(each.container)) for each in captured.guards.written]
    before: list[tuple[Slot, Any]] = []
    try:
        for change in captured.changes:
            if change.deferred is None and change.unless is None and not isinstance(change.slot, BatchAttributeSlot):
                held = _held(change.slot)
                if held is not ABSENT or not isinstance(change.slot, SequenceSlot):
                    before.append((change.slot, held))
                    _apply(change, values)
        _write(captured, values)
        yield
    finally:
        for container, held in contents:
            assign_contents(container, held)
        for slot, value in reversed(before):
            slot.remove() if value is ABSENT else slot.set(value)
        for state in states:
            state.restore()


def _held(slot: Slot) -> Any:
    try:
        return slot.get()
    except ValueError:  # a variable that is not bound yet
        return ABSENT


def _apply(change: Change, values: _Values) -> None:
    if change.output is not None:
        change.slot.set(values.of_output(change.output))
    elif change.kind is ChangeKind.REMOVED:
        change.slot.remove()
    else:
        change.slot.set(change.constant)


def _write(captured: CapturedStep, values: _Values) -> None:
    """Make the calls that write into lists and dicts."""
    written = {id(each.container) for each in captured.guards.written}
    made: dict[int, Any] = {}
    for call in captured.effects:
        if id(getattr(call.function, "__self__", None)) in written:
            call.make(values.of_leaf, made)


class _Values:
    """What stands for the values of a run."""

    def __init__(self, captured: CapturedStep) -> None:
        graph = captured.step_graph.gm.graph
        self._outputs: Sequence[Any] = graph.find_nodes(op="output")[0].args[0]
        self._slots = dict(zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True))

    def of_output(self, number: int) -> Any:
        """The user's tensor, where the graph returns one that it was given; otherwise an empty one."""
        node = self._outputs[number]
        if not isinstance(node, fx.Node):
            return node
        source = node.args[0] if node.target is torch.ops.aten.copy_.default else node
        slot = self._slots.get(source) if isinstance(source, fx.Node) else None
        return _stand_in(node) if slot is None or isinstance(slot, BatchSlot) else slot.get()

    def of_leaf(self, leaf: FilledLeaf) -> Any:
        """What a list or dict is given."""
        if leaf.kind == "deferred":
            return leaf.value.trial
        if leaf.kind == "sharded":
            return dtensor_over(self.of_output(leaf.value[0]), leaf.value[1])
        return leaf.value if leaf.kind == "value" else self.of_output(leaf.value)


def _stand_in(node: fx.Node) -> Any:
    """A tensor of the form of what a node computes; a single element has its value, if no input decides it."""
    fake = node.meta["val"]
    if not isinstance(fake, Tensor):
        return fake if isinstance(fake, int | float) else size_hint(fake)
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
    """The entries of an optimizer's state, and its param groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._entries = [
            (owner, entry, dict(entry) if isinstance(entry, dict) else None) for owner, entry in optimizer.state.items()
        ]
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Remove entries that were added, and what was added to others; options are the same objects as before."""
        for group, options in self._groups:
            if len(group) != len(options) or any(group.get(name) is not value for name, value in options.items()):
                group.clear()
                group.update(options)
        state = self._optimizer.state
        known = {id(owner) for owner, _, _ in self._entries}
        for owner in [each for each in state if id(each) not in known]:
            del state[owner]
        for _, entry, contents in self._entries:
            if contents is not None and entry.keys() != contents.keys():
                entry.clear()
                entry.update(contents)
