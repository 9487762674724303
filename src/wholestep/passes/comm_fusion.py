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
was, so that parameters are not gathered earlier than needed.  Bucket key: operator, reduce op, group, dtype, device.
What cannot join the open bucket opens the next one.  The first bucket of reductions is small, so that communication
starts early, as far as that costs no further collective.  A parameter that its backward gathers again, in the
bucket of its forward (the last layers; in a small model all), is sent once: at the turn from forward to backward both
would be alive anyway.  The collectives move, their waits and the views behind them; where results are used at once (a
division, a cast), so do these elementwise uses, as far down as the bucket needs.  The results of one bucket are views
of one tensor.  Cost: one walk over the graph.

Where a bucket begins and where its results are needed is planned first (`buckets.py`); then each bucket is rewritten as
above. A new node gets its value where shapes are static, so that no meta kernel has to run.

`LateUses` tells how long the uses of a result can wait. Elementwise uses move down, with their results, to the first
other use.

    w1 = wait(a1); d1 = div(w1, 2)         d1 = div(w1, 2) can stand anywhere before the output,
    b2 = all_reduce(g2); w2 = wait(b2)     so w1 may come as late as that,
    d2 = div(w2, 2)                        and a1 may share a bucket with b2
    output(d1, d2)

Movable are views, casts and elementwise operators that neither write nor draw random numbers; never past a write into
what they read, nor if a collective that is being placed reads them.  Each node is visited once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import invalid_value
from wholestep.ir.collectives import is_part
from wholestep.ir.effects import WriteWindows, is_communication, may_draw, may_write
from wholestep.ir.graph_walks import postorder, reachable
from wholestep.ir.groups import group_size
from wholestep.ir.meta import node_meta
from wholestep.passes.buckets import Member, Positions, find_members, plan_buckets
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.plain_collectives import make_plain
from wholestep.torch_private.fake_tensors import FakeTensor, fake_tensor
from wholestep.torch_private.operators import OpOverload

comm = torch.ops._c10d_functional
aten = torch.ops.aten

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
        # At the place of the first member, the shards of all others must be available.
        for bucket in plan_buckets(now, bucket_size_mb, small_first=False):
            for part in _from_the_first(bucket, positions):
                if len(part) > 1:
                    fuse_all_gather(gm.graph, part, part[0].node, positions.nodes[positions.needed(part)])


def _from_the_first(bucket: list[Member], positions: Positions) -> list[list[Member]]:
    """Cut a bucket where an operand is computed after the place of the first gather."""
    parts: list[list[Member]] = []
    for member in bucket:
        if parts and member.ready < positions.of[parts[-1][0].node]:
            parts[-1].append(member)
        else:
            parts.append([member])
    return parts


def _rounds(graph: fx.Graph, op: Any) -> Iterator[tuple[list[Member], Positions]]:
    """The collectives of one operator that can share buckets now.

    A collective of another one's result (two axes) follows in a round after that one was placed.
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
        # Operands of a bucket stay where they are, or the bucket could not begin there.
        fixed = {node for member in now for node in (*member.sources, *member.prelude)}
        uses = LateUses(positions.nodes, positions.of, positions.end, positions.windows, fixed)
        buckets = plan_buckets(now, bucket_size_mb, late=uses.late)
        _apply(gm.graph, now, buckets, positions, uses, fuse)


def _apply(
    graph: fx.Graph, now: list[Member], buckets: list[list[Member]], positions: Positions, uses: LateUses, fuse: Any
) -> None:
    """Put collectives, buckets and the uses that wait for them at the planned positions."""
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
    """The first node from a position on that is neither moved nor erased."""
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


class Writer:
    """Creates nodes at one place of a graph, each with its value where shapes are static."""

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node) -> None:
        self._graph = graph
        self._before = before
        self._meta = node_meta(like)

    def call(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        """A node right before the place. Without `val` the manager computes the metadata, which costs more."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta["wholestep"] = self._meta
        if val is not None:
            node.meta["val"] = val
        return node

    def flat(self, node: fx.Node) -> fx.Node:
        """A tensor as one dimension."""
        val = node.meta["val"]
        if not val.is_contiguous():
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format, val=like(val, val.shape))
        return node if val.dim() == 1 else self.call(aten.view.default, node, [-1], val=like(val, [val.numel()]))

    def result(self, node: fx.Node, member: Member, sizes: list[Any]) -> fx.Node:
        """A piece in the shape of a member's result; gathers and scatters return contiguous tensors."""
        return self.call(aten.view.default, node, sizes, val=member.node.meta["val"])

    def view(self, node: fx.Node, wanted: Tensor, sizes: list[Any]) -> fx.Node:
        """A tensor in the shape of another one."""
        val = node.meta.get("val")
        # A contiguous tensor of the same shape needs no view.
        same = isinstance(val, FakeTensor) and wanted.dtype == val.dtype and wanted.is_contiguous()
        found = wanted if same and _is_plain(wanted.shape) else like(val, wanted.shape)
        return self.call(aten.view.default, node, sizes, val=found)

    def sizes(self, member: Member) -> list[Any]:
        """The shape of a member's result, computed from that of its operand; symbolic sizes as nodes."""
        shape = member.node.meta["val"].shape
        return [s if type(s) is int else self.size(member, i) for i, s in enumerate(shape)]

    def size(self, member: Member, dim: int) -> fx.Node:
        """One size of a member's result."""
        whole = self.call(aten.sym_size.int, member.operand, dim)
        count = group_size(member.node)
        if dim == 0 and member.node.target is comm.all_gather_into_tensor.default:
            return self.call(operator.mul, whole, count)
        if dim == 0 and member.node.target is comm.reduce_scatter_tensor.default:
            return self.call(operator.floordiv, whole, count)
        return whole

    def numel(self, node: fx.Node) -> Any:
        """The number of elements, as an int or a node."""
        count = node.meta["val"].numel()
        return count if type(count) is int else self.call(aten.sym_numel.default, node)

    def cat(self, nodes: list[fx.Node], dim: int = 0) -> fx.Node:
        """The concatenation of tensors."""
        vals: list[Any] = [node.meta.get("val") for node in nodes]
        total = sum(val.shape[dim] for val in vals) if all(isinstance(val, Tensor) for val in vals) else None
        shape = [*vals[0].shape[:dim], total] if total is not None else None
        return self.call(aten.cat.default, nodes, *([dim] if dim else []), val=like(vals[0], shape))

    def split(self, tensor: fx.Node, sizes: list[Any], dim: int) -> list[fx.Node]:
        """Pieces of a tensor along a dimension."""
        val: Any = tensor.meta.get("val")
        plain = isinstance(val, Tensor) and all(type(size) is int for size in sizes)
        vals = [like(val, [*val.shape[:dim], size], val.stride()) for size in sizes] if plain else None
        pieces = self.call(aten.split_with_sizes.default, tensor, sizes, dim, val=vals)
        found = vals or [None] * len(sizes)
        return [self.call(operator.getitem, pieces, i, val=found[i]) for i in range(len(sizes))]


def like(val: Any, shape: Any, stride: Any = None) -> Any:
    """A fake of another shape; None if the shape is symbolic."""
    if not isinstance(val, FakeTensor) or shape is None or not _is_plain(shape):
        return None
    if stride is None:
        step, strides = 1, []
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        stride = strides[::-1]
    return fake_tensor(val.fake_mode, shape, stride, val.dtype, val.device)


def _is_plain(shape: Iterable[Any]) -> bool:
    return all(type(size) is int for size in shape)


def fuse_all_reduce(graph: fx.Graph, bucket: list[Member], at: fx.Node, place: fx.Node) -> fx.Node:
    """One all-reduce of all operands, concatenated; `place` is where the results are needed."""
    begin = _before(graph, bucket, at)
    whole, sizes, shapes = _end_to_end(begin, bucket)
    fused, finish, done = _talk(graph, bucket, begin, place, whole, whole.meta.get("val"))
    for member, part, shape in zip(bucket, finish.split(done, sizes, 0), shapes, strict=True):
        member.wait.replace_all_uses_with(finish.view(part, member.operand.meta["val"], shape))
    _erase(graph, bucket)
    return fused


def fuse_reduce_scatter(graph: fx.Graph, bucket: list[Member], at: fx.Node, place: fx.Node) -> fx.Node:
    """One reduce-scatter: the rows for each rank are adjacent."""
    size = group_size(bucket[0].node)
    begin = _before(graph, bucket, at)
    rows, sizes = [], []
    for member in bucket:
        flat = begin.flat(member.operand)
        count = member.operand.meta["val"].numel()
        shape = [size, count // size] if type(count) is int else None
        rows.append(begin.call(aten.view.default, flat, [size, -1], val=like(flat.meta.get("val"), shape)))
        sizes.append(count // size if shape else begin.call(operator.floordiv, begin.numel(member.operand), size))
    shapes = [begin.sizes(member) for member in bucket]
    table = begin.cat(rows, 1)
    val = table.meta.get("val")
    total = val.numel() if isinstance(val, Tensor) else None
    whole = begin.call(aten.view.default, table, [-1], val=like(val, None if total is None else [total]))
    mine = like(val, None if total is None else [total // size])
    fused, finish, done = _talk(graph, bucket, begin, place, whole, mine)
    for member, part, form in zip(bucket, finish.split(done, sizes, 0), shapes, strict=True):
        member.wait.replace_all_uses_with(finish.result(part, member, form))
    _erase(graph, bucket)
    return fused


def fuse_all_gather(graph: fx.Graph, bucket: list[Member], at: fx.Node, place: fx.Node) -> fx.Node:
    """One all-gather of all shards, concatenated; each full tensor is then assembled from the pieces of the ranks.

    A parameter that the backward gathers again in the bucket of its forward is sent once.
    """
    size = group_size(bucket[0].node)
    begin = _before(graph, bucket, at)
    once: dict[Any, Member] = {}
    for member in bucket:
        once.setdefault(member.twin_key, member)
    senders = list(once.values())
    whole, sizes, shapes = _end_to_end(begin, senders)
    val = whole.meta.get("val")
    each = val.numel() if isinstance(val, Tensor) else None
    everything = like(val, None if each is None else [size * each])
    fused, finish, done = _talk(graph, bucket, begin, place, whole, everything)
    table = finish.call(aten.view.default, done, [size, -1], val=like(val, None if each is None else [size, each]))
    wholes: dict[Any, fx.Node] = {}
    for member, part, shape in zip(senders, finish.split(table, sizes, 1), shapes, strict=True):
        piece = part.meta.get("val")
        own = finish.call(
            aten.clone.default,
            part,
            memory_format=torch.contiguous_format,
            val=like(piece, None if piece is None else piece.shape),
        )
        wholes[member.twin_key] = finish.result(own, member, shape)
    for member in bucket:
        member.wait.replace_all_uses_with(wholes[member.twin_key])
    _erase(graph, bucket)
    return fused


def _end_to_end(begin: Writer, members: list[Member]) -> tuple[fx.Node, list[Any], list[list[Any]]]:
    """The operands as one flat tensor, the number of elements of each, and the shapes of the results."""
    flats = [begin.flat(member.operand) for member in members]
    sizes = [begin.numel(member.operand) for member in members]
    shapes = [begin.sizes(member) for member in members]
    return begin.cat(flats), sizes, shapes


def _talk(
    graph: fx.Graph, bucket: list[Member], begin: Writer, place: fx.Node, whole: fx.Node, val: Any
) -> tuple[fx.Node, Writer, fx.Node]:
    """The collective of a bucket, and its wait where the results are needed."""
    first = bucket[0].node
    fused = begin.call(first.target, whole, *first.args[1:], val=val)
    finish = _after_wait(graph, bucket, place)
    return fused, finish, finish.call(comm.wait_tensor.default, fused, val=val)


def _before(graph: fx.Graph, bucket: list[Member], at: fx.Node) -> Writer:
    """The place where a bucket begins; the nodes that compute its operands move there."""
    preludes = {node: None for member in bucket for node in member.prelude}
    while at in preludes:
        at = at.next
    for node in preludes:
        if not bucket[0].is_gather or at < node:
            at.prepend(node)
    for member in bucket:
        for user in member.block.measures:
            # A node that reads the size of the collective reads that of the operand.
            user.replace_all_uses_with(Writer(graph, user, user).size(member, user.args[1]))  # type: ignore[arg-type]
            graph.erase_node(user)
    return Writer(graph, at, bucket[0].node)


def _after_wait(graph: fx.Graph, bucket: list[Member], place: fx.Node) -> Writer:
    """The place right before the first use of any result; earlier views behind the old waits move there."""
    views = [view for member in bucket for view in member.followers if view < place]
    for view in views:
        place.prepend(view)
    return Writer(graph, views[0] if views else place, bucket[0].wait)


def _erase(graph: fx.Graph, bucket: list[Member]) -> None:
    for member in bucket:
        graph.erase_node(member.wait)
        graph.erase_node(member.node)


_CASTS = frozenset({aten._to_copy.default, aten.clone.default})


class LateUses:
    """The latest positions at which the results of nodes are needed, if everything movable moves down."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        place: dict[fx.Node, int],
        end: int,
        windows: WriteWindows,
        fixed: Collection[fx.Node],
    ) -> None:
        """`fixed`: nodes that stay although they could move; `end`: no node moves past it."""
        self._nodes, self._place, self._end = nodes, place, end
        self._windows, self._fixed = windows, fixed
        self._late: dict[fx.Node, float] = {}
        self._movable: dict[fx.Node, bool] = {}

    def late(self, wait: fx.Node) -> float:
        """The last position before which a wait can be placed."""
        for node in postorder([wait], lambda n: (u for u in n.users if u not in self._late and self._moves(u))):
            uses = [self._late[user] if self._moves(user) else self._place[user] for user in node.users]
            next_write = self._windows.around([node, *node.all_input_nodes], self._place[node])[1]
            self._late[node] = min(self._end, next_write, *uses)
        return self._late[wait]

    def behind(self, waits: Iterable[fx.Node], place: float) -> list[fx.Node]:
        """The nodes behind some waits that are before a position and have to move there, in graph order."""

        def early(node: fx.Node) -> list[fx.Node]:
            return [user for user in node.users if self._place[user] < place and self._moves(user)]

        found = reachable((user for wait in waits for user in early(wait)), early)
        return sorted(found, key=self._place.__getitem__)

    def _moves(self, node: fx.Node) -> bool:
        known = self._movable.get(node)
        if known is None:
            known = self._movable[node] = node not in self._fixed and is_movable(node)
        return known


def is_movable(node: fx.Node) -> bool:
    """Whether a node computes a new value elementwise, without other effects."""
    target = node.target
    if node.op != "call_function":
        return False
    if is_part(node):
        return True
    if not isinstance(target, OpOverload) or may_write(target) or is_communication(target):
        return False
    return target in _CASTS or (torch.Tag.pointwise in target.tags and not may_draw(target))
