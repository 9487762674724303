"""Follow a part of the rows of a tensor through a graph: which nodes can be computed for one part at a time.

    x                     [1024, 4096]      rows 0..511 and 512..1023 of each rank
    g = all_gather(x, 8)  [8192, 4096]      8 blocks of 1024 rows, in each of them rows 0..511: `Chunked(0, 8, 1024, 1)`
    y = mm(g, w)          [8192, 512]       the same rows
    v = view(y, [2, 4, 1024, 512])          `Chunked(2, 1, 1024, 1)`
    r = reduce_scatter(y, 8)                `Chunked(0, 1, 1024, 1)`

A node has a rule if, computed for such a part of its operands, it gives that part of its result and needs nothing else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.call_arguments import argument
from wholestep.ir.effects import is_wait, may_draw, may_write
from wholestep.torch_private.operators import OpOverload

aten = torch.ops.aten
comm = torch.ops._c10d_functional


@dataclass(frozen=True)
class Chunked:
    """A dimension of `outer * size * inner` elements, of which the middle index runs over the part."""

    dim: int
    outer: int
    size: int
    inner: int = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape has this dimension."""
        return 0 <= self.dim < len(shape) and shape[self.dim] == self.outer * self.size * self.inner


Found = Mapping[fx.Node, Chunked]
Rule = Callable[[fx.Node, Found], Chunked | None]


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor, if all are known and it lies contiguously."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape):
        return None
    return tuple(value.shape)


def follow(node: fx.Node, found: Found) -> Chunked | None:
    """How the result of a node is chunked if its operands are; None if it cannot be computed in parts."""
    if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
        return None
    rule = _RULES.get(node.target)
    if rule is None and is_wait(node.target):
        rule = _same
    if rule is None and _is_pointwise(node):
        rule = _pointwise
    chunk = None if rule is None else rule(node, found)
    if chunk is None or node.target in _LISTS:
        return chunk
    shape = shape_of(node)
    return chunk if shape is not None and chunk.fits(shape) else None


def with_sizes(node: fx.Node, chunk: Chunked, parts: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a node for one of some parts: sizes that it is given are those of the part. `chunk`: its own."""
    args = list(arguments)
    if node.target in _VIEWS:
        sizes = list(args[1])
        if sizes[chunk.dim] != -1:
            sizes[chunk.dim] //= parts
        args[1] = sizes
    elif node.target is aten.split.Tensor and _dim(node) == chunk.dim:
        args[1] //= parts
    elif node.target is comm.all_to_all_single.default and chunk.dim == 0:
        args[1], args[2] = ([piece // parts for piece in pieces] for pieces in args[1:3])
    return tuple(args)


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, OpOverload)
        and (torch.Tag.pointwise in target.tags or target in _COPIES)
        and not may_write(target)
        and not may_draw(target)
    )


def _only(node: fx.Node, found: Found) -> Chunked | None:
    """The operand that is chunked, if it is the first argument and no other one is."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or any(n in found for n in node.all_input_nodes if n is not first):
        return None
    return found.get(first)


_same = _only


def _gather(node: fx.Node, found: Found) -> Chunked | None:
    chunk, ranks = _only(node, found), argument(node, "group_size")
    if chunk is None or chunk.dim:
        return chunk
    return replace(chunk, outer=chunk.outer * ranks)


def _scatter(node: fx.Node, found: Found) -> Chunked | None:
    chunk, ranks = _only(node, found), argument(node, "group_size")
    if chunk is None or chunk.dim:
        return chunk
    return None if chunk.outer % ranks else replace(chunk, outer=chunk.outer // ranks)


def _exchange(node: fx.Node, found: Found) -> Chunked | None:
    chunk = _only(node, found)
    if chunk is None or chunk.dim:
        return chunk
    pieces = [*_ints(node.args[1]), *_ints(node.args[2])]
    block = chunk.size * chunk.inner
    return chunk if pieces and len(set(pieces)) == 1 and pieces[0] % block == 0 else None


def _ints(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) and all(type(each) is int for each in value) else []


def _view(node: fx.Node, found: Found) -> Chunked | None:
    chunk, old, new = _only(node, found), shape_of(node.args[0]), shape_of(node)
    if chunk is None or old is None or new is None:
        return None
    stride = chunk.inner * math.prod(old[chunk.dim + 1 :])
    behind = 1
    for dim in range(len(new) - 1, -1, -1):
        if stride % behind == 0 and (behind * new[dim]) % (stride * chunk.size) == 0:
            return Chunked(dim, behind * new[dim] // (stride * chunk.size), chunk.size, stride // behind)
        behind *= new[dim]
    return None


def _permuted(node: fx.Node, found: Found) -> Chunked | None:
    chunk, shape = _only(node, found), shape_of(node)
    if chunk is None or shape is None:
        return None
    rank = len(shape)
    if node.target is aten.permute.default:
        order = [dim % rank for dim in _ints(node.args[1])]
    else:
        given = (0, 1) if node.target is aten.t.default else node.args[1:3]
        one, other = (int(dim) % rank for dim in given)  # type: ignore[arg-type]
        order = list(range(rank))
        order[one], order[other] = other, one
    return replace(chunk, dim=order.index(chunk.dim))


def _dim(node: fx.Node) -> int:
    """The dimension that a node is given, as one of its first tensor."""
    given = argument(node, "dim", 0)
    first = node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
    shape = shape_of(first)
    assert isinstance(given, int)
    return given % len(shape) if shape else given


def _split(node: fx.Node, found: Found) -> Chunked | None:
    chunk, size = _only(node, found), node.args[1]
    if chunk is None or not isinstance(size, int) or _dim(node) != chunk.dim:
        return chunk if isinstance(size, int) else None
    block = chunk.size * chunk.inner
    if size % block or (chunk.outer * block) % size:
        return None
    return replace(chunk, outer=size // block)


def _cat(node: fx.Node, found: Found) -> Chunked | None:
    sources = node.args[0]
    if not isinstance(sources, list | tuple) or not sources:
        return None
    chunks = [found.get(source) if isinstance(source, fx.Node) else None for source in sources]
    first = chunks[0]
    if first is None or any(c is None or replace(c, outer=first.outer) != first for c in chunks):
        return None
    if _dim(node) == first.dim:
        return replace(first, outer=sum(c.outer for c in chunks if c is not None))
    return first if all(c == first for c in chunks) else None


def _product(node: fx.Node, found: Found) -> Chunked | None:
    left = 1 if node.target is aten.addmm.default else 0
    chunk = found.get(node.args[left])  # type: ignore[arg-type]
    others = [n for n in node.all_input_nodes if n is not node.args[left]]
    if chunk is None or chunk.dim or node.args[left] is node.args[left + 1] or any(n in found for n in others):
        return None
    bias = shape_of(node.args[0]) if left else None
    return None if bias is not None and len(bias) > 1 else chunk


def _pointwise(node: fx.Node, found: Found) -> Chunked | None:
    shape = shape_of(node)
    if shape is None or any(isinstance(arg, list | tuple) for arg in node.args):
        return None
    result: Chunked | None = None
    for source in node.all_input_nodes:
        chunk, sizes = found.get(source), shape_of(source)
        if chunk is None or sizes is None:
            continue
        seen = replace(chunk, dim=chunk.dim + len(shape) - len(sizes))
        if (result is not None and seen != result) or not seen.fits(shape):
            return None
        result = seen
    if result is None:
        return None
    for source in node.all_input_nodes:
        if source not in found and (
            shape_of(source) is None or (_of_whole(source, shape, result) and result.outer > 1)
        ):
            return None
    return result


def whole_operands(node: fx.Node, chunk: Chunked, found: Found) -> dict[fx.Node, int]:
    """The operands of a pointwise node of which it needs the same part, although they are whole; and the dimension."""
    shape = shape_of(node)
    if shape is None or not _is_pointwise(node):
        return {}
    given = {source: shape_of(source) for source in node.all_input_nodes if source not in found}
    return {
        source: chunk.dim - len(shape) + len(sizes)
        for source, sizes in given.items()
        if sizes is not None and _of_whole(source, shape, chunk)
    }


def _of_whole(source: fx.Node, shape: tuple[int, ...], chunk: Chunked) -> bool:
    """Whether an operand is not broadcast along the dimension that is cut."""
    sizes = shape_of(source) or ()
    at = chunk.dim - len(shape) + len(sizes)
    return at >= 0 and sizes[at] != 1


def _reduced(node: fx.Node, found: Found) -> Chunked | None:
    chunk, shape = _only(node, found), shape_of(node.args[0])
    given = _ints(argument(node, "dim") or [])
    if chunk is None or shape is None or not given:
        return None
    dims = {dim % len(shape) for dim in given}
    keeps = bool(argument(node, "keepdim"))
    if chunk.dim in dims:
        return None
    return chunk if keeps else replace(chunk, dim=chunk.dim - sum(dim < chunk.dim for dim in dims))


_COPIES = frozenset({aten.clone.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default})
_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_LISTS = frozenset({aten.split.Tensor})
_RULES: dict[Any, Rule] = {
    comm.all_gather_into_tensor.default: _gather,
    comm.reduce_scatter_tensor.default: _scatter,
    comm.all_to_all_single.default: _exchange,
    comm.all_reduce.default: _same,
    **dict.fromkeys(_VIEWS, _view),
    aten.permute.default: _permuted,
    aten.transpose.int: _permuted,
    aten.t.default: _permuted,
    aten.split.Tensor: _split,
    operator.getitem: _same,
    aten.cat.default: _cat,
    aten.mean.dim: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.amax.default: _reduced,
    aten.mm.default: _product,
    aten.addmm.default: _product,
}
