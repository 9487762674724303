"""The graph of a step and what is true of it. Everything here may be imported by every other package."""

from wholestep.ir.collectives import Communication, communication
from wholestep.ir.fingerprint import node_digests
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.groups import group_table, rebind_groups
from wholestep.ir.io.node_values import tensor_spec
from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.iter.graph_module import IterGraphModule
from wholestep.ir.meta import NodeMeta, node_meta, set_node_meta, update_node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.signature import (
    ChangeKind,
    GroupSpec,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    Signature,
    StateChange,
    TensorSpec,
    WriteBack,
)
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.verify import verify

__all__ = [
    "ChangeKind",
    "Communication",
    "GroupSpec",
    "InputKind",
    "InputSpec",
    "IterGraph",
    "IterGraphModule",
    "NodeMeta",
    "OutputKind",
    "OutputSpec",
    "Signature",
    "StateChange",
    "StepGraph",
    "TensorSpec",
    "WriteBack",
    "call_on_copies",
    "communication",
    "format_node",
    "group_table",
    "node_digests",
    "node_meta",
    "rebind_groups",
    "set_node_meta",
    "tensor_spec",
    "update_node_meta",
    "verify",
]
