"""What regions of graphs that write into tensors have to know.

    add_ = aten.add_(x, 1); y = aten.mul(add_, 2)     ->     aten.add_(x, 1); y = aten.mul(x, 2)

The result of an in-place operator is the tensor that it wrote into. Said that way nobody is tempted to make it again,
and what leaves a region is a tensor that it computed or the caller's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from wholestep.ir.effects import changes_layout, returned_position, writes, writes_into_out
from wholestep.torch_private.operators import OpOverload


def name_what_was_written(graph: fx.Graph) -> None:
    """Let readers of an in-place operator's result read the tensor it wrote into."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.users:
            continue
        position = returned_position(node.target)
        written = node.args[position] if position is not None and position < len(node.args) else None
        if isinstance(written, fx.Node) and changes_memory(node.target) == "":
            node.replace_all_uses_with(written)


def changes_memory(op: OpOverload) -> str:
    """Why an operator that writes cannot be part of a region; "" if it can."""
    if changes_layout(op):
        return "changes the shape or the memory of a tensor that others hold"
    if writes_into_out(op):
        return "writes its result into a tensor that it is given (out=)"
    return ""


def only_writes_back(order: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> bool:
    """Whether the only writes are copies into inputs at the very end, which Inductor takes as they are."""
    given = set(inputs)
    ends = False
    for node in order:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in given and node.args[1] not in given:
            ends = True
        elif ends or writes(node):
            return False
    return True
