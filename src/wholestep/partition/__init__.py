"""Cut a graph into parts that call each other: by what a backend supports, or into parts of equal cost."""

from wholestep.partition.assign import Partition
from wholestep.partition.balanced import BalancedCut, balanced_cut
from wholestep.partition.by_support import SupportedPartition, SupportedPartitions, partition_by_support
from wholestep.partition.fuse import fuse_partitions
from wholestep.partition.split_module import split_module

__all__ = [
    "BalancedCut",
    "Partition",
    "SupportedPartition",
    "SupportedPartitions",
    "balanced_cut",
    "fuse_partitions",
    "partition_by_support",
    "split_module",
]
