"""One collective for many small ones: all-reduces, reduce-scatters and all-gathers in buckets of some MiB.

    before                                  after
    a = all_reduce(g1, 'avg', '0')          flat = cat([view(g1, [-1]), view(g2, [-1])])
    w1 = wait_tensor(a)                     f = all_reduce(flat, 'avg', '0')
    b = all_reduce(g2, 'avg', '0')          ...
    w2 = wait_tensor(b)                     parts = split_with_sizes(wait_tensor(f), [n1, n2])
    ...                                     w1, w2 = view(parts[0], ..), view(parts[1], ..)
    p1 = add(p, w1)                         p1 = add(p, w1)

Needs: nothing.  Numerics: reassociates (a backend may add ranks in another order at another place of the buffer);
gathers are exact.  A reduction starts right after its last operand is ready; a gather where the first of its bucket
stood, so that parameters are not gathered before their time.  Bucket key: operator, reduce op, group, dtype, device.
What cannot join the open bucket opens the next one.  The first bucket of reductions is small, so that communication
starts early, as far as that costs no further collective.  A parameter that is gathered again, by its backward, in the
bucket of its forward (the last layers; in a small model all) travels once: at the turn from forward to backward both
would be held anyway.  The collectives move, their waits and the views behind them; where results are used at once (a
division, a cast), so do these elementwise uses, as far down as the bucket needs.  The results of one bucket are views
of one tensor.  Cost: one walk over the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import fx

from wholestep.errors import invalid_value
from wholestep.passes.bucket_rewrites import fuse_all_gather, fuse_all_reduce, fuse_reduce_scatter
from wholestep.passes.buckets import Member, Positions, find_members, plan_buckets
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.late_uses import LateUses
from wholestep.passes.plain_collectives import make_plain

comm = torch.ops._c10d_functional

DEFAULT_BUCKET_MB = 25.0


def _check(bucket_size_mb: float) -> None:
    given: Any = bucket_size_mb
    if not isinstance(given, int | float) or not given > 0:
        raise invalid_value("bucket_size_mb", bucket_size_mb, "use a number of MiB above 0; fractions are fine.")


@graph_optimization_pass(numerics="reassociates", check=_check, only_for=[comm.all_reduce.default])
def comm_fusion_with_concat(gm: fx.GraphModule, bucket_size_mb: float = DEFAULT_BUCKET_MB) -> None:
    """Bucket the all-reduces of a graph."""
    _reductions(gm, comm.all_reduce.default, bucket_size_mb, fuse_all_reduce)


@graph_optimization_pass(numerics="reassociates", check=_check, only_for=[comm.reduce_scatter_tensor.default])
def bucket_reduce_scatter(gm: fx.GraphModule, bucket_size_mb: float = DEFAULT_BUCKET_MB) -> None:
    """Bucket the reduce-scatters of a graph."""
    _reductions(gm, comm.reduce_scatter_tensor.default, bucket_size_mb, fuse_reduce_scatter)


@graph_optimization_pass(numerics="exact", check=_check, only_for=[comm.all_gather_into_tensor.default])
def bucket_all_gather(gm: fx.GraphModule, bucket_size_mb: float = DEFAULT_BUCKET_MB) -> None:
    """Bucket the all-gathers of a graph."""
    op = comm.all_gather_into_tensor.default
    _make_plain(gm.graph, op)
    for now, positions in _rounds(gm.graph, op):
        # Where the first of a bucket stood, the shards of all others must be at hand.
        for bucket in plan_buckets(now, bucket_size_mb, small_first=False):
            for part in _from_the_first(bucket, positions):
                if len(part) > 1:
                    fuse_all_gather(gm.graph, part, part[0].node, positions.nodes[positions.needed(part)])


def _from_the_first(bucket: list[Member], positions: Positions) -> list[list[Member]]:
    """Cut a bucket where an operand is made after the place of the first gather."""
    parts: list[list[Member]] = []
    for member in bucket:
        if parts and member.ready < positions.of[parts[-1][0].node]:
            parts[-1].append(member)
        else:
            parts.append([member])
    return parts


def _rounds(graph: fx.Graph, op: Any) -> Iterator[tuple[list[Member], Positions]]:
    """The collectives of one operator that can share buckets now.

    A collective of what another one gives (two axes) has its turn when that one has found its place.
    """
    left: set[fx.Node] | None = None
    while left is None or left:
        positions = Positions(graph)
        members = [m for m in find_members(graph, positions, op) if left is None or m.node in left]
        later = {view for member in members for view in (member.wait, *member.followers)}
        now = [member for member in members if later.isdisjoint(member.sources)]
        left = {member.node for member in members}.difference(member.node for member in now)
        if now:
            yield now, positions


def _reductions(gm: fx.GraphModule, op: Any, bucket_size_mb: float, fuse: Any) -> None:
    _make_plain(gm.graph, op)
    for found, positions in _rounds(gm.graph, op):
        now = sorted(found, key=lambda member: member.ready)
        # What a bucket is made from stays where it is, or the bucket could not begin there.
        fixed = {node for member in now for node in (*member.sources, *member.prelude)}
        uses = LateUses(positions.nodes, positions.of, positions.end, positions.windows, fixed)
        buckets = plan_buckets(now, bucket_size_mb, late=uses.late)
        _apply(gm.graph, now, buckets, positions, uses, fuse)


def _apply(
    graph: fx.Graph, now: list[Member], buckets: list[list[Member]], positions: Positions, uses: LateUses, fuse: Any
) -> None:
    """Put collectives, buckets and the uses that wait for them where they were planned."""
    fused = {member.node for bucket in buckets for member in bucket}
    pushed: dict[fx.Node, int] = {}
    places = [positions.needed(bucket) for bucket in buckets]
    for bucket, place in zip(buckets, places, strict=True):
        for node in uses.behind([member.wait for member in bucket if member.pushed], place):
            pushed[node] = max(place, pushed.get(node, 0))
    leaving = {n for m in now for n in (*m.prelude, m.node, m.wait, *m.followers)}.union(pushed)
    for member in now:
        if member.node not in fused:
            _hoist(member, positions)
    for bucket, place in zip(buckets, places, strict=True):
        last = max(member.ready for member in bucket)
        at = positions.nodes[max(last, positions.inputs)]
        fuse(graph, bucket, at.next, _staying(positions, place, leaving))
    for node in sorted(pushed, key=positions.of.__getitem__):
        _staying(positions, pushed[node], leaving).prepend(node)


def _staying(positions: Positions, place: int, leaving: set[fx.Node]) -> fx.Node:
    """The first node from a place on that neither moves nor goes."""
    return next(node for node in islice(positions.nodes, place, None) if node not in leaving)


def _make_plain(graph: fx.Graph, op: Any) -> None:
    make_plain(graph, graph.find_nodes(op="call_function", target=op))


def _hoist(member: Member, positions: Positions) -> None:
    """Start a collective right after its operand is ready."""
    place = positions.nodes[max(member.ready, positions.inputs)]
    if positions.of[place] < positions.of[member.node] - 1 - len(member.prelude):
        for node in (*member.prelude, member.node):
            place.append(node)
            place = node
