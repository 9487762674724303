"""Measured times of a step, and a machine corrected by them.

    profile = ws.simulate.profile_of(graph, {"mm_3": [61.2, 60.9], ..}, collectives={"all_gather_1": per_rank})
    machine = ws.simulate.calibrate(ws.simulate.H200, profile)
    ws.simulate.step(graph, machine=machine)

A profile is data: times come from any measurement (CUDA events, the profiler, the clock of a CPU). Compiled code
is measured region by region; `regions` says which nodes a region computes, and each gets its share by the model.
A collective takes on every rank until the last one has come to it: what the others wait is not communication, so of
each run the shortest time of all ranks counts. Of several runs the median counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import fx

from wholestep.errors import OptionError
from wholestep.ir.step_graph import StepGraph
from wholestep.simulate.cost_model import COLLECTIVE, NodeWork, key_of, node_works
from wholestep.simulate.machine import CollectiveModel, GroupSpread, Machine, MeasuredCollective
from wholestep.simulate.step_index import index_step

_VERSION = 1
_MICRO = 1e6
_LEAST_US = 1e-3
_STOOD_STILL = 0.1
"""A wait whose share of the time since the issue is larger stood still until its collective was done."""
_GRID = tuple(1 << power for power in range(12, 32, 2))


@dataclass(frozen=True)
class MeasuredNode:
    """One operator of what was measured together, with its work."""

    key: str
    """The operator with shapes and dtypes."""
    work: NodeWork


@dataclass(frozen=True)
class ProfileRow:
    """A node, or the nodes of a compiled region, and their microseconds."""

    nodes: tuple[MeasuredNode, ...]
    us: float


@dataclass(frozen=True)
class StepProfile:
    """Measured times of a step."""

    rows: tuple[ProfileRow, ...]
    device: str = ""

    def to_json(self) -> str:
        """The profile as versioned JSON."""
        return json.dumps({"version": _VERSION, "device": self.device, "rows": [asdict(row) for row in self.rows]})

    @classmethod
    def from_json(cls, text: str) -> StepProfile:
        """Read what `to_json` wrote."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise OptionError("not the JSON of a profile, or of another version.", fix="record it again.")
        rows = tuple(
            ProfileRow(tuple(MeasuredNode(each["key"], _work(each["work"])) for each in row["nodes"]), row["us"])
            for row in found["rows"]
        )
        return cls(rows, found.get("device", ""))


def _work(data: dict[str, object]) -> NodeWork:
    spread = data.pop("spread", None)
    return NodeWork(**data, spread=GroupSpread(**spread) if isinstance(spread, dict) else None)  # type: ignore[arg-type]


def profile_of(
    given: StepGraph | fx.GraphModule | fx.Graph,
    times: Mapping[str, Sequence[float]],
    *,
    collectives: Mapping[str, Sequence[Sequence[float]]] | None = None,
    regions: Mapping[str, Sequence[str]] | None = None,
    groups: Mapping[str, GroupSpread] | None = None,
    machine: Machine | None = None,
    device: str = "",
) -> StepProfile:
    """A profile from measured microseconds.

    `times`: of each node or region, one for every run. `collectives`: of each collective, for every rank one for every
    run. `regions`: the nodes of each region. `machine`: whose nodes have as many ranks as the one measured on.
    """
    index = index_step(given)
    works = node_works(index, machine or Machine(), groups)
    of_name = {node.name: i for i, node in enumerate(index.nodes)}

    def measured(names: Sequence[str]) -> tuple[MeasuredNode, ...]:
        unknown = [name for name in names if name not in of_name]
        if unknown:
            raise OptionError(f"the graph has no node {unknown[0]!r}.", fix="measure the graph that you give.")
        found = [(of_name[name], works[of_name[name]]) for name in names]
        return tuple(MeasuredNode(key_of(index.nodes[i]), work) for i, work in found if work is not None)

    rows = [
        ProfileRow(measured((regions or {}).get(name, (name,))), statistics.median(runs))
        for name, runs in times.items()
        if runs
    ]
    for name, ranks in (collectives or {}).items():
        shortest = [min(runs) for runs in zip(*ranks, strict=True)]
        if shortest:
            rows.append(ProfileRow(measured((name,)), statistics.median(shortest)))
    return StepProfile(tuple(row for row in rows if row.nodes), device)


def collective_times(
    groups: Mapping[str, str], spans: Mapping[str, tuple[float, float]], waits: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """How long collectives of one run took, where that can be told from the spans of their issue and their wait.

    A collective begins when it was issued and the one before it in its group is done. It ends with its wait if that
    stood still; otherwise it ended at some time before."""
    found: dict[str, float] = {}
    done: dict[str, tuple[float, bool]] = {}
    for name in sorted(waits, key=lambda each: spans[each]):
        issued, end = spans[name][0], waits[name][1]
        before, is_exact = done.get(groups[name], (issued, True))
        stood_still = end - waits[name][0] > _STOOD_STILL * (end - issued)
        if stood_still and (is_exact or before <= issued):
            found[name] = end - max(issued, before)
        done[groups[name]] = end, stood_still
    return found


def calibrate(machine: Machine, profile: StepProfile) -> Machine:
    """The machine with what was measured: factors for operators and shapes, and rows of collective times."""
    by_key: dict[str, list[tuple[float, float]]] = {}
    by_operator: dict[str, list[tuple[float, float]]] = {}
    collectives: dict[tuple[str, GroupSpread], dict[int, list[float]]] = {}
    for row in profile.rows:
        modelled = [each.work.seconds(machine) * _MICRO for each in row.nodes]
        whole = sum(modelled)
        if len(row.nodes) == 1 and row.nodes[0].work.what == COLLECTIVE:
            work = row.nodes[0].work
            assert work.spread is not None
            sizes = collectives.setdefault((work.operator, work.spread), {})
            sizes.setdefault(work.moved, []).append(row.us / _MICRO)
            continue
        if whole < _LEAST_US:
            continue
        for each, us in zip(row.nodes, modelled, strict=True):
            pair = (row.us * us / whole, us)
            by_key.setdefault(each.key, []).append(pair)
            by_operator.setdefault(each.work.operator, []).append(pair)
    factors = {key: _factor(pairs) for key, pairs in (*by_operator.items(), *by_key.items()) if _factor(pairs) > 0}
    corrections = tuple(sorted({**machine.correction, **factors}.items()))
    return replace(machine, corrections=corrections, collectives=_with_rows(machine.collectives, collectives))


def _factor(pairs: list[tuple[float, float]]) -> float:
    modelled = sum(us for _, us in pairs)
    return sum(measured for measured, _ in pairs) / modelled if modelled >= _LEAST_US else 0.0


def _with_rows(
    model: CollectiveModel, measured: Mapping[tuple[str, GroupSpread], Mapping[int, Sequence[float]]]
) -> CollectiveModel:
    """Measured sizes as rows; larger and smaller ones as modelled, by the factor of the nearest measured size."""
    rows = {(row.kind, row.spread): row for row in model.measured}
    for (kind, spread), sizes in measured.items():
        seconds = {size: statistics.median(runs) for size, runs in sizes.items()}
        smallest, largest = min(seconds), max(seconds)
        for size in (*_GRID, *(rows[kind, spread].sizes if (kind, spread) in rows else ())):
            if not smallest <= size <= largest:
                nearest = smallest if size < smallest else largest
                seconds[size] = model.seconds(kind, spread, size) * _ratio(
                    model, kind, spread, nearest, seconds[nearest]
                )
        rows[kind, spread] = MeasuredCollective(
            kind, spread, tuple(sorted(seconds)), tuple(seconds[size] for size in sorted(seconds))
        )
    return replace(model, measured=tuple(rows.values()))


def _ratio(model: CollectiveModel, kind: str, spread: GroupSpread, size: int, seconds: float) -> float:
    modelled = model.seconds(kind, spread, size)
    return seconds / modelled if modelled > 0.0 else 1.0
