"""A collective and what belongs to it, in the shape that PyTorch's `_spmd` passes knew.

    started = all_reduce(g, 'avg', '0')      comm_node, inputs [g], shape of g
    done = wait_tensor(started)              wait_nodes [done]
    flat = view(done, [-1])                  node_list [started, done, flat]
    p1 = add(p, flat)                        outputs {flat}: what others read

Found by operator and data flow, so neither names nor distances matter: `ir.comm_block` walks from the collective to its
waits, from there on views and parts of lists belong to the block.  Cost: the users of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from wholestep.errors import VerifyError
from wholestep.ir.collectives import comm_block, is_part
from wholestep.ir.effects import is_collective
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
