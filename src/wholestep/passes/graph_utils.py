"""What PyTorch's `_spmd` passes used to read a graph: `CommBlock` and the helpers of `graph_utils`, under their names.

A collective and what belongs to it, in the shape that PyTorch's `_spmd` passes knew.

    started = all_reduce(g, 'avg', '0')      comm_node, inputs [g], shape of g
    done = wait_tensor(started)              wait_nodes [done]
    flat = view(done, [-1])                  node_list [started, done, flat]
    p1 = add(p, flat)                        outputs {flat}: what others read

Found by operator and data flow, so neither names nor distances matter: `ir.comm_block` walks from the collective to its
waits, from there on views and parts of lists belong to the block.  Cost: the users of the block.

The helpers, for code that moves over:

    node = find_node(gm.graph, lambda n: n.name == "relu")[0]
    get_all_comm_blocks(gm, (CommType.ALLREDUCE, "all_reduce"))
    folder = dump_graphs_to_files({"before": gm})
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata

from wholestep.errors import OptionError, VerifyError
from wholestep.ir.collectives import comm_block, is_part
from wholestep.ir.effects import is_collective, is_needed
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.operators import OpOverload, OpOverloadPacket, op_name

CommOp = str | OpOverload | OpOverloadPacket
"""A collective, by the beginning of its operator's name (`"all_reduce"`, `"allreduce_"`) or by the operator."""


class NoWaitError(VerifyError, RuntimeError):
    """A collective whose result no node waits for has no block."""


@dataclass(eq=False)
class CommBlock:
    """A collective with its inputs, its waits and the views behind them. Blocks are equal if they are the same."""

    shape: torch.Size | None
    """Of the first input, with symbolic dimensions if there are any; None if it is not known."""
    node_list: list[fx.Node]
    """The collective, parts of its result, waits, and views behind these, each after what it reads."""
    inputs: list[fx.Node]
    wait_nodes: list[fx.Node]
    comm_node: fx.Node
    outputs: set[fx.Node]
    """The waits and views that something outside of the block reads."""


def get_comm_block(comm_node: fx.Node) -> CommBlock:
    """The block of a collective, however far away its wait is."""
    if not is_collective(comm_node.target):
        raise _error(
            comm_node, f"{comm_node.name} is not a collective.", "give the node that starts the communication."
        )
    found = comm_block(comm_node)
    if not found.waits:
        raise _error(
            comm_node,
            f"the collective {comm_node.name} has no wait: nothing can read its result.",
            "add its wait_tensor, or remove the collective.",
        )
    views, outputs = _behind(found.waits)
    inputs = [leaf for leaf in pytree.tree_leaves((comm_node.args, comm_node.kwargs)) if isinstance(leaf, fx.Node)]
    return CommBlock(
        shape=_shape(inputs[0]) if inputs else None,
        node_list=[comm_node, *found.parts, *found.waits, *views],
        inputs=inputs,
        wait_nodes=list(found.waits),
        comm_node=comm_node,
        outputs=outputs,
    )


def get_all_comm_blocks(gm: fx.GraphModule, comm_ops: CommOp | Iterable[CommOp]) -> list[CommBlock]:
    """The blocks of all collectives of some kinds, in the order in which the graph starts them.

    A collective whose result leaves the graph before it is waited for (in the next iteration) has no block.
    """
    matches = _Matcher([comm_ops] if isinstance(comm_ops, CommOp) else list(comm_ops))
    found = (node for node in gm.graph.nodes if is_collective(node.target) and matches(node.target))
    return [get_comm_block(node) for node in found if not _leaves(node)]


def _leaves(collective: fx.Node) -> bool:
    """Whether a result is waited for elsewhere: in the next iteration, or by the caller of the graph."""
    found = comm_block(collective)
    return not found.waits and any(user.op == "output" for user in found.misused)


class _Matcher:
    def __init__(self, wanted: list[CommOp]) -> None:
        self._prefixes = tuple(_letters(str.__str__(each)) for each in wanted if isinstance(each, str))
        self._ops = [each for each in wanted if not isinstance(each, str)]
        self._known: dict[OpOverload, bool] = {}

    def __call__(self, target: OpOverload) -> bool:
        if target not in self._known:
            name = _letters(op_name(target).split("::")[1].split(".")[0])
            same = any(target is op or getattr(target, "overloadpacket", None) is op for op in self._ops)
            self._known[target] = same or name.startswith(self._prefixes)
        return self._known[target]


def _letters(name: str) -> str:
    """`all_reduce`, `allreduce_` and `allreduce` are one name."""
    return name.replace("_", "").lower()


def _behind(waits: Iterable[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """Views of waited results, and the nodes that others read."""
    views: dict[fx.Node, None] = {}
    outputs: set[fx.Node] = set()
    stack = list(reversed(list(waits)))
    while stack:
        node = stack.pop()
        for user in node.users:
            if is_part(user):
                views[user] = None
                stack.append(user)
            else:
                outputs.add(node)
    return list(views), outputs


def _shape(node: fx.Node) -> torch.Size | None:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return value.shape
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return shape if isinstance(shape, torch.Size) else None


def _error(node: fx.Node, what: str, fix: str) -> NoWaitError:
    return NoWaitError(what, fix=fix, node=format_node(node), location=node_meta(node).location)


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
