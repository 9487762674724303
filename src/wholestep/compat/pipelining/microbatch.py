"""`torch.distributed.pipelining.microbatch` (`pippy.microbatch`): how a batch becomes microbatches, and one result."""

import sys
import types

from wholestep.compat import forwarded_names
from wholestep.pipelining import TensorChunkSpec as TensorChunkSpec
from wholestep.pipelining import merge_chunks as merge_chunks
from wholestep.pipelining import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
from wholestep.torch_private.pipelining import WholeValue, mask_minibatches, masks_minibatches

Replicate = WholeValue
"""In a chunk spec: every microbatch gets the whole value. PiPPy's name."""

__all__ = ["Replicate", "TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks"]

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining.microbatch", globals())


class _Microbatch(types.ModuleType):
    """This module: `microbatch._debug_mask_minibatches = True` sets torch's switch, which its splitting reads."""

    @property
    def _debug_mask_minibatches(self) -> bool:
        return masks_minibatches()

    @_debug_mask_minibatches.setter
    def _debug_mask_minibatches(self, on: bool) -> None:
        mask_minibatches(on)


sys.modules[__name__].__class__ = _Microbatch
