"""Many collectives as one: which go together, and how their operands travel in one flat tensor.

A collective has a place where its operand is ready and a place where its result is first needed. Collectives may share
a bucket if the last operand is ready before the first result is needed: then nothing else has to move, and no cycle
can arise. Where a result is used at once by elementwise followers (a division, a cast), these may move down with it
(`late_uses`). `plan_buckets` packs collectives in graph order; what cannot join the open bucket opens the next one.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from wholestep._torch_compat import FakeTensor, fake_tensor
from wholestep.ir.comm_block import CommBlock, comm_block, is_part
from wholestep.ir.graphs import epilogue
from wholestep.ir.groups import group_of, group_size
from wholestep.ir.meta import node_meta
from wholestep.passes.write_windows import WriteWindows

aten = torch.ops.aten
comm = torch.ops._c10d_functional

MEBIBYTE = 2**20
FIRST_BUCKET = 1.0
"""MiB of the first bucket: communication starts early."""


@dataclass(eq=False)
class Member:
    """One collective that may share a bucket."""

    block: CommBlock
    ready: int
    """Position of its last input."""
    needed: float
    """Position of the first node that reads its result, through waits and views."""
    bytes: int
    key: Any
    followers: list[fx.Node] = field(default_factory=list)
    """Views behind its wait, which move along."""
    prelude: list[fx.Node] = field(default_factory=list)
    """Casts, padding and views that only make the operand of this collective; they move along too. A rank with a
    shorter shard pads where others do not, and must come to the same buckets."""
    overwritten: float = math.inf
    """Position of the next write into its operand."""
    pushed: bool = False
    """Whether elementwise followers have to move down for `needed` to be true."""

    @property
    def node(self) -> fx.Node:
        return self.block.collective

    @property
    def operand(self) -> fx.Node:
        operand = self.node.args[0]
        assert isinstance(operand, fx.Node)
        return operand

    @property
    def sources(self) -> list[fx.Node]:
        """What the operand is made from."""
        return (self.prelude[0] if self.prelude else self.node).all_input_nodes

    @property
    def wait(self) -> fx.Node:
        return self.block.waits[0]


class Positions:
    """Where nodes stand, and who first reads what; from one walk over the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.of = dict(zip(self.nodes, range(len(self.nodes)), strict=True))
        self.inputs = max((self.of[node] for node in graph.find_nodes(op="placeholder", sort=False)), default=-1)
        """Position of the last input: nothing goes before it."""
        self.end = len(self.nodes) - 1 - len(epilogue(graph))
        """Position of the first write-back, or of the output: nothing goes behind it."""

        self.windows = WriteWindows(self.nodes, self.end)

    def having(self, target: Any) -> list[fx.Node]:
        """The nodes with a target, in graph order."""
        return [node for node in self.nodes if node.target is target]

    def ready(self, node: fx.Node) -> int:
        """After which position a node may stand."""
        return max((self.of[source] for source in node.all_input_nodes), default=-1)

    def needed(self, bucket: list[Member]) -> int:
        """Before which position the results of a bucket must be there."""
        return int(min(self.end, *(member.needed for member in bucket)))

    def follow(self, wait: fx.Node) -> tuple[float, list[fx.Node]]:
        """Where the result of a wait is first really used, and the views in between."""
        first, followers, stack = math.inf, [], [wait]
        while stack:
            for user in stack.pop().users:
                if is_part(user):
                    followers.append(user)
                    stack.append(user)
                else:
                    first = min(first, self.of[user])
        return first, sorted(followers, key=self.of.__getitem__)


def find_members(graph: fx.Graph, positions: Positions, op: Any) -> list[Member]:
    """The collectives of one operator that can share a bucket, in graph order."""
    found = []
    for node in positions.having(op):
        if not isinstance(node.args[0], fx.Node):
            continue
        val = node.args[0].meta.get("val")
        block = comm_block(node)
        result = node.meta.get("val")
        if (
            not isinstance(val, Tensor)
            or not isinstance(result, Tensor)
            or len(block.waits) != 1
            or block.parts
            or block.misused
            or any(user.target is not aten.sym_size.int for user in block.measures)
        ):
            continue
        needed, followers = positions.follow(block.waits[0])
        prelude = _prelude(node)
        meta = node_meta(node)
        scalars = (*node.args[1:], group_of(node), val.dtype, str(val.device), meta.recompute, meta.generation)
        key = (node.target, *map(str, scalars))
        size = max(_bytes(val), _bytes(result))
        first = prelude[0] if prelude else node
        last_write, next_write = positions.windows.around(first.all_input_nodes, positions.of[node])
        ready, needed = max(positions.ready(first), last_write), min(needed, next_write)
        found.append(Member(block, ready, needed, size, key, followers, prelude, next_write))
    return found


_PREPARES = frozenset(
    {
        aten._to_copy.default,
        aten.constant_pad_nd.default,
        aten.clone.default,
        aten.view.default,
        aten.reshape.default,
        aten.slice.Tensor,
    }
)


def _prelude(collective: fx.Node) -> list[fx.Node]:
    chain: list[fx.Node] = []
    node = collective.args[0]
    while isinstance(node, fx.Node) and node.target in _PREPARES and len(node.users) == 1:
        chain.append(node)
        if len(node.all_input_nodes) != 1:
            return []
        node = node.all_input_nodes[0]
    return chain[::-1]


def _bytes(val: Tensor) -> int:
    total = val.element_size()
    sizes: list[Any] = list(val.shape)
    for size in sizes:
        total *= size if type(size) is int else int(size.node.hint or 1)
    return total


def plan_buckets(
    members: Iterable[Member],
    bucket_size_mb: float,
    start: Callable[[Member], int],
    *,
    small_first: bool = True,
    late: Callable[[fx.Node], float] | None = None,
) -> list[list[Member]]:
    """Buckets in the order in which they begin; `start` is where a member's bucket may begin at the earliest.

    `late` says where what a wait gives is needed at the latest, if what uses it at once moves; asked only where that
    lets another one join.
    """
    open_: dict[Any, _Open] = {}
    limit: dict[Any, float] = {}
    done: list[list[Member]] = []
    cap = bucket_size_mb * MEBIBYTE
    for member in members:
        key = member.key
        limit.setdefault(key, min(cap, FIRST_BUCKET * MEBIBYTE) if small_first else cap)
        bucket = open_.get(key)
        if bucket is not None and not bucket.take(member, start(member), limit[key]):
            done.append(bucket.members)
            limit[key] = cap
            bucket = None
        if bucket is None:
            open_[key] = _Open(member, start(member), late)
    done.extend(bucket.members for bucket in open_.values())
    return [bucket for bucket in done if len(bucket) > 1]


class _Open:
    """A bucket that others may still join."""

    def __init__(self, first: Member, begun: int, late: Callable[[fx.Node], float] | None) -> None:
        self.members = [first]
        self._bytes, self._begun, self._late = first.bytes, begun, late
        self._needed = [(first.needed, 0)]
        """Heap of where the results are needed, with the number of the member."""

    def take(self, member: Member, start: int, limit: float) -> bool:
        """Take one more, if it fits and no result is needed before the bucket begins."""
        begun = max(self._begun, start)
        if self._bytes + member.bytes > limit:
            return False
        later: list[tuple[float, int]] = []
        while self._needed and self._needed[0][0] <= begun:
            number = heapq.heappop(self._needed)[1]
            later.append((self._later(self.members[number]), number))
            if later[-1][0] <= begun:
                return False
        joining = member if member.needed > begun else replace(member, needed=self._later(member), pushed=True)
        if joining.needed <= begun:
            return False
        for needed, number in later:
            self.members[number] = replace(self.members[number], needed=needed, pushed=True)
            heapq.heappush(self._needed, (needed, number))
        heapq.heappush(self._needed, (joining.needed, len(self.members)))
        self.members.append(joining)
        self._bytes, self._begun = self._bytes + member.bytes, begun
        return True

    def _later(self, member: Member) -> float:
        if self._late is None or member.pushed:
            return member.needed
        return min(self._late(member.wait), member.overwritten)


# Rewriting.


class Writer:
    """Puts nodes into a graph at one place, each with its value where the shapes are plain numbers."""

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node) -> None:
        self._graph = graph
        self._before = before
        self._meta = node_meta(like)

    def call(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        """A node right before the place. Without `val` the manager finds it out, which costs more."""
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

    def view(self, node: fx.Node, wanted: Tensor, sizes: list[Any]) -> fx.Node:
        """A tensor in the shape of another one."""
        val = node.meta.get("val")
        # A contiguous tensor of the same kind looks the same already.
        same = isinstance(val, FakeTensor) and wanted.dtype == val.dtype and wanted.is_contiguous()
        found = wanted if same and _is_plain(wanted.shape) else like(val, wanted.shape)
        return self.call(aten.view.default, node, sizes, val=found)

    def sizes(self, member: Member) -> list[Any]:
        """The shape of a member's result, from that of its operand; symbolic sizes as nodes."""
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
        """The number of elements, as a number or a node."""
        count = node.meta["val"].numel()
        return count if type(count) is int else self.call(aten.sym_numel.default, node)

    def cat(self, nodes: list[fx.Node], dim: int = 0) -> fx.Node:
        """Tensors end to end."""
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
    """A fake of another shape; None where the shape is not plain numbers."""
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
    """One all-reduce of all operands laid end to end; `place` is where the results are needed."""
    first = bucket[0].node
    begin = _before(graph, bucket, at)
    flats = [begin.flat(member.operand) for member in bucket]
    sizes = [begin.numel(member.operand) for member in bucket]
    shapes = [begin.sizes(member) for member in bucket]
    whole = begin.cat(flats)
    val = whole.meta.get("val")
    fused = begin.call(first.target, whole, *first.args[1:], val=val)
    finish = _after_wait(graph, bucket, place)
    done = finish.call(comm.wait_tensor.default, fused, val=val)
    for member, part, shape in zip(bucket, finish.split(done, sizes, 0), shapes, strict=True):
        member.wait.replace_all_uses_with(finish.view(part, member.operand.meta["val"], shape))
    _erase(graph, bucket)
    return fused


def fuse_reduce_scatter(graph: fx.Graph, bucket: list[Member], at: fx.Node, place: fx.Node) -> fx.Node:
    """One reduce-scatter: the rows of each rank side by side."""
    first, size = bucket[0].node, group_size(bucket[0].node)
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
    fused = begin.call(first.target, whole, *first.args[1:], val=mine)
    finish = _after_wait(graph, bucket, place)
    done = finish.call(comm.wait_tensor.default, fused, val=mine)
    for member, part, form in zip(bucket, finish.split(done, sizes, 0), shapes, strict=True):
        member.wait.replace_all_uses_with(finish.view(part, member.node.meta["val"], form))
    _erase(graph, bucket)
    return fused


def fuse_all_gather(graph: fx.Graph, bucket: list[Member], at: fx.Node, place: fx.Node) -> fx.Node:
    """One all-gather of all shards laid end to end; each whole is then collected from the ranks' pieces."""
    first, size = bucket[0].node, group_size(bucket[0].node)
    begin = _before(graph, bucket, at)
    flats = [begin.flat(member.operand) for member in bucket]
    sizes = [begin.numel(member.operand) for member in bucket]
    shapes = [begin.sizes(member) for member in bucket]
    whole = begin.cat(flats)
    val = whole.meta.get("val")
    each = val.numel() if isinstance(val, Tensor) else None
    everything = like(val, None if each is None else [size * each])
    fused = begin.call(first.target, whole, *first.args[1:], val=everything)
    finish = _after_wait(graph, bucket, place)
    done = finish.call(comm.wait_tensor.default, fused, val=everything)
    table = finish.call(aten.view.default, done, [size, -1], val=like(val, None if each is None else [size, each]))
    for member, part, shape in zip(bucket, finish.split(table, sizes, 1), shapes, strict=True):
        piece = part.meta.get("val")
        own = finish.call(
            aten.clone.default,
            part,
            memory_format=torch.contiguous_format,
            val=like(piece, None if piece is None else piece.shape),
        )
        member.wait.replace_all_uses_with(finish.view(own, member.node.meta["val"], shape))
    _erase(graph, bucket)
    return fused


def _before(graph: fx.Graph, bucket: list[Member], at: fx.Node) -> Writer:
    """The place where a bucket begins; what makes its operands moves there."""
    preludes = {node: None for member in bucket for node in member.prelude}
    while at in preludes:
        at = at.next
    for node in preludes:
        at.prepend(node)
    for member in bucket:
        for user in member.block.measures:
            # Who asks the collective for its size, on the way, asks the operand.
            user.replace_all_uses_with(Writer(graph, user, user).size(member, user.args[1]))  # type: ignore[arg-type]
            graph.erase_node(user)
    return Writer(graph, at, bucket[0].node)


def _after_wait(graph: fx.Graph, bucket: list[Member], place: fx.Node) -> Writer:
    """The place right before the first use of any result; views behind the old waits move there too."""
    views = [view for member in bucket for view in member.followers]
    for view in views:
        place.prepend(view)
    return Writer(graph, views[0] if views else place, bucket[0].wait)


def _erase(graph: fx.Graph, bucket: list[Member]) -> None:
    for member in bucket:
        graph.erase_node(member.wait)
        graph.erase_node(member.node)
