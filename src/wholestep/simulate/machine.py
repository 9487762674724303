"""The speed of a rank and of its connections: a roofline with achieved rates, and the time of each collective.

    machine = ws.simulate.H100                                   also H200, A100, CPU
    machine = replace(ws.simulate.H100, contention=0.3)          a frozen dataclass: change what you know better
    text = machine.to_json();  Machine.from_json(text)           versioned; what `calibrate` found is in it

An operator takes the longer of its arithmetic and its traffic, and never less than `launch`. `corrections` multiply
that for operators (and shapes) whose time was measured.

How long a collective takes: a table of measured times, and a latency-bandwidth fit where the table says nothing.

    all_gather_into_tensor of 16 MiB per rank, 8 ranks within a node     measured: 358.4 us, between rows interpolated
    all_to_all_single, 64 ranks on 8 nodes                               fitted: latency + hops + bytes / bandwidth

The fit is that of a ring. Of n ranks on k nodes each rank sends n - 1 pieces; between nodes the n / k ranks of a node
each have a network card, within a node there is one switch:

    time = latency + hop * (n - 1) + bytes sent by a rank / bus            bus = min(within, n / k * across)

An all-reduce is a reduce-scatter and an all-gather. In an all-to-all only what leaves the node takes the cards.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy
import torch

from wholestep.errors import OptionError

_MIB = 2**20
_KINDS = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
_ENDINGS = ("_out", "_coalesced", "_")
GATHER, SCATTER, REDUCE, EXCHANGE = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
)


@dataclass(frozen=True)
class GroupSpread:
    """How the ranks of a process group lie on nodes."""

    ranks: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise OptionError(
                f"{self.ranks} ranks cannot lie on {self.nodes} nodes.", fix="use 1 to `ranks` nodes, with a rank each."
            )

    @property
    def is_within(self) -> bool:
        """Whether no byte leaves the node."""
        return self.nodes == 1


@dataclass(frozen=True)
class Link:
    """What connects ranks: seconds, and bytes per second in one direction of one rank."""

    latency: float
    hop: float
    """Seconds more for every further rank."""
    bandwidth: float


@dataclass(frozen=True)
class MeasuredCollective:
    """Measured seconds of one kind of collective, by the bytes that a rank puts in. Sizes ascend."""

    kind: str
    spread: GroupSpread
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if len(self.sizes) != len(self.seconds) or not self.sizes or not ascending:
            raise OptionError(
                f"measured times of {self.kind}: {len(self.sizes)} sizes and {len(self.seconds)} times.",
                fix="give as many times as sizes, at least one, the sizes ascending.",
            )

    def at(self, size: float) -> float:
        """Between two rows linear; outside of them the line through the outermost two, never below a tenth of the
        first row."""
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0]
        i = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        return max(seconds[i - 1] + slope * (size - sizes[i - 1]), 0.1 * seconds[0])


@dataclass(frozen=True)
class CollectiveModel:
    """Times of collectives on one kind of cluster."""

    within: Link
    across: Link
    measured: tuple[MeasuredCollective, ...] = ()

    @cached_property
    def _rows(self) -> Mapping[tuple[str, GroupSpread], MeasuredCollective]:
        return {(row.kind, row.spread): row for row in self.measured}

    def seconds(self, kind: str, spread: GroupSpread, size: float) -> float:
        """Seconds of a collective of which each rank puts in `size` bytes."""
        if spread.ranks <= 1:
            return 0.0
        kind = plain_kind(kind)
        row = self._rows.get((kind, spread))
        if row is not None:
            return row.at(size)
        related = self._from_related(kind, spread, size)
        return self.fitted(kind, spread, size) if related is None else related

    def _from_related(self, kind: str, spread: GroupSpread, size: float) -> float | None:
        """From measured times of another kind: gathers and scatters of equal shards take equally long."""
        rows, n = self._rows, spread.ranks
        gather, scatter = rows.get((GATHER, spread)), rows.get((SCATTER, spread))
        if kind == GATHER and scatter is not None:
            return scatter.at(size * n)
        if kind in (SCATTER, EXCHANGE) and gather is not None:
            return gather.at(size / n)
        if kind == EXCHANGE and scatter is not None:
            return scatter.at(size)
        if kind == REDUCE and (gather is not None or scatter is not None):
            return self.seconds(SCATTER, spread, size) + self.seconds(GATHER, spread, size / n)
        return None

    def fitted(self, kind: str, spread: GroupSpread, size: float) -> float:
        """Seconds by the fit alone."""
        n, local = spread.ranks, spread.ranks / spread.nodes
        if kind == REDUCE:
            return self.fitted(SCATTER, spread, size) + self.fitted(GATHER, spread, size / n)
        start = self._latency(spread)
        if kind == EXCHANGE:
            inside, outside = size * (local - 1) / n, size * (n - local) / n
            return start + max(inside / self.within.bandwidth, outside / self.across.bandwidth)
        if kind == GATHER:
            sent = size * (n - 1)
        elif kind == SCATTER:
            sent = size * (n - 1) / n
        else:  # broadcast, send: all bytes pass every rank once
            sent = size
        return start + sent / self._bus(spread)

    def _latency(self, spread: GroupSpread) -> float:
        if spread.is_within:
            return self.within.latency + self.within.hop * (spread.ranks - 1)
        inside = self.within.hop * (spread.ranks - spread.nodes)
        return self.across.latency + self.across.hop * (spread.nodes - 1) + inside

    def _bus(self, spread: GroupSpread) -> float:
        if spread.is_within:
            return self.within.bandwidth
        return min(self.within.bandwidth, self.across.bandwidth * spread.ranks / spread.nodes)


def plain_kind(kind: str) -> str:
    """`all_gather_into_tensor` of `all_gather_into_tensor_out` and of `all_gather_into_tensor_coalesced`."""
    for ending in _ENDINGS:
        kind = kind.removesuffix(ending)
    return _KINDS.get(kind, kind)


def fit_link(measured: Iterable[MeasuredCollective]) -> Link:
    """The link that comes nearest to measured gathers and scatters, all within nodes or all one rank to a node.

    Least squares of relative errors. Latency and hop are told apart only if groups of several sizes were measured.
    """
    rows = [row for row in measured if row.kind in (GATHER, SCATTER)]
    if not rows:
        raise OptionError(
            "there is nothing to fit: no measured time was given.", fix=f"give measured times of {GATHER} or {SCATTER}."
        )
    points = [
        (row.spread.ranks - 1, size * (row.spread.ranks - 1) / (1 if row.kind == GATHER else row.spread.ranks), seconds)
        for row in rows
        for size, seconds in zip(row.sizes, row.seconds, strict=True)
    ]
    has_hops = len({hops for hops, _, _ in points}) > 1
    columns = [[1.0, float(hops) if has_hops else 0.0, sent] for hops, sent, _ in points]
    seconds = numpy.array([each for _, _, each in points])
    found, *_ = numpy.linalg.lstsq(numpy.array(columns) / seconds[:, None], numpy.ones(len(points)), rcond=None)
    latency, hop, per_byte = (max(float(each), 0.0) for each in found)
    return Link(latency, hop, 1.0 / per_byte if per_byte else math.inf)


def _row(kind: str, ranks: int, nodes: int, *milliseconds: float) -> MeasuredCollective:
    """Times of 1, 2, 4, .. MiB."""
    sizes = tuple(_MIB << i for i in range(len(milliseconds)))
    return MeasuredCollective(kind, GroupSpread(ranks, nodes), sizes, tuple(each / 1e3 for each in milliseconds))


# fmt: off
_NCCL = (
    _row(GATHER, 8, 1, .0495, .0716, .1138, .1953, .3584, .6846, 1.3371, 2.642, 5.2518, 10.4714, 20.9105, 41.7888),
    _row(SCATTER, 8, 1, .0173, .0238, .0368, .0495, .0716, .1138, .1953, .3584, .6846, 1.3371, 2.642, 5.2518),
    _row(REDUCE, 8, 1, .028, .041, .0628, .0849, .1292, .2179, .3822, .7084, 1.3609, 2.6658, 5.2756, 10.4952),
    _row(GATHER, 8, 8, .2397, .4059, .7181, 1.3297, 2.5531, 4.9998, 9.8931, 19.6798, 39.2532, 78.4001, 156.694,
         313.281),
    _row(SCATTER, 8, 8, .0866, .1151, .1566, .2397, .4059, .7181, 1.3297, 2.5531, 4.9998, 9.8931, 19.6798, 39.2532),
    _row(GATHER, 16, 16, .4977, .8538, 1.5291, 2.8398, 5.4613, 10.7042, 21.1899, 42.1614, 84.1045, 167.9904, 335.763,
         671.3073),
    _row(SCATTER, 16, 16, .1282, .1638, .2247, .3136, .4858, .8166, 1.4697, 2.7525, 5.2865, 10.3546, 20.4909, 40.7633),
    _row(GATHER, 32, 32, 1.0136, 1.7497, 3.1512, 5.86, 11.2777, 22.113, 43.7835, 87.1247, 173.807, 347.171, 693.901,
         1387.36),
    _row(SCATTER, 32, 32, .2114, .2612, .3608, .4615, .6455, 1.0136, 1.7497, 3.1512, 5.86, 11.2777, 22.113, 43.7835),
)
# fmt: on
"""Milliseconds of NCCL on H100 (NVLink within a node, a 400 Gbit/s card per rank across), as published with the overlap
simulator of AutoParallel (github.com/meta-pytorch/autoparallel, BSD-3-Clause). The links below are fitted to them."""

HOPPER_CLUSTER = CollectiveModel(Link(1.98e-5, 0.0, 3.45e11), Link(2.87e-5, 6.5e-6, 4.69e10), _NCCL)
AMPERE_CLUSTER = CollectiveModel(Link(2.2e-5, 0.0, 2.3e11), Link(3.0e-5, 6.5e-6, 2.2e10))
"""NVLink 3 and a 200 Gbit/s card per rank: achieved fractions as on H100."""
HOST_CLUSTER = CollectiveModel(Link(1.0e-4, 2.0e-5, 4e9), Link(2.0e-4, 4.0e-5, 1e9))
"""gloo: shared memory within a host, 10 Gbit/s across."""


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
