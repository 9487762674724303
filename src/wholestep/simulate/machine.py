"""The speed of a rank and of what connects it with others: a roofline with achieved rates, not those of data sheets.

    machine = ws.simulate.H100                                   also H200, A100, CPU
    machine = replace(ws.simulate.H100, contention=0.3)          a frozen dataclass: change what you know better
    text = machine.to_json();  Machine.from_json(text)           versioned; what `calibrate` found is in it

An operator takes the longer of its arithmetic and its traffic, and never less than `launch`. `corrections` multiply
that for operators (and shapes) whose time was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from wholestep.errors import OptionError
from wholestep.simulate.collective_times import (
    AMPERE_CLUSTER,
    HOPPER_CLUSTER,
    HOST_CLUSTER,
    CollectiveModel,
    GroupSpread,
    Link,
    MeasuredCollective,
)

_VERSION = 1


@dataclass(frozen=True)
class Work:
    """The work of one operator call."""

    flops: float
    moved: int
    """Bytes read and written."""
    half: bool = False
    """True if the arithmetic is in a 16-bit dtype."""


@dataclass(frozen=True)
class Machine:
    """The speed of a rank. The defaults are round numbers of a data-centre GPU; only their ratios matter."""

    flops: float = 1e14
    """Floating point operations per second."""
    memory: float = 1e12
    """Bytes read or written per second."""
    link: float = 1e11
    """Bytes sent to the next rank per second, between the stages of a pipeline."""
    launch: float = 3e-6
    """Minimum seconds of any operator."""
    half_flops: float | None = None
    """Floating point operations per second in 16-bit dtypes; None: `flops`."""
    attention: float | None = None
    """The same of fused attention; None: as of matrix products."""
    attention_backward: float | None = None
    """The same of its backward."""
    host_read: float = 1e-5
    """Seconds that the host takes to read a value from the device."""
    dispatch: float = 0.0
    """Seconds of the host for each operator that it starts; 0 where a CUDA graph or compiled code does."""
    contention: float = 0.0
    """How much longer computation takes beside a collective: 0.3 is 30% longer; 0 turns it off."""
    shared_links: bool = False
    """Whether collectives of several groups that use the same link slow each other down."""
    ranks_per_node: int = 8
    collectives: CollectiveModel = HOPPER_CLUSTER
    corrections: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    """Measured over modelled time, by operator (`aten::mm`) and by operator with shapes (see `profile.py`)."""
    name: str = ""

    def seconds(self, work: Work) -> float:
        """The longer of arithmetic and traffic."""
        return max(self._arithmetic(work), work.moved / self.memory)

    def seconds_in_turn(self, work: Work) -> float:
        """Arithmetic plus traffic."""
        return self._arithmetic(work) + work.moved / self.memory

    def _arithmetic(self, work: Work) -> float:
        return work.flops / self.rate(work.half)

    def rate(self, half: bool) -> float:
        """Floating point operations per second of matrix products."""
        return self.half_flops if half and self.half_flops is not None else self.flops

    @cached_property
    def correction(self) -> Mapping[str, float]:
        """`corrections` by key."""
        return dict(self.corrections)

    def spread(self, ranks: tuple[int, ...] | int) -> GroupSpread:
        """How a group lies on nodes; of a group whose ranks are not known, only their number: side by side."""
        if isinstance(ranks, int):
            return GroupSpread(max(ranks, 1), max(-(-ranks // self.ranks_per_node), 1))
        return GroupSpread(len(ranks), len({rank // self.ranks_per_node for rank in ranks}))

    def to_json(self) -> str:
        """The machine as versioned JSON."""
        return json.dumps({"version": _VERSION, "machine": asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Read what `to_json` wrote."""
        found = json.loads(text)
        if (
            not isinstance(found, dict)
            or found.get("version") != _VERSION
            or not isinstance(found.get("machine"), dict)
        ):
            raise OptionError("not the JSON of a machine, or of another version.", fix="write it again with to_json().")
        given = dict(found["machine"])
        unknown = sorted(set(given) - {each.name for each in fields(cls)})
        if unknown:
            raise OptionError(f"a machine has no field {unknown[0]!r}.", fix="remove it from the JSON.")
        if "collectives" in given:
            given["collectives"] = _model(given["collectives"])
        given["corrections"] = tuple((str(key), float(value)) for key, value in given.get("corrections", ()))
        return cls(**given)


def _model(data: dict[str, Any]) -> CollectiveModel:
    rows = tuple(
        MeasuredCollective(row["kind"], GroupSpread(**row["spread"]), tuple(row["sizes"]), tuple(row["seconds"]))
        for row in data.get("measured", ())
    )
    return CollectiveModel(Link(**data["within"]), Link(**data["across"]), rows)


H100 = Machine(
    name="H100",
    flops=45e12,
    half_flops=620e12,
    attention=500e12,
    attention_backward=400e12,
    memory=2.6e12,
    link=4.5e10,
    launch=2.5e-6,
)
H200 = Machine(
    name="H200",
    flops=45e12,
    half_flops=690e12,
    attention=520e12,
    attention_backward=420e12,
    memory=3.8e12,
    link=4.5e10,
    launch=2.5e-6,
)
A100 = Machine(
    name="A100",
    flops=18e12,
    half_flops=240e12,
    attention=190e12,
    attention_backward=150e12,
    memory=1.6e12,
    link=2.2e10,
    launch=3e-6,
    collectives=AMPERE_CLUSTER,
)
CPU = Machine(name="CPU", flops=5e10, memory=1e10, link=1e9, launch=1e-7, host_read=0.0, collectives=HOST_CLUSTER)
GPU = Machine(flops=5e13, half_flops=5e14, memory=3e12, launch=1e-7)
DEFAULT_MACHINE = Machine()


def machine_of(device: torch.device) -> Machine:
    """Round numbers for a device type."""
    return CPU if device.type == "cpu" else GPU
