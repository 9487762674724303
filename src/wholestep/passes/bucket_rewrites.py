"""Put buckets into a graph: operands end to end in one flat tensor, one collective, and the results taken apart.

Where a bucket begins and where its results are needed is planned before (`buckets.py`). Each new node gets its value
where the shapes are plain numbers, so that nothing has to be found out by running meta kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.groups import group_size
from wholestep.ir.meta import node_meta
from wholestep.passes.buckets import Member
from wholestep.torch_private.fake_tensors import FakeTensor, fake_tensor

aten = torch.ops.aten
comm = torch.ops._c10d_functional


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

    def result(self, node: fx.Node, member: Member, sizes: list[Any]) -> fx.Node:
        """A piece in the shape of a member's result; what is gathered or scattered is contiguous, as the piece is."""
        return self.call(aten.view.default, node, sizes, val=member.node.meta["val"])

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
    begin = _before(graph, bucket, at)
    whole, sizes, shapes = _end_to_end(begin, bucket)
    fused, finish, done = _talk(graph, bucket, begin, place, whole, whole.meta.get("val"))
    for member, part, shape in zip(bucket, finish.split(done, sizes, 0), shapes, strict=True):
        member.wait.replace_all_uses_with(finish.view(part, member.operand.meta["val"], shape))
    _erase(graph, bucket)
    return fused


def fuse_reduce_scatter(graph: fx.Graph, bucket: list[Member], at: fx.Node, place: fx.Node) -> fx.Node:
    """One reduce-scatter: the rows of each rank side by side."""
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
    """One all-gather of all shards laid end to end; each whole is then collected from the ranks' pieces.

    What is gathered again for a backward in the bucket of its forward travels once.
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
    """The operands as one flat tensor, how many elements each has, and the shapes of the results."""
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
    """The place where a bucket begins; what makes its operands moves there."""
    preludes = {node: None for member in bucket for node in member.prelude}
    while at in preludes:
        at = at.next
    for node in preludes:
        if not bucket[0].is_gather or at < node:
            at.prepend(node)
    for member in bucket:
        for user in member.block.measures:
            # Who asks the collective for its size, on the way, asks the operand.
            user.replace_all_uses_with(Writer(graph, user, user).size(member, user.args[1]))  # type: ignore[arg-type]
            graph.erase_node(user)
    return Writer(graph, at, bucket[0].node)


def _after_wait(graph: fx.Graph, bucket: list[Member], place: fx.Node) -> Writer:
    """The place right before the first use of any result; views behind the old waits that stood earlier move there."""
    views = [view for member in bucket for view in member.followers if view < place]
    for view in views:
        place.prepend(view)
    return Writer(graph, views[0] if views else place, bucket[0].wait)


def _erase(graph: fx.Graph, bucket: list[Member]) -> None:
    for member in bucket:
        graph.erase_node(member.wait)
        graph.erase_node(member.node)
