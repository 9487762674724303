"""When buckets pay: collectives that are exposed because each of them takes its latency.

    four gathers of 16 KiB, 80 us each       one gather of 64 KiB, 82 us, and a copy out of it

Packing takes copies and memory, so it is tried only where the best schedule without it leaves time exposed that is
latency: of the collective itself, or of a stream that is busy all the time. Each size of buckets is tried on a copy of
the graph, which is scheduled as a whole; whether it pays is what the simulator says of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from wholestep.passes.comm_fusion import (
    DEFAULT_BUCKET_MB,
    bucket_all_gather,
    bucket_reduce_scatter,
    comm_fusion_with_concat,
)
from wholestep.simulate.cost_model import sent_bytes
from wholestep.simulate.exposed_collectives import stalls
from wholestep.simulate.step_index import Order, StepIndex
from wholestep.simulate.step_replay import StreamRules, replay

_LEAST_PART = 0.03
"""Of the step, that must be exposed latency."""
_BUSY = 0.8
_LATENCIES = (8.0, 2.0, 0.5)
_LARGE_GRAPH, _FEW_SIZES = 8_000, 2
_MEBIBYTE = 2**20


def pack(gm: fx.GraphModule, mebibytes: float, *, only_exact: bool) -> None:
    """Put the collectives of a graph into buckets of at most so many MiB. `only_exact`: gathers alone."""
    if not only_exact:
        comm_fusion_with_concat.function(gm, mebibytes)
        bucket_reduce_scatter.function(gm, mebibytes)
    bucket_all_gather.function(gm, mebibytes)


def worth_a_try(index: StepIndex, cost: Sequence[float], order: Order, rules: StreamRules) -> bool:
    """Whether enough of what is exposed is latency."""
    latency = _latencies(index, cost)
    found = replay(index, cost, order, rules)
    if not found.step:
        return False
    of_group: dict[int, list[float]] = {}
    for c in index.collectives:
        sums = of_group.setdefault(index.group[c], [0.0, 0.0])
        sums[0] += latency[c]
        sums[1] += cost[c]
    exposed = 0.0
    for stall in stalls(index, found):
        c = stall.collective
        of_latency, busy = of_group[index.group[c]]
        part = latency[c] / cost[c] if cost[c] else 0.0
        if busy > _BUSY * found.step:
            part = max(part, of_latency / busy)
        exposed += part * stall.us
    return exposed > _LEAST_PART * found.step


def sizes(index: StepIndex, cost: Sequence[float]) -> list[float]:
    """Sizes of buckets in MiB that are worth a try: at which a collective takes a few times its latency. What is larger
    than the default bucket is left in two."""
    latency = _latencies(index, cost)
    slow = sorted(latency[c] for c in index.collectives if latency[c] > 0.0)
    if not slow:
        return []
    rates = sorted(_bytes(index, c) / (cost[c] - latency[c]) for c in index.collectives if cost[c] > latency[c] > 0.0)
    in_latency = slow[len(slow) // 2] * (rates[len(rates) // 2] if rates else _MEBIBYTE) / _MEBIBYTE
    together: dict[object, float] = {}
    for c in index.collectives:
        key = index.nodes[c].target, index.group[c]
        together[key] = together.get(key, 0.0) + _bytes(index, c) / _MEBIBYTE
    most = max(together.values())
    most = most / 2.0 if most > DEFAULT_BUCKET_MB else most
    wanted = {min(factor * in_latency, most) for factor in _LATENCIES} | {min(DEFAULT_BUCKET_MB, most)}
    largest_first = sorted(wanted, reverse=True)
    return largest_first[-_FEW_SIZES:] if len(index) > _LARGE_GRAPH else largest_first


def _bytes(index: StepIndex, c: int) -> int:
    made = sum(int(index.sizes[s]) for s in index.made[c])
    return max(sent_bytes(index.nodes[c]), made)


def _latencies(index: StepIndex, cost: Sequence[float]) -> dict[int, float]:
    """The part of each collective's time that it would take for one byte, from collectives of the same kind."""
    alike: dict[tuple[object, int], list[tuple[int, float, int]]] = {}
    for c in index.collectives:
        key = index.nodes[c].target, index.group[c]
        alike.setdefault(key, []).append((_bytes(index, c), cost[c], c))
    found: dict[int, float] = {}
    for members in alike.values():
        small, least, _ = min(members)
        large, most, _ = max(members)
        slope = max(most - least, 0.0) / (large - small) if large > small else 0.0
        start = max(least - slope * small, 0.0) if slope else 0.5 * least
        for _, time, c in members:
            found[c] = min(start, time)
    return found
