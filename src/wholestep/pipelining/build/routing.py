"""The routing table: the stage that produces each value, the stages that use it, and those that relay it.

Values are sent only between neighbouring stages. The stages in between relay a value unchanged, and its gradient comes
back along the same path:

    stage 0 produces h, stage 2 uses it      inputs(1) = outputs(0) = (a, h)
                                             inputs(2) = outputs(1) = (b, h)

So the schedules of torch, which know only neighbours, carry skip connections, late model inputs and early outputs. One
table holds for all modes (train, eval) of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from wholestep.pipelining.build.capture import MismatchError
from wholestep.pipelining.build.model_state import SharedParameter
from wholestep.pipelining.build.staged_graph import StagedGraph, example_value
from wholestep.torch_private.fake_tensors import new_fake_mode


@dataclass(frozen=True)
class RoutedValue:
    """A tensor that crosses from one stage to another, enters the model or leaves it."""

    name: str
    producer: int | Literal["input"]
    """The stage that computes it; "input" for an input of the model."""
    consumers: tuple[int, ...]
    """The stages that compute with it, in order. Being returned by the model is not a use."""
    meta: torch.Tensor | None
    """A fake tensor with its shape, dtype and device, as captured."""
    differentiable: bool
    """True if its gradient is sent back."""

    @property
    def made_at(self) -> int:
        """The first stage that holds the value."""
        return 0 if self.producer == "input" else self.producer

    @property
    def nbytes(self) -> int:
        """Bytes for one microbatch of the captured size; 0 if the shape is not known."""
        return 0 if self.meta is None else int(self.meta.numel()) * self.meta.element_size()


@dataclass(frozen=True)
class Routing:
    """The values of a pipeline, and the names of the inputs and outputs of each stage, in order."""

    values: Mapping[str, RoutedValue]
    inputs: tuple[tuple[str, ...], ...]
    """inputs[0] are the tensors of the call, in signature order."""
    outputs: tuple[tuple[str, ...], ...]
    """outputs[i] == inputs[i + 1]; outputs[-1] are the flat results of the model."""

    def __post_init__(self) -> None:
        assert self.inputs[1:] == self.outputs[:-1], "the inputs of a stage are the outputs of the previous one"
        names = {name for row in (*self.inputs, *self.outputs) for name in row}
        assert names <= set(self.values), "a name without a value"

    def __deepcopy__(self, memo: object) -> Routing:
        return self  # immutable, and fake tensors cannot be copied

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.inputs)

    def relayed(self, name: str) -> tuple[int, ...]:
        """The stages that take a value and return it unchanged."""
        return tuple(i for i in range(self.stages) if name in self.inputs[i] and name in self.outputs[i])

    def crossing(self, stage: int) -> tuple[RoutedValue, ...]:
        """The values that are sent from a stage to the next."""
        return tuple(self.values[name] for name in self.outputs[stage])

    def crossing_bytes(self, stage: int) -> int:
        """Bytes sent from a stage to the next for one microbatch of the captured size."""
        return sum(value.nbytes for value in self.crossing(stage))


@dataclass(frozen=True)
class Need:
    """The producer and the consumers of one value, before routing."""

    name: str
    producer: int | Literal["input"]
    consumers: tuple[int, ...]
    meta: torch.Tensor | None
    differentiable: bool


def plan_routes(stages: int, needs: Sequence[Need], inputs: Sequence[str], outputs: Sequence[str]) -> Routing:
    """The routing table: each value is sent from its producer to its last consumer, or to the last stage if it is
    returned by the model.

    `needs` are in the order in which values are computed, which is also their order on every cut.
    """
    leaves = set(outputs)
    crossing: list[list[str]] = [[] for _ in range(stages - 1)]
    values: dict[str, RoutedValue] = {}
    for need in needs:
        values[need.name] = RoutedValue(need.name, need.producer, need.consumers, need.meta, need.differentiable)
        first = values[need.name].made_at
        last = stages - 1 if need.name in leaves else max(need.consumers, default=first)
        for cut in range(first, last):
            crossing[cut].append(need.name)
    rows = [tuple(inputs), *(tuple(row) for row in crossing), tuple(outputs)]
    routed = {name for row in rows for name in row}
    crossing_values = {name: value for name, value in values.items() if name in routed}
    return Routing(crossing_values, tuple(rows[:-1]), tuple(rows[1:]))


def find_needs(staged: StagedGraph, differentiable: set[fx.Node]) -> dict[str, Need]:
    """The needs of every tensor that a graph takes or computes, in order."""
    mode = new_fake_mode(None)
    found: dict[str, Need] = {}
    for node in staged.graph.nodes:
        value = node.meta.get("val")
        is_value = node.op == "placeholder" or node in staged.stage_of
        if not is_value or not (isinstance(value, torch.Tensor) or staged.count in staged.users(node)):
            continue
        stages = staged.users(node)
        consumers = tuple(sorted(stage for stage in stages if stage < staged.count))
        crosses = max(stages, default=0) > staged.made_at(node) or node.op == "placeholder"
        meta = example_value(value, mode) if crosses and isinstance(value, torch.Tensor) else None
        producer = staged.stage_of.get(node, "input")
        found[staged.names[node]] = Need(staged.names[node], producer, consumers, meta, node in differentiable)  # type: ignore[arg-type]
    return found


def routes(staged: StagedGraph, needs: Mapping[str, Need]) -> Routing:
    """The routing table of one mode, or of several whose needs were merged."""
    inputs = [staged.names[node] for node in staged.graph.nodes if node.op == "placeholder"]
    outputs = [staged.names[leaf] for leaf in staged.program.outputs if isinstance(leaf, fx.Node)]
    return plan_routes(staged.count, list(needs.values()), inputs, outputs)


def merge_needs(main: Mapping[str, Need], other: Mapping[str, Need], staged: StagedGraph) -> dict[str, Need]:
    """The union of the needs of two modes. Raises MismatchError if a value of only one mode crosses a cut."""
    merged = dict(main)
    for name, need in other.items():
        ours = main.get(name)
        late = [stage for stage in need.consumers if stage > (need.producer if need.producer != "input" else 0)]
        if ours is None:
            if late:
                raise MismatchError(f"{name} crosses a cut and is not computed in the other mode")
            continue
        if ours.producer != need.producer:
            raise MismatchError(f"{name} is computed in another stage")
        merged[name] = replace(
            ours,
            consumers=tuple(sorted({*ours.consumers, *need.consumers})),
            meta=ours.meta if ours.meta is not None else need.meta,
            differentiable=ours.differentiable or need.differentiable,
        )
    return merged


def check_same_values(routing: Routing, other: Mapping[str, Need]) -> None:
    """Raise MismatchError if a mode does not compute a value that crosses a cut."""
    for row in (*routing.inputs, *routing.outputs):
        for name in row:
            if name not in other:
                raise MismatchError(f"{name} crosses a cut and is not computed in this mode")


def readable(routing: Routing, stages: Sequence[fx.GraphModule], shared: Sequence[SharedParameter]) -> str:
    """The routing table and the stages as Python."""
    lines = ["values:", *(f"  {_route(routing, value)}" for value in routing.values.values())]
    if shared:
        lines += ["shared parameters:", *(f"  {_sharing(each)}" for each in shared)]
    lines += [stage.print_readable(print_output=False) for stage in stages]
    return "\n".join(lines)


def _route(routing: Routing, value: RoutedValue) -> str:
    source = "input" if value.producer == "input" else f"stage {value.producer}"
    text = f"{value.name}: {source} -> {', '.join(f'stage {stage}' for stage in value.consumers) or 'no stage'}"
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
