"""`torch.distributed._spmd.graph_utils`."""

from wholestep.passes.graph_utils import OP as OP
from wholestep.passes.graph_utils import CommType as CommType
from wholestep.passes.graph_utils import clone_subgraph as clone_subgraph
from wholestep.passes.graph_utils import dump_graphs_to_files as dump_graphs_to_files
from wholestep.passes.graph_utils import find_node as find_node
from wholestep.passes.graph_utils import get_node_tensor_metadata as get_node_tensor_metadata
from wholestep.passes.graph_utils import get_output as get_output
from wholestep.passes.graph_utils import is_leaf_subgraph as is_leaf_subgraph
from wholestep.passes.graph_utils import rebuild_graph as rebuild_graph
