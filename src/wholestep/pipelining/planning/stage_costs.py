"""The cost of each stage of a pipe per microbatch: seconds and bytes, estimated on fake tensors or measured.

For an estimate each stage runs once, forward and backward, on fake tensors. The time of an operator is the longer of
its arithmetic and its memory traffic on a machine of the given speeds; the activations of a microbatch are what
autograd saves. The numbers hold for the size of the microbatch that the pipe was captured with.

For a measurement the stages run here one after the other, on the given microbatch, several times; the fastest counts.
Parameters, buffers and random state are unchanged: gradients are not accumulated, and buffers that a forward writes
(running statistics) are copied first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from wholestep.pipelining.build.routing import Routing
from wholestep.pipelining.build.staged_graph import example_value
from wholestep.simulate.cost_model import timed, work_of_call
from wholestep.simulate.machine import DEFAULT_MACHINE, Machine
from wholestep.simulate.pipeline import Bytes, Times
from wholestep.torch_private.fake_tensors import DispatchMode, FakeTensorMode, fake_tensor, new_fake_mode, storage_key

_PHASES = ("forward", "backward_input", "backward_weight")


class HasStages(Protocol):
    """The part of a pipe that is read here."""

    num_stages: int
    routing: Routing

    def get_stage_module(self, stage_idx: int) -> nn.Module: ...


@dataclass(frozen=True)
class StageCosts:
    """The costs of one stage: seconds and bytes of one microbatch, and bytes of its state.

    `operators` are the times of single operators by phase ("forward", ...), if known: an operator takes at least the
    machine's `launch`, however small the microbatch is.
    """

    forward: float
    backward_input: float
    backward_weight: float
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    arriving_bytes: int
    arriving_back_bytes: int
    operators: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False)

    def seconds(self, what: str, scale: float, machine: Machine) -> float:
        """`forward`, `backward_input` or `backward_weight` of a microbatch `scale` times as large."""
        if what in self.operators:
            return sum(max(machine.launch, each * scale) for each in self.operators[what])
        return float(getattr(self, what)) * scale


def estimate_costs(pipe: HasStages, machine: Machine = DEFAULT_MACHINE) -> tuple[StageCosts, ...]:
    """The estimated costs of all stages."""
    return tuple(_estimate(pipe, index, machine) for index in range(pipe.num_stages))


def times_from(costs: Sequence[StageCosts], machine: Machine = DEFAULT_MACHINE, scale: float = 1.0) -> Times:
    """Times for the simulator; `scale` is the size of a microbatch relative to that of the estimate."""
    lengths = {what: [each.seconds(what, scale, machine) for each in costs] for what in _PHASES}

    def travel(sizes: Sequence[int]) -> list[float]:
        return [machine.launch + size * scale / machine.link for size in sizes]

    return Times(
        F=lengths["forward"],
        I=lengths["backward_input"],
        W=lengths["backward_weight"],
        send=travel([*(each.arriving_bytes for each in costs[1:]), 0]),
        send_back=travel([0, *(each.arriving_back_bytes for each in costs[:-1])]),
    )


def bytes_from(costs: Sequence[StageCosts], state_copies: float, scale: float = 1.0) -> Bytes:
    """Bytes for the simulator. `state_copies`: extra bytes per byte of a parameter (3: gradient, Adam's moments)."""
    return Bytes(
        static=[round(each.parameter_bytes * (1 + state_copies)) + each.buffer_bytes for each in costs],
        activation=[round(each.activation_bytes * scale) for each in costs],
        arriving=[round(each.arriving_bytes * scale) for each in costs],
        arriving_back=[round(each.arriving_back_bytes * scale) for each in costs],
    )


def _estimate(pipe: HasStages, index: int, machine: Machine) -> StageCosts:
    stage, routing = pipe.get_stage_module(index), pipe.routing
    mode = new_fake_mode(None)
    parameters = {name: _fake(each, mode, each.requires_grad) for name, each in stage.named_parameters()}
    buffers = {name: _fake(each, mode, False) for name, each in stage.named_buffers()}
    values = [routing.values[name] for name in routing.inputs[index]]
    inputs = [_fake(each.meta, mode, each.differentiable and index > 0) for each in values]
    counter, saved = _OperatorTimes(machine), _SavedBytes([*parameters.values(), *buffers.values()])
    with mode, counter, saved, torch.enable_grad():
        result = torch.func.functional_call(stage, parameters | buffers, tuple(inputs))
        outputs = [each for each in (result if isinstance(result, tuple) else (result,)) if has_gradient(each)]
        forward = counter.take()
        wanted = [each for each in inputs if each.requires_grad]
        weights = [each for each in parameters.values() if each.requires_grad]
        gradients(outputs, wanted, True)
        for_input = counter.take()
        gradients(outputs, [*wanted, *weights], False)
        for_weights = _without(counter.take(), for_input)
    operators = dict(zip(_PHASES, (forward, for_input, for_weights), strict=True))
    crossing = [each for each in (routing.values[name] for name in routing.outputs[index]) if each.differentiable]
    leaves = index == pipe.num_stages - 1
    sums = [sum(max(machine.launch, each) for each in operators[phase]) for phase in _PHASES]
    return StageCosts(
        sums[0],
        sums[1],
        sums[2],
        sum(map(_bytes, parameters.values())),
        sum(map(_bytes, buffers.values())),
        saved.bytes,
        sum(map(_bytes, inputs)) if index else 0,
        0 if leaves else sum(_bytes(example_value(each.meta, mode)) for each in crossing),
        operators,
    )


def _without(all_of_them: tuple[float, ...], some: tuple[float, ...]) -> tuple[float, ...]:
    """The operators of a whole backward that are not part of the input backward."""
    left = Counter(all_of_them) - Counter(some)
    return tuple(each for each, count in left.items() for _ in range(count))


def gradients(outputs: list[Tensor], wanted: list[Tensor], again: bool) -> None:
    """Run the backward from all outputs to the wanted tensors; `again` retains the graph."""
    if outputs and wanted:
        grads = [torch.empty_like(each) for each in outputs]
        torch.autograd.grad(outputs, wanted, grads, retain_graph=again, allow_unused=True)


def _fake(tensor: Tensor | None, mode: FakeTensorMode, requires_grad: bool) -> Tensor:
    assert tensor is not None, "a value without metadata"
    made: Tensor = example_value(tensor.detach(), mode)
    if made.is_meta:  # a meta model: operators need one device for all tensors
        made = fake_tensor(mode, made.shape, made.stride(), made.dtype, torch.device("cpu"))
    return made.requires_grad_(requires_grad and made.is_floating_point())


def has_gradient(value: Any) -> bool:
    """True if a backward can start at a value."""
    return isinstance(value, Tensor) and value.requires_grad


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


class _OperatorTimes(DispatchMode):
    """Records the estimated time of each operator."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._seconds: list[float] = []

    def take(self) -> tuple[float, ...]:
        """The times of the operators since the last call."""
        seconds, self._seconds = tuple(self._seconds), []
        return seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        if not func.is_view:
            self._seconds.append(self._machine.seconds(work_of_call(func, args, given, result)))
        return result


class _SavedBytes(saved_tensors_hooks):
    """Counts the bytes that autograd saves, each storage once, without parameters and buffers."""

    def __init__(self, state: Sequence[Tensor]) -> None:
        self._seen: dict[int, Tensor] = {storage_key(each): each for each in state}  # held, so that keys stay unique
        self.bytes = 0
        super().__init__(self._save, lambda saved: saved)

    def _save(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._seen:
            self._seen[key] = tensor.detach()
            self.bytes += int(tensor.untyped_storage().nbytes())
        return tensor


_TIMES = 3


class Runnable(HasStages, Protocol):
    """A pipe that can be run on example arguments."""

    def flatten_inputs(self, args: Sequence[Any], kwargs: Any = None) -> list[Tensor]: ...


def measure_costs(
    pipe: Runnable, args: Sequence[Any], kwargs: Any = None, machine: Machine = DEFAULT_MACHINE
) -> tuple[StageCosts, ...]:
    """The costs of all stages, with times measured on the devices of their parameters."""
    values: list[Any] = [each.detach() for each in pipe.flatten_inputs(args, kwargs or {})]
    found = []
    with torch.random.fork_rng(), torch.enable_grad():
        for index, estimated in enumerate(estimate_costs(pipe, machine)):
            times, values = _run(pipe, index, values)
            forward, for_input, for_weights = times
            timed = replace(estimated, forward=forward, backward_input=for_input, backward_weight=for_weights)
            found.append(replace(timed, operators={}))
    return tuple(found)


def _run(pipe: HasStages, index: int, values: list[Any]) -> tuple[tuple[float, float, float], list[Any]]:
    """The fastest forward, input backward and weight backward of a stage, and its outputs."""
    stage, routing = pipe.get_stage_module(index), pipe.routing
    wanted = [routing.values[name].differentiable and index > 0 for name in routing.inputs[index]]
    outputs: list[Any] = []
    runs = []
    for _ in range(_TIMES):
        inputs = [each.detach().requires_grad_(wants) for each, wants in zip(values, wanted, strict=True)]
        times, outputs = _once(stage, inputs)
        runs.append(times)
    forward, for_input, both = (min(each) for each in zip(*runs, strict=True))
    return (forward, for_input, max(both - for_input, 0.0)), outputs


def _once(stage: nn.Module, inputs: list[Tensor]) -> tuple[tuple[float, float, float], list[Any]]:
    """Seconds of a forward, of an input backward and of a whole backward, and the outputs of the stage."""
    buffers = {name: each.clone() for name, each in stage.named_buffers()}
    device = next((each.device for each in (*stage.parameters(), *inputs)), None)
    to_inputs = [each for each in inputs if each.requires_grad]
    to_all = to_inputs + [each for each in stage.parameters() if each.requires_grad]
    forward, result = timed(lambda: torch.func.functional_call(stage, buffers, tuple(inputs)), device)
    outputs = result if isinstance(result, tuple) else (result,)
    roots = [each for each in outputs if has_gradient(each)]
    for_input, _ = timed(lambda: gradients(roots, to_inputs, True), device)
    both, _ = timed(lambda: gradients(roots, to_all, False), device)
    values = [each.detach() if isinstance(each, Tensor) else each for each in outputs]
    return (forward, for_input, both), values
