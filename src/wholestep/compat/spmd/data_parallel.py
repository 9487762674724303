"""`torch.distributed._spmd.data_parallel`: which way of data parallelism, and the plan that it is here.

The strategies, batch dimensions and partitioners of the original have no twin: a plan is decided before the step is
traced, and the graph has its collectives from the beginning.
"""

from __future__ import annotations

from enum import Enum

from torch.distributed.device_mesh import DeviceMesh

from wholestep.parallel.plan import FullyShard, Plan, Replicate


class DataParallelStyle(Enum):
    """How parameters lie on the ranks."""

    DEFAULT = 0
    """Sharded, as FULLY_SHARD: parameters whose rows do not divide evenly are sharded too, not replicated."""
    REPLICATE = 1
    """Whole on every rank, as DistributedDataParallel has them."""
    FULLY_SHARD = 2
    """A shard on each rank, as FSDP2 has them."""

    def plan(self, mesh: DeviceMesh) -> Plan:
        """The plan for `ws.compile(parallel=)`; gradients are averaged."""
        return Replicate(mesh) if self is DataParallelStyle.REPLICATE else FullyShard(mesh)
