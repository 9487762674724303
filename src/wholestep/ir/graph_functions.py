"""Python functions that graphs call where torch has no operator.

own_chunk         this rank's part of a tensor that all ranks have whole. A slice would have the rank's number in
                  it, and ranks that run the same program would seem to run different ones
number_tensor     a tensor of Python scalars some of which are inputs of the graph: `torch.tensor([lr, 0.5, k])`
packed_weights    cuDNN wants all weights of an RNN as one chunk of memory. In eager, torch sees that they already
                  are (nn.RNNBase packed them) and passes that chunk. Fakes have no memory, so capture records a
                  call of this function, which finds the chunk at replay
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import UnsupportedError
from wholestep.torch_private.distributed import process_group_rank


def own_chunk(tensor: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """The chunk of this rank along a dimension, of `size` chunks as `torch.chunk` cuts them; empty if there is none."""
    length = tensor.shape[dim]
    each = -(-length // size)
    start = min(process_group_rank(group_name) * each, length)
    return tensor.narrow(dim, start, min(each, length - start)).clone()


def number_tensor(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor of nested lists of numbers, made at each run."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def packed_weights(weights: Sequence[Tensor]) -> Tensor:
    """The chunk that holds all weights one after the other."""
    first = weights[0]
    storage = first.untyped_storage()
    if any(w.untyped_storage().data_ptr() != storage.data_ptr() for w in weights):
        raise UnsupportedError(
            "the weights of an RNN on CUDA are not one chunk of memory.",
            fix="call flatten_parameters() on the module after moving or replacing its weights.",
        )
    chunk = torch.empty(0, dtype=first.dtype, device=first.device)
    return chunk.set_(storage)
