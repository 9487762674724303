"""`torch.distributed._spmd` of PyTorch 2.1 to 2.3, which is gone from PyTorch, under its module names.

from wholestep.compat.spmd.api import compile, Override
from wholestep.compat.spmd.gm_transformation import GraphModuleTransformation
from wholestep.compat.spmd.parallel_mode import DataParallel
"""
