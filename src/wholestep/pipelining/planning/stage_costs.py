"""What each stage of a pipe costs per microbatch: seconds and bytes, estimated without running anything.

Each stage runs once, forward and backward, on tensors without data. Every operator counts as the longer of its
arithmetic and its memory traffic on a machine of the given speeds; what autograd keeps is what a microbatch keeps. The
numbers are for the microbatch with which the pipe was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from wholestep.pipelining.build.example_values import example_value
from wholestep.pipelining.build.routing import Routing
from wholestep.simulate.cost_model import DEFAULT_MACHINE, Machine, work_of_call
from wholestep.simulate.pipeline import Bytes, Times
from wholestep.torch_private.fake_tensors import DispatchMode, FakeTensorMode, fake_tensor, new_fake_mode, storage_key

_PHASES = ("forward", "backward_input", "backward_weight")


class HasStages(Protocol):
    """What is read of a pipe."""

    num_stages: int
    routing: Routing

    def get_stage_module(self, stage_idx: int) -> nn.Module: ...


@dataclass(frozen=True)
class StageCosts:
    """One stage: seconds of one microbatch, bytes of its state, and bytes of one microbatch.

    `operators` are the times of which `forward` and so on are the sums, by these names, where they are known: an
    operator takes at least the machine's `launch`, however small a microbatch is.
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
    """The costs of all stages."""
    return tuple(_estimate(pipe, index, machine) for index in range(pipe.num_stages))


def times_from(costs: Sequence[StageCosts], machine: Machine = DEFAULT_MACHINE, scale: float = 1.0) -> Times:
    """Times for the simulator; `scale` is the size of a microbatch in those of the estimate."""
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
    """Bytes for the simulator. `state_copies`: bytes beside each byte of a parameter (gradient, Adam's moments: 3)."""
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
    counter, kept = _Meter(machine), _Kept([*parameters.values(), *buffers.values()])
    with mode, counter, kept, torch.enable_grad():
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
        kept.bytes,
        sum(map(_bytes, inputs)) if index else 0,
        0 if leaves else sum(_bytes(example_value(each.meta, mode)) for each in crossing),
        operators,
    )


def _without(all_of_them: tuple[float, ...], some: tuple[float, ...]) -> tuple[float, ...]:
    """What a whole backward does beyond the backward for the input."""
    left = Counter(all_of_them) - Counter(some)
    return tuple(each for each, count in left.items() for _ in range(count))


def gradients(outputs: list[Tensor], wanted: list[Tensor], again: bool) -> None:
    """Run the backward from all outputs to what is wanted; `again` keeps the graph for a second one."""
    if outputs and wanted:
        grads = [torch.empty_like(each) for each in outputs]
        torch.autograd.grad(outputs, wanted, grads, retain_graph=again, allow_unused=True)


def _fake(tensor: Tensor | None, mode: FakeTensorMode, requires_grad: bool) -> Tensor:
    assert tensor is not None, "a value without a shape"
    made: Tensor = example_value(tensor.detach(), mode)
    if made.is_meta:  # a model without memory: its tensors count as if they were on the device of the others
        made = fake_tensor(mode, made.shape, made.stride(), made.dtype, torch.device("cpu"))
    return made.requires_grad_(requires_grad and made.is_floating_point())


def has_gradient(value: Any) -> bool:
    """Whether a backward can begin at a value."""
    return isinstance(value, Tensor) and value.requires_grad


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


class _Meter(DispatchMode):
    """Adds up what operators cost."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._seconds: list[float] = []

    def take(self) -> tuple[float, ...]:
        """What came since the last time, each operator by itself."""
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


class _Kept(saved_tensors_hooks):
    """Counts what autograd keeps, each memory once, and not what is there anyway."""

    def __init__(self, there: Sequence[Tensor]) -> None:
        self._seen: dict[int, Tensor] = {storage_key(each): each for each in there}  # alive, so that no key comes again
        self.bytes = 0
        super().__init__(self._keep, lambda kept: kept)

    def _keep(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._seen:
            self._seen[key] = tensor.detach()
            self.bytes += int(tensor.untyped_storage().nbytes())
        return tensor
