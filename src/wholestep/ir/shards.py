"""This rank's part of a tensor that all ranks have whole.

A slice would have the rank's own number in it, and ranks that run the same program would seem to run different ones.
"""

from __future__ import annotations

from torch import Tensor

from wholestep.torch_private.distributed import process_group_rank


def own_chunk(tensor: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """The chunk of this rank along a dimension, of `size` chunks as `torch.chunk` cuts them; empty if there is none."""
    length = tensor.shape[dim]
    each = -(-length // size)
    start = min(process_group_rank(group_name) * each, length)
    return tensor.narrow(dim, start, min(each, length - start)).clone()
