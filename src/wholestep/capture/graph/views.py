"""Writing through a view: how a new value of a view becomes a new value of what it is a view of.

    v = select(x, 0, 2); v.add_(1)        v1 = add(v, 1); x1 = select_scatter(x, v1, 0, 2)

`invert_view` emits the second half. Views that only rearrange are undone (transpose by transpose); views that pick a
part are scattered; everything else goes through an index map, which is slower and always right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

GETITEM = "getitem"
"""Passed to `emit` for an element of a list of results."""

Emit = Callable[..., fx.Node]
"""emit(op, *args, **kwargs) -> node, with `val` filled in."""

_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh.default,
    }
)


def invert_view(
    emit: Emit,
    parent: fx.Node,
    parent_value: Tensor,
    op: Any,
    args: tuple[Any, ...],
    index: int | None,
    new: fx.Node,
    child_value: Tensor,
) -> fx.Node:
    """The value of `parent` after its view `op(parent, *args)` (result number `index`) took the value `new`."""
    shape = list(parent_value.shape)
    if op in _RESHAPES:
        return emit(aten.reshape.default, new, shape)
    if op is aten.t.default:
        return emit(aten.t.default, new)
    if op is aten.transpose.int:
        return emit(aten.transpose.int, new, *args)
    if op is aten.permute.default:
        dims = [d % len(shape) for d in args[0]]
        return emit(aten.permute.default, new, [dims.index(i) for i in range(len(dims))])
    if op is aten.select.int:
        return emit(aten.select_scatter.default, parent, new, *args)
    if op is aten.slice.Tensor:
        return emit(aten.slice_scatter.default, parent, new, *args)
    if op is aten.as_strided.default:
        return emit(aten.as_strided_scatter.default, parent, new, *args)
    if op is aten.diagonal.default:
        return emit(aten.diagonal_scatter.default, parent, new, *args)
    if op is aten.unbind.int:
        return emit(aten.select_scatter.default, parent, new, args[0] if args else 0, index)
    if op in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = args[1] if len(args) > 1 else 0
        sizes = args[0] if isinstance(args[0], list | tuple) else None
        start = sum(sizes[:index]) if sizes is not None else args[0] * index
        stop = start + child_value.shape[dim]
        return emit(aten.slice_scatter.default, parent, new, dim, start, stop)
    if op is aten.view_as_real.default:
        return emit(aten.view_as_complex.default, emit(aten.clone.default, new, memory_format=torch.contiguous_format))
    if op is aten.view_as_complex.default:
        return emit(aten.view_as_real.default, new)
    if op is aten.view.dtype:
        return emit(aten.view.dtype, new, parent_value.dtype)
    if op is aten._conj.default:
        return emit(aten._conj_physical.default, new)
    if op is aten._neg_view.default:
        return emit(aten.neg.default, new)
    return _scatter_by_index(emit, parent, parent_value, op, args, index, new)


def _scatter_by_index(
    emit: Emit, parent: fx.Node, parent_value: Tensor, op: Any, args: tuple[Any, ...], index: int | None, new: fx.Node
) -> fx.Node:
    """Number the elements of the parent, look through the view which of them it shows, put the new values there."""
    shape = list(parent_value.shape)
    flat = emit(aten.arange.default, parent_value.numel(), device=parent_value.device)
    numbered = emit(aten.view.default, flat, shape)
    seen = emit(op, numbered, *args)
    if index is not None:
        seen = emit(GETITEM, seen, index)
    return emit(aten.put.default, parent, seen, new)
