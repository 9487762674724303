"""`torch.distributed.pipelining._utils`: what a pipe says of itself; the rest is torch's."""

from wholestep.pipelining import PipeInfo as PipeInfo
from wholestep.torch_private.other_names import other_names

__getattr__, __dir__ = other_names("torch.distributed.pipelining._utils", globals())
