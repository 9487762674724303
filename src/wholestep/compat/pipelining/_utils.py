"""`torch.distributed.pipelining._utils`: what a pipe says of itself; the rest is torch's."""

from wholestep.pipelining import PipeInfo as PipeInfo
from wholestep.torch_private.forwarded_names import forwarded_names

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining._utils", globals())
