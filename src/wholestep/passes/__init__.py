"""Rewrites of a step's graph, each with a contract that is checked after it ran."""

from wholestep.passes.comm_fusion import bucket_all_gather, bucket_reduce_scatter, comm_fusion_with_concat
from wholestep.passes.contract import BoundPass, Contract, GraphPass, applied_passes, graph_optimization_pass
from wholestep.passes.dedup_collectives import dedup_collectives
from wholestep.passes.drop_dead_collectives import drop_dead_collectives
from wholestep.passes.dump import disable_graph_optimization_dump, enable_graph_optimization_dump
from wholestep.passes.manager import run_passes
from wholestep.passes.reinplace import reinplace
from wholestep.passes.schedule_comm_wait import schedule_comm_wait

__all__ = [
    "BoundPass",
    "Contract",
    "GraphPass",
    "applied_passes",
    "bucket_all_gather",
    "bucket_reduce_scatter",
    "comm_fusion_with_concat",
    "dedup_collectives",
    "disable_graph_optimization_dump",
    "drop_dead_collectives",
    "enable_graph_optimization_dump",
    "graph_optimization_pass",
    "reinplace",
    "run_passes",
    "schedule_comm_wait",
]
