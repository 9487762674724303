"""`torch.distributed._spmd.graph_optimization`: the passes, and what they find in a graph.

Which passes ran is kept on each graph, not in the process: there is no `_optimized_func` to clear between two graphs.
"""

from wholestep.passes import AdamArgs as AdamArgs
from wholestep.passes import CommBlock as CommBlock
from wholestep.passes import ForeachAddBlock as ForeachAddBlock
from wholestep.passes import FusedAdamBlock as FusedAdamBlock
from wholestep.passes import FusedOptimizerBlock as FusedOptimizerBlock
from wholestep.passes import comm_fusion_with_concat as comm_fusion_with_concat
from wholestep.passes import enable_graph_optimization_dump as enable_graph_optimization_dump
from wholestep.passes import find_all_descendants as find_all_descendants
from wholestep.passes import get_all_comm_blocks as get_all_comm_blocks
from wholestep.passes import get_all_fused_optimizer_blocks as get_all_fused_optimizer_blocks
from wholestep.passes import get_comm_block as get_comm_block
from wholestep.passes import get_fused_optimizer_block as get_fused_optimizer_block
from wholestep.passes import graph_optimization_pass as graph_optimization_pass
from wholestep.passes import iter_move_grads_and_optimizers as iter_move_grads_and_optimizers
from wholestep.passes import remove_copy_from_optimizer as remove_copy_from_optimizer
from wholestep.passes import schedule_comm_wait as schedule_comm_wait
from wholestep.passes import split_fused_optimizer as split_fused_optimizer
