"""A tensor of logits as rows of classes: which dimension has the classes, followed through views.

    logits    [4, 64, 512]     classes in dimension 2, 256 rows            row values: [4, 64, 1]
    view      [256, 512]       classes in dimension 1, the same rows       row values: [256, 1]

A row value is a tensor with one element per row: a maximum, a sum, a label. It has the shape of the logits with 1 in
the place of the classes, so that it broadcasts, and goes through a view of the logits as a view of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.meta import NodeMeta, node_meta, set_node_meta

aten = torch.ops.aten
PERMUTATIONS = frozenset({aten.transpose.int, aten.permute.default, aten.t.default})
VIEWS = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.reshape.default}
)


@dataclass(frozen=True)
class ClassRows:
    """The shape of a tensor, and its dimension of classes."""

    shape: tuple[int, ...]
    dim: int

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.shape[self.dim]

    @property
    def row_shape(self) -> list[int]:
        """The shape of a row value."""
        return [1 if i == self.dim else size for i, size in enumerate(self.shape)]

    def seen_as(self, shape: tuple[int, ...]) -> ClassRows | None:
        """The same rows in a view of another shape; None if classes and rows are mixed there."""
        before, after = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 :])
        for dim, size in enumerate(shape):
            if size == self.classes and math.prod(shape[:dim]) == before and math.prod(shape[dim + 1 :]) == after:
                return ClassRows(shape, dim)
        return None

    def permuted(self, by: fx.Node) -> ClassRows:
        """The same rows behind a permutation of the dimensions."""
        numbered = torch.empty([i + 1 for i in range(len(self.shape))], device="meta")
        places = [size - 1 for size in by.target(numbered, *by.args[1:]).shape]  # type: ignore[operator]
        return ClassRows(tuple(self.shape[i] for i in places), places.index(self.dim))


def rows_of(node: Any, dim: int) -> ClassRows | None:
    """The rows of a floating-point tensor of static size; None for anything else."""
    val = value_of(node)
    if val is None or not val.is_floating_point() or val.dim() == 0 or not has_static_shape(val):
        return None
    return ClassRows(tuple(val.shape), dim % val.dim()) if val.numel() else None


def is_packed(node: Any) -> bool:
    """Whether a tensor is contiguous."""
    val = value_of(node)
    return val is not None and val.is_contiguous()


def value_of(node: Any) -> Tensor | None:
    """The tensor without data that a node computes, if it computes one."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, Tensor) else None


def has_static_shape(val: Tensor) -> bool:
    """Whether no size of a tensor is symbolic."""
    return all(type(size) is int for size in val.shape)


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of the tensor that a node computes; () where there is none."""
    val = value_of(node)
    return () if val is None else tuple(val.shape)


def readers_through_views(node: fx.Node, rows: ClassRows) -> Iterator[tuple[fx.Node, fx.Node, ClassRows | None]]:
    """Each reader of a tensor, with the view of it that the reader has, and the rows in that view."""
    stack: list[tuple[fx.Node, ClassRows | None]] = [(node, rows)]
    while stack:
        source, seen = stack.pop()
        for user in source.users:
            shown = None if seen is None or user.target not in VIEWS else seen.seen_as(shape_of(user))
            if shown is not None:
                stack.append((user, shown))
            else:
                yield user, source, seen


def without_views(node: fx.Node, rows: ClassRows) -> tuple[fx.Node, ClassRows]:
    """The tensor that a node is a view of, as long as the rows stay the same, and its rows."""
    while node.target in VIEWS and isinstance(source := node.args[0], fx.Node):
        seen = rows.seen_as(shape_of(source))
        if seen is None:
            break
        node, rows = source, seen
    return node, rows


class NodeBuilder:
    """Builds nodes before a place in a graph, with the metadata of the node that they replace."""

    def __init__(self, place: fx.Node, meta: NodeMeta | None = None) -> None:
        self._place = place
        self._meta = node_meta(place) if meta is None else meta

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._place.graph.inserting_before(self._place):
            node = self._place.graph.call_function(target, args, kwargs)
        set_node_meta(node, self._meta)
        return node

    def cast(self, node: fx.Node, have: torch.dtype, want: torch.dtype) -> fx.Node:
        """The value in another dtype; itself if it has it."""
        return node if have is want else self(aten._to_copy.default, node, dtype=want)

    def row_value(self, node: fx.Node, rows: ClassRows) -> fx.Node:
        """A recorded tensor with one element per row, in the shape of a row value; a scalar as it is."""
        val = node.meta["val"]
        if not val.dim() or list(val.shape) == rows.row_shape:
            return node
        packed = node if val.is_contiguous() else self(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self(aten.view.default, packed, rows.row_shape)
