"""What a pipe is, for programs and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from wholestep.pipelining.build.routing import Routing, Value
from wholestep.pipelining.build.shared import SharedParameter
from wholestep.pipelining.run.stage_source import Source


@dataclass(frozen=True)
class PipeInfo:
    """Information about a pipe, as torch's."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool
    pipe: Source | None = field(default=None, repr=False, compare=False)
    """The pipe itself, for `build_stage`."""


def readable(routing: Routing, stages: Sequence[fx.GraphModule], shared: Sequence[SharedParameter]) -> str:
    """The routing table and the stages as Python."""
    lines = ["values:", *(f"  {_route(routing, value)}" for value in routing.values.values())]
    if shared:
        lines += ["shared parameters:", *(f"  {_sharing(each)}" for each in shared)]
    lines += [stage.print_readable(print_output=False) for stage in stages]
    return "\n".join(lines)


def _route(routing: Routing, value: Value) -> str:
    source = "input" if value.producer == "input" else f"stage {value.producer}"
    text = f"{value.name}: {source} -> {', '.join(f'stage {stage}' for stage in value.consumers) or 'nobody'}"
    between = [stage for stage in routing.relayed(value.name) if stage not in value.consumers]
    if between:
        text += f", through {', '.join(map(str, between))}"
    if value.name in routing.outputs[-1]:
        text += ", returned"
    if value.meta is not None:
        text += f"  {str(value.meta.dtype).removeprefix('torch.')}{list(value.meta.shape)}"
    return text + (", gradient back" if value.differentiable else "")


def _sharing(each: SharedParameter) -> str:
    return f"{' = '.join(each.names)}: {each.mode.name.lower()}, stages {', '.join(map(str, each.stages))}"
