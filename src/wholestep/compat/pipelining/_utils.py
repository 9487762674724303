"""`torch.distributed.pipelining._utils`: what a pipe says of itself; the rest is torch's."""

from wholestep.compat import forwarded_names
from wholestep.pipelining import PipeInfo as PipeInfo

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining._utils", globals())
