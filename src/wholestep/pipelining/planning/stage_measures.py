"""What each stage of a pipe costs, by running it: seconds from a clock, bytes from the estimate.

The stages run here one after the other, on the microbatch that is given, forward and backward, several times; the
fastest counts. Parameters, buffers and random state are as before: gradients are not accumulated, and what a forward
changes (running statistics) is changed on copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wholestep.pipelining.planning.stage_costs import HasStages, StageCosts, estimate_costs, gradients, has_gradient
from wholestep.simulate.cost_model import DEFAULT_MACHINE, Machine, timed

_TIMES = 3


class Runnable(HasStages, Protocol):
    """A pipe that knows how a call becomes the inputs of its first stage."""

    def flatten_inputs(self, args: Sequence[Any], kwargs: Any = None) -> list[Tensor]: ...


def measure_costs(
    pipe: Runnable, args: Sequence[Any], kwargs: Any = None, machine: Machine = DEFAULT_MACHINE
) -> tuple[StageCosts, ...]:
    """The costs of all stages, with times as measured on the devices where their parameters are."""
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
    """The fastest forward, backward for the input and rest of the backward of a stage, and what it returns."""
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
    """Seconds of a forward, of the backward for the input and of a whole backward, and what the stage returns."""
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
