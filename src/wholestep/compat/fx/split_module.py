"""`torch.fx.passes.split_module`."""

from wholestep.compat import forwarded_names
from wholestep.partition.split_module import Partition as Partition
from wholestep.partition.split_module import split_module as split_module
from wholestep.partition.split_module import split_module_simple as split_module_simple

__all__ = ["Partition", "split_module", "split_module_simple"]

__getattr__, __dir__ = forwarded_names("torch.fx.passes.split_module", globals())
