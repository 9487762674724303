"""`torch.distributed._spmd.partial_lower`: runs of nodes become calls of what Inductor makes of them."""

from wholestep.lower import LowerOptions
from wholestep.lower import partial_lower as partial_lower

MIN_ATEN_OPS_TO_LOWER = LowerOptions().min_aten_ops
"""Runs with fewer operators stay as they are. To change it: `partial_lower(gm, options={"min_aten_ops": 3})`."""
