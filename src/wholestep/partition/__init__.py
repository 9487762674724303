"""Split a graph into modules that call each other: by a callback, by what a backend supports, or by equal cost."""

from wholestep.partition.assignment import Partition
from wholestep.partition.balanced_cut import BalancedCut, balanced_cut
from wholestep.partition.by_support import (
    SupportedPartition,
    SupportedPartitions,
    fuse_by_partitions,
    fuse_partitions,
    partition_by_support,
)
from wholestep.partition.split_module import split_module, split_module_simple

__all__ = [
    "BalancedCut",
    "Partition",
    "SupportedPartition",
    "SupportedPartitions",
    "balanced_cut",
    "fuse_by_partitions",
    "fuse_partitions",
    "partition_by_support",
    "split_module",
    "split_module_simple",
]
