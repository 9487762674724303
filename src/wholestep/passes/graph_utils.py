"""Small helpers of PyTorch's `torch.distributed._spmd.graph_utils`, under their names: for code that moves over.

node = find_node(gm.graph, lambda n: n.name == "relu")[0]
get_all_comm_blocks(gm, (CommType.ALLREDUCE, "all_reduce"))
folder = dump_graphs_to_files({"before": gm})
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata

from wholestep.errors import OptionError
from wholestep.ir.effects import is_needed
from wholestep.ir.readable import format_node

log = logging.getLogger("wholestep.passes")


class OP(StrEnum):
    """The values of `node.op`."""

    CALL_FUNCTION = "call_function"
    CALL_MODULE = "call_module"
    CALL_METHOD = "call_method"
    GET_ATTR = "get_attr"
    OUTPUT = "output"
    PLACEHOLDER = "placeholder"


class CommType(StrEnum):
    """Collectives, as `get_all_comm_blocks` takes them."""

    ALLREDUCE = "allreduce_"
    ALLGATHER = "allgather_"
    BROADCAST = "broadcast_"
    REDUCESCATTER = "reduce_scatter_"
    SCATTER = "scatter_"


def get_node_tensor_metadata(node: fx.Node, is_required: bool = True) -> TensorMetadata | None:
    """Shape, dtype and strides of a node's result: its `tensor_meta`, or those of its `val`.

    Raises if it has neither, unless `is_required` is False.
    """
    found = node.meta.get("tensor_meta")
    if isinstance(found, TensorMetadata):
        return found
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return TensorMetadata(value.shape, value.dtype, value.requires_grad, value.stride(), None, False, {})
    if not is_required:
        return None
    raise NoMetadataError(
        f"Callsite expects that tensor_meta exists in {node.name}, but got None instead.",
        fix="trace with make_fx, or run ShapeProp(gm).propagate(*inputs) first.",
        node=format_node(node),
    )


class NoMetadataError(OptionError, RuntimeError):
    """A node has no metadata for its tensor."""


def get_output(graph: fx.Graph) -> fx.Node:
    """The output node."""
    found = find_node(graph, lambda node: node.op == OP.OUTPUT, reverse_order=True)
    if found:
        return found[0]
    raise OptionError("the graph has no output node.", fix="give a whole graph.")


def find_node(graph: fx.Graph, predicate: Callable[[fx.Node], Any], reverse_order: bool = False) -> list[fx.Node]:
    """The nodes for which a predicate holds, in graph order or against it."""
    nodes = reversed(graph.nodes) if reverse_order else iter(graph.nodes)
    return [node for node in nodes if predicate(node)]


def is_leaf_subgraph(graph: fx.Graph, subgraph: Sequence[fx.Node]) -> bool:
    """Whether only the output uses the results of some nodes."""
    inside = {*subgraph, get_output(graph)}
    return all(user in inside for node in subgraph for user in node.users)


def clone_subgraph(graph: fx.Graph, subgraph: Sequence[fx.Node], target: fx.Node) -> list[fx.Node]:
    """Copies of nodes right before another one. They read each other, and otherwise what the originals read."""
    made: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(target):
        for node in subgraph:
            made[node] = graph.node_copy(node, lambda source: made.get(source, source))
    return list(made.values())


def rebuild_graph(gm: fx.GraphModule, remove_dead_code: bool = True) -> None:
    """Check a graph, drop dead code as after a pass, and generate its code."""
    gm.graph.lint()
    if remove_dead_code:
        gm.graph.eliminate_dead_code(is_needed)
    gm.recompile()


def dump_graphs_to_files(graphs: Mapping[str, Any], folder: str | Path = "") -> str:
    """Write each graph (or text) to `<name>.graph` in a folder, a new one if none is given; returns the folder."""
    chosen = Path(folder or tempfile.mkdtemp(prefix="wholestep-graphs-"))
    chosen.mkdir(parents=True, exist_ok=True)
    for name, graph in graphs.items():
        (chosen / f"{name}.graph").write_text(str(graph), encoding="utf-8")
    log.info("graphs are in %s", chosen)
    return str(chosen)
