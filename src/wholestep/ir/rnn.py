"""The packed weights of a cuDNN RNN, found again at replay.

cuDNN wants all weights of an RNN as one chunk of memory. In eager, torch sees that they already are (nn.RNNBase packed
them) and passes that chunk. Fakes have no memory, so capture records a call of this function in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wholestep.errors import UnsupportedError


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
