"""Rewrites of a step's graph, each with a contract that is checked after it ran."""

from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.iter.graph_module import IterGraphModule
from wholestep.ir.reinplace import reinplace
from wholestep.ir.rewrite_rules import RewriteRule, apply_rules, rewrite_rule
from wholestep.passes.collective_matmul import collective_matmul
from wholestep.passes.comm_blocks import CommBlock, get_all_comm_blocks, get_comm_block
from wholestep.passes.comm_fusion import bucket_all_gather, bucket_reduce_scatter, comm_fusion_with_concat
from wholestep.passes.common_subexpressions import merge_common_subexpressions
from wholestep.passes.engine.contract import (
    BoundPass,
    Contract,
    GraphPass,
    applied_passes,
    approximates,
    graph_optimization_pass,
)
from wholestep.passes.engine.dump import disable_graph_optimization_dump, enable_graph_optimization_dump
from wholestep.passes.engine.manager import run_passes
from wholestep.passes.functionalize_optimizer import functionalize_optimizer, remove_copy_from_optimizer
from wholestep.passes.graph_utils import (
    OP,
    CommType,
    clone_subgraph,
    dump_graphs_to_files,
    find_node,
    get_node_tensor_metadata,
    get_output,
    is_leaf_subgraph,
    rebuild_graph,
)
from wholestep.passes.iter_move import iter_move_grads_and_optimizers, overlap_optimizer_with_next_forward
from wholestep.passes.loss.chunk_head import chunk_head
from wholestep.passes.loss.fuse_loss import fuse_loss
from wholestep.passes.optimizer_blocks import (
    AdamArgs,
    ForeachAddBlock,
    FusedAdamBlock,
    FusedOptimizerBlock,
    find_all_descendants,
    get_all_fused_optimizer_blocks,
    get_fused_optimizer_block,
)
from wholestep.passes.overlap_communication import overlap_communication
from wholestep.passes.redundant_collectives import (
    dedup_collectives,
    drop_dead_collectives,
    remove_dead_collectives,
    remove_duplicate_collectives,
)
from wholestep.passes.reinplace_tail import reinplace_tail
from wholestep.passes.schedule_comm_wait import schedule_comm_wait
from wholestep.passes.split_optimizer import split_fused_optimizer, split_optimizer

__all__ = [
    "OP",
    "AdamArgs",
    "BoundPass",
    "CommBlock",
    "CommType",
    "Contract",
    "ForeachAddBlock",
    "FusedAdamBlock",
    "FusedOptimizerBlock",
    "GraphPass",
    "IterGraph",
    "IterGraphModule",
    "RewriteRule",
    "applied_passes",
    "apply_rules",
    "approximates",
    "bucket_all_gather",
    "bucket_reduce_scatter",
    "chunk_head",
    "clone_subgraph",
    "collective_matmul",
    "comm_fusion_with_concat",
    "dedup_collectives",
    "disable_graph_optimization_dump",
    "drop_dead_collectives",
    "dump_graphs_to_files",
    "enable_graph_optimization_dump",
    "find_all_descendants",
    "find_node",
    "functionalize_optimizer",
    "fuse_loss",
    "get_all_comm_blocks",
    "get_all_fused_optimizer_blocks",
    "get_comm_block",
    "get_fused_optimizer_block",
    "get_node_tensor_metadata",
    "get_output",
    "graph_optimization_pass",
    "is_leaf_subgraph",
    "iter_move_grads_and_optimizers",
    "merge_common_subexpressions",
    "overlap_communication",
    "overlap_optimizer_with_next_forward",
    "rebuild_graph",
    "reinplace",
    "reinplace_tail",
    "remove_copy_from_optimizer",
    "remove_dead_collectives",
    "remove_duplicate_collectives",
    "rewrite_rule",
    "run_passes",
    "schedule_comm_wait",
    "split_fused_optimizer",
    "split_optimizer",
]
