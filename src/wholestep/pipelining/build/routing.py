"""Who makes each value, who needs it, and through which stages it passes.

Values travel only between neighbouring stages. A value needed later is passed on, unchanged, by the stages between
(`relayed through`), and its gradient comes back along the same way:

    stage 0 makes h, stage 2 needs it        inputs(1) = outputs(0) = (a, h)
                                             inputs(2) = outputs(1) = (b, h)

So the schedules of torch, which know neighbours only, carry skip connections, late model inputs and early outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Value:
    """A tensor that crosses from one stage to another, enters the model or leaves it."""

    name: str
    producer: int | Literal["input"]
    """The stage that makes it; "input" for a tensor that the caller of the model gives."""
    consumers: tuple[int, ...]
    """The stages that compute with it, in order. A model output is not a use."""
    meta: torch.Tensor | None
    """A fake tensor with its shape, dtype and device, as captured."""
    differentiable: bool
    """Whether a gradient comes back along it."""

    @property
    def made_at(self) -> int:
        """The first stage that holds the value."""
        return 0 if self.producer == "input" else self.producer

    @property
    def nbytes(self) -> int:
        """Bytes of one microbatch as captured; 0 if the shape is not known."""
        return 0 if self.meta is None else int(self.meta.numel()) * self.meta.element_size()


@dataclass(frozen=True)
class Routing:
    """The values of a pipeline, and for each stage the names it takes and returns, in order."""

    values: Mapping[str, Value]
    inputs: tuple[tuple[str, ...], ...]
    """inputs[0] is what the caller gives: the tensors of the signature, in its order."""
    outputs: tuple[tuple[str, ...], ...]
    """outputs[i] == inputs[i + 1]; outputs[-1] is what the model returns, flat."""

    def __post_init__(self) -> None:
        assert self.inputs[1:] == self.outputs[:-1], "a stage takes what the stage before it returns"
        names = {name for row in (*self.inputs, *self.outputs) for name in row}
        assert names <= set(self.values), "a name without a value"

    def __deepcopy__(self, memo: object) -> Routing:
        return self  # nothing in it changes, and fake tensors cannot be copied

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.inputs)

    def relayed(self, name: str) -> tuple[int, ...]:
        """The stages that take a value and return it without having made it."""
        return tuple(i for i in range(self.stages) if name in self.inputs[i] and name in self.outputs[i])

    def crossing(self, stage: int) -> tuple[Value, ...]:
        """The values that go from a stage to the next."""
        return tuple(self.values[name] for name in self.outputs[stage])

    def crossing_bytes(self, stage: int) -> int:
        """Bytes of one microbatch, as captured, that go from a stage to the next."""
        return sum(value.nbytes for value in self.crossing(stage))


@dataclass(frozen=True)
class Need:
    """What the planning of routes reads about one value."""

    name: str
    producer: int | Literal["input"]
    consumers: tuple[int, ...]
    meta: torch.Tensor | None
    differentiable: bool


def plan_routes(stages: int, needs: Sequence[Need], inputs: Sequence[str], outputs: Sequence[str]) -> Routing:
    """The routing table: each value goes from its producer to its last consumer, or to the end if it leaves the model.

    `needs` are in the order in which values are made; this is also their order on every cut.
    """
    leaves = set(outputs)
    crossing: list[list[str]] = [[] for _ in range(stages - 1)]
    values: dict[str, Value] = {}
    for need in needs:
        values[need.name] = Value(need.name, need.producer, need.consumers, need.meta, need.differentiable)
        first = values[need.name].made_at
        last = stages - 1 if need.name in leaves else max(need.consumers, default=first)
        for cut in range(first, last):
            crossing[cut].append(need.name)
    rows = [tuple(inputs), *(tuple(row) for row in crossing), tuple(outputs)]
    routed = {name for row in rows for name in row}
    kept = {name: value for name, value in values.items() if name in routed}
    return Routing(kept, tuple(rows[:-1]), tuple(rows[1:]))
