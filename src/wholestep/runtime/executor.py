"""Run a prepared graph: `Gather` reads inputs, `Executor` runs, applies changes, returns results without a backward.

`Gather` reads in one pass over the slots, grouped by their type.

A replay records no autograd graph. If a result that has one in eager were returned as a plain tensor, gradients would
silently stop there: `head(step(x)).sum().backward()` would leave the step's parameters without any. So such a result
requires grad, as in eager, and its backward raises (`attach`). torch's C++ node for this costs 19 us a step (a Python
node 75), and can only raise RuntimeError; its text is that of NoGraphError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from wholestep.errors import AssumedError, DataShapeError, NoGraphError
from wholestep.ir.captured_step import CapturedStep, Change
from wholestep.ir.deferred import DeferredValues
from wholestep.ir.graph_functions import CHECKS, get_rng_state, set_rng_state
from wholestep.ir.signature import ChangeKind
from wholestep.ir.step_graph import MemoryReport
from wholestep.ir.user_objects.slots import (
    ABSENT,
    BatchAttributeSlot,
    BatchSlot,
    ComputedSlot,
    GradSlot,
    LocalSlot,
    MappingSlot,
    ModuleSlot,
    OptimizerStateSlot,
    Slot,
    value_in,
)
from wholestep.remat.measure import bytes_at_most, held_bytes
from wholestep.torch_private.autograd import below_autograd, error_in_backward
from wholestep.torch_private.distributed import dtensor_over, local_of
from wholestep.torch_private.guard_checks import DictWatch
from wholestep.torch_private.modules_and_optimizers import mark_stepped

_EMPTY: dict[Any, Any] = {}


def picker(positions: list[int]) -> Callable[[list[Any]], list[Any]]:
    """A function from a list to its values at some positions."""
    if len(positions) < 2:
        return lambda values: [values[i] for i in positions]
    pick = itemgetter(*positions)
    return lambda values: list(pick(values))


class Gather:
    """Reads all inputs of one graph, in the order of its placeholders.

    Values that lie in dicts (parameters, buffers, optimizer state) are cached until one of the dicts is written.
    """

    def __init__(self, slots: Sequence[Slot], leaves: list[Any], optimizers: Iterable[Any] = ()) -> None:
        self.slots = slots
        held = [value_in(slot, leaves) for slot in slots]
        self.tensor_positions = [i for i, value in enumerate(held) if isinstance(value, Tensor)]
        self.tensor_slots = [slots[i] for i in self.tensor_positions]
        self._pick_tensors = picker(self.tensor_positions)
        self._size = len(slots)
        self._modules = [(i, s.mapping, s.key) for i, s in enumerate(slots) if isinstance(s, ModuleSlot)]
        self._mapping = [
            (i, s.mapping, s.key)
            for i, s in enumerate(slots)
            if isinstance(s, MappingSlot) and not isinstance(s, ModuleSlot)
        ]
        self._grads = [(i, s.param) for i, s in enumerate(slots) if isinstance(s, GradSlot)]
        self._batch = [(i, s.index) for i, s in enumerate(slots) if isinstance(s, BatchSlot)]
        by_optimizer: dict[Any, list[tuple[int, Any, Any]]] = {optimizer: [] for optimizer in optimizers}
        for i, s in enumerate(slots):
            if isinstance(s, OptimizerStateSlot):
                by_optimizer.setdefault(s.optimizer, []).append((i, s.param, s.key))
        self._states = list(by_optimizer.items())
        self._state_dicts: list[Any] = []
        self._watch: DictWatch | None = None
        self._cached: list[Any] | None = None
        self.version = 0
        """Increases when the dicts are read again: for the same version, the cached objects are the same."""
        self._local = [
            (i, s, s.inner)
            for i, s in enumerate(slots)
            if isinstance(s, LocalSlot) and isinstance(s.inner, ModuleSlot | OptimizerStateSlot)
        ]
        self._locals: list[tuple[Any, Any]] = []
        """DTensors in these dicts, each with its local shard."""
        fast = MappingSlot | GradSlot | BatchSlot | OptimizerStateSlot | ComputedSlot
        cached = {i for i, _, _ in self._local}
        self._others = [(i, s) for i, s in enumerate(slots) if not isinstance(s, fast) and i not in cached]
        self._computed = [(i, s) for i, s in enumerate(slots) if isinstance(s, ComputedSlot)]

    def read(self, leaves: list[Any]) -> list[Any] | None:
        """The current inputs; None if one no longer exists."""
        try:
            if self._cached is None or not self._same_dicts():
                self._read_dicts()
            assert self._cached is not None
            values = self._cached.copy()
            for i, mapping, key in self._mapping:
                values[i] = mapping[key]
            for i, index in self._batch:
                values[i] = leaves[index]
            for i, param in self._grads:
                values[i] = param.grad
        except (KeyError, IndexError):
            return None
        for i, slot in self._others:
            value = slot.get()
            if value is ABSENT:
                return None
            values[i] = value
        for i, slot in self._computed:
            value = value_in(slot, leaves)
            if value is ABSENT:
                return None
            values[i] = value
        return values

    def _same_dicts(self) -> bool:
        same = all(o.state is held for (o, _), held in zip(self._states, self._state_dicts, strict=True))
        same = same and all(local_of(whole) is local for whole, local in self._locals)
        return same and self._watch is not None and self._watch.unchanged()

    def _read_dicts(self) -> None:
        self.version += 1
        self._cached = None
        values: list[Any] = [None] * self._size
        dicts: dict[int, Any] = {}
        for i, mapping, key in self._modules:
            values[i] = mapping[key]
            dicts[id(mapping)] = mapping
        self._state_dicts = [optimizer.state for optimizer, _ in self._states]
        for (_, entries), state in zip(self._states, self._state_dicts, strict=True):
            for i, param, key in entries:
                values[i] = state.get(param, _EMPTY)[key]
            dicts |= {id(d): d for d in (state, *state.values())}
        self._locals = []
        for i, slot, inner in self._local:
            whole, local = inner.get(), slot.get()
            if local is ABSENT:
                raise KeyError(slot.path)
            values[i] = local
            self._locals.append((whole, local))
            if isinstance(inner, ModuleSlot):
                dicts[id(inner.mapping)] = inner.mapping
        plain = all(isinstance(d, dict) for d in dicts.values())
        self._watch = DictWatch(list(dicts.values())) if plain else None
        self._cached = values

    def tensors(self, values: list[Any]) -> list[Any]:
        """The inputs that were tensors at capture."""
        return self._pick_tensors(values)


class Executor:
    """Runs a finished graph: lowered or not, with in-place updates."""

    def __init__(
        self,
        captured: CapturedStep,
        executable: fx.GraphModule,
        forward: Callable[..., Any],
        unversioned: Sequence[int] = (),
        memory: MemoryReport | None = None,
    ) -> None:
        """`forward`: the function of `executable`. `unversioned`: inputs that it writes without raising their version
        counters. `memory`: the report of a memory budget, to which the first run adds the measured peak."""
        self.captured = captured
        self.executable = executable
        self._forward = forward
        self._unversioned = unversioned
        self._report = memory
        self._measure_next = self._report is not None
        """Whether to measure the memory of the next run."""
        self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._release = captured.unread_gradients()
        """Gradients that eager frees or replaces early in the step: they are freed before the graph runs."""
        self._checks = any(node.target in CHECKS for node in captured.step_graph.gm.graph.nodes)
        """Whether a run may raise before it writes anything."""
        released = set(map(id, self._release))
        changes = [c for c in captured.changes if c.kind is not ChangeKind.REMOVED or id(c) not in released]
        early = [c for c in changes if not c.is_late]
        self._changes = sorted(early, key=lambda c: c.deferred is not None)
        """Applied before the calls that follow the graph; first those that read no scalars from tensors."""
        self._late_changes = [c for c in changes if c.is_late]
        """Changes by scalars that are known only after the graph and the calls that follow it ran."""
        self._effects = captured.effects

    @contextmanager
    def running(self, forward: Callable[..., tuple[Any, ...]]) -> Iterator[None]:
        """Runs inside of this call `forward` in place of the function of `executable`."""
        own = self._forward
        self._forward = forward
        try:
            yield
        finally:
            self._forward = own

    def run(self, inputs: list[Any], leaves: list[Any]) -> Any:
        """Run the graph on gathered inputs and apply what it changes."""
        before = StateBefore(self._release, inputs, self.captured.step_graph.signature.rng) if self._checks else None
        for change in self._release:
            change.slot.remove()
        deferred = DeferredValues(self.captured.deferred, leaves)
        try:
            with self._mode():
                outputs = self._measured(inputs) if self._measure_next else self._forward(*inputs)
        except (AssumedError, DataShapeError):
            if before is not None:
                before.restore()
            raise
        if self._unversioned:
            increment_version([inputs[i] for i in self._unversioned])
        del inputs
        deferred.ran(outputs)
        self._apply_changes(outputs, leaves, deferred)
        for optimizer in self.captured.stepped:
            mark_stepped(optimizer)
        for call in self.captured.host_calls:
            call.scheduler.step(*call.args, **call.kwargs)
            deferred.read(call.leaves)
        _apply_all(self._late_changes, outputs, leaves, deferred)
        if self._effects:
            self._make_calls(outputs, deferred)
        results = [_result(kind, value, outputs, deferred) for kind, value in self.captured.result_leaves]
        rebuild = self.captured.rebuild_result
        return results[0] if rebuild is None else rebuild(results)

    def _make_calls(self, outputs: tuple[Any, ...], deferred: DeferredValues) -> None:
        """Print, log and write into lists and dicts, as the step does."""
        made: dict[int, Any] = {}
        for call in self._effects:
            call.make(lambda leaf: _result(leaf.kind, leaf.value, outputs, deferred), made)
        if any(call.once for call in self._effects):
            self._effects = tuple(call for call in self._effects if not call.once)

    def path(self, index: int) -> str:
        """The path of an input of the graph."""
        return self.captured.inputs[index].path

    def _apply_changes(self, outputs: tuple[Any, ...], leaves: list[Any], deferred: DeferredValues) -> None:
        _apply_all(self._changes, outputs, leaves, deferred)

    def _measured(self, inputs: list[Any]) -> tuple[Any, ...]:
        """The outputs of the first run of a graph with a memory budget; its peak goes into the memory report."""
        assert self._report is not None
        self._measure_next = False
        device = torch.device(self._report.device)
        held = held_bytes(inputs, device)
        outputs, most = bytes_at_most(lambda: self._forward(*inputs), device)
        self._report.measured_peak = None if most is None else held + most
        found: tuple[Any, ...] = outputs
        return found

    def _mode(self) -> AbstractContextManager[Any]:
        """Run without autocast and autograd: the casts and the backward are in the graph."""
        return _without_autocast() if self._autocast else below_autograd()


class StateBefore:
    """What a run changes before the graph has checked its assumptions: random generators, and gradients that
    are freed early."""

    def __init__(self, released: Sequence[Change], inputs: Sequence[Any], devices: Sequence[str]) -> None:
        self._gradients = [(change.slot, change.slot.get()) for change in released]
        self._random = [(device, get_rng_state(device)) for device in devices]
        self._generators = [(each, each.get_state()) for each in inputs if isinstance(each, torch.Generator)]

    def restore(self) -> None:
        """Restore it."""
        for slot, value in self._gradients:
            if value is not ABSENT:
                slot.set(value)
        for device, state in self._random:
            set_rng_state(state, device)
        for generator, state in self._generators:
            generator.set_state(state)


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), below_autograd():
        yield


def _result(kind: str, value: Any, outputs: tuple[Any, ...], deferred: DeferredValues) -> Any:
    if kind == "output":
        return outputs[value]
    if kind == "attached":
        return attach(outputs[value])
    if kind == "detached":
        found = outputs[value]  # `p.detach()` may be the parameter itself, updated in place
        return found.detach() if found.requires_grad or type(found) is not Tensor else found
    if kind == "sharded":
        return dtensor_over(outputs[value[0]], value[1])
    if kind == "shown":
        return value.of(outputs[value.output])
    return deferred.number(value) if kind == "deferred" else value


def _apply_all(changes: list[Change], outputs: tuple[Any, ...], leaves: list[Any], deferred: DeferredValues) -> None:
    for change in changes:
        if change.deferred is None:
            _apply(change, outputs, leaves)
        elif change.unless is None or not bool(outputs[change.unless]):
            change.slot.set(deferred.number(change.deferred))


def _apply(change: Change, outputs: tuple[Any, ...], leaves: list[Any]) -> None:
    if isinstance(change.slot, BatchAttributeSlot):
        value = change.constant if change.output is None else outputs[change.output]
        leaf = leaves[change.slot.index]
        if change.slot.attribute == "form":
            leaf.as_strided_(*value)
        else:
            setattr(leaf, change.slot.attribute, value)
        return
    if change.unless is not None and bool(outputs[change.unless]):
        return
    if change.output is not None:
        change.slot.set(outputs[change.output])
    elif change.kind is ChangeKind.REMOVED:
        change.slot.remove()
    else:
        change.slot.set(change.constant)


_refuse = error_in_backward(
    str(
        NoGraphError(
            "backward() reached a result of a compiled step, and a replay records no autograd graph.",
            fix="call backward() inside of the step, or detach() the result if no gradient should flow into the step.",
        )
    )
)


def attach(value: Tensor) -> Tensor:
    """A tensor with the same values that requires grad and whose backward raises."""
    attached: Tensor = _refuse(value.detach().requires_grad_())
    return attached
