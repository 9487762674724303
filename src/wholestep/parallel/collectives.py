"""Collectives on rows of tensors, as functional operators that the recorder sees: each with exactly one wait."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from wholestep.parallel.axes import Axis

comm = torch.ops._c10d_functional


def rows_per_rank(rows: int, size: int) -> int:
    """Rows of the largest shard; all but the last ranks have as many."""
    return -(-rows // size)


def gather_rows(local: Tensor, axis: Axis, rows: int) -> Tensor:
    """The whole of a tensor that is sharded by rows along an axis. Shorter shards are padded on the way."""
    if axis.size == 1:
        return local
    padded = pad_rows(local, rows_per_rank(rows, axis.size))
    whole: Tensor = comm.wait_tensor(comm.all_gather_into_tensor(padded, axis.size, axis.group))
    return whole if whole.shape[0] == rows else whole.narrow(0, 0, rows)


def scatter_rows(whole: Tensor, axis: Axis, op: str, own_rows: int) -> Tensor:
    """This rank's rows of the sum (or mean) over the axis."""
    if axis.size == 1:
        return whole
    each = rows_per_rank(whole.shape[0], axis.size)
    padded = pad_rows(whole, each * axis.size)
    mine: Tensor = comm.wait_tensor(comm.reduce_scatter_tensor(padded, op, axis.size, axis.group))
    return mine if mine.shape[0] == own_rows else mine.narrow(0, 0, own_rows)


def all_reduce(tensor: Tensor, axis: Axis, op: str) -> Tensor:
    """The sum, mean or maximum over the axis, the same on all its ranks."""
    if axis.size == 1:
        return tensor
    reduced: Tensor = comm.wait_tensor(comm.all_reduce(tensor, op, axis.group))
    return reduced


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """With zero rows at the end."""
    missing = rows - tensor.shape[0]
    return pad(tensor, (*[0, 0] * (tensor.dim() - 1), 0, missing)) if missing else tensor.contiguous()
