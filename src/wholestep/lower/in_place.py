"""What regions of graphs that write into tensors have to know.

    add_ = aten.add_(x, 1); y = aten.mul(add_, 2)     ->     aten.add_(x, 1); y = aten.mul(x, 2)

The result of an in-place operator is the tensor that it wrote into. Said that way nobody is tempted to make it again,
and what leaves a region is a tensor that it computed or the caller's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import fx

from wholestep.ir.effects import may_write, shared_inputs, writes, written_positions
from wholestep.torch_private.operators import OpOverload, op_name, schema_of

_OTHER_MEMORY = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "aten::detach_"})
"""Change what a tensor is, rather than what it holds; torch tags most others like them `inplace_view`."""


def name_what_was_written(graph: fx.Graph) -> None:
    """Let readers of an in-place operator's result read the tensor it wrote into."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.users:
            continue
        position = _returned(node.target)
        written = node.args[position] if position is not None and position < len(node.args) else None
        if isinstance(written, fx.Node) and changes_memory(node.target) == "":
            node.replace_all_uses_with(written)


@lru_cache(maxsize=1024)
def _returned(op: OpOverload) -> int | None:
    """The argument that an in-place operator writes and returns."""
    written = written_positions(op) if schema_of(op).is_mutable else ()
    if len(written) != 1 or len(schema_of(op).returns) != 1:
        return None
    argument, result = schema_of(op).arguments[written[0]], schema_of(op).returns[0]
    same = result.alias_info is not None and result.alias_info.before_set == argument.alias_info.before_set
    return written[0] if same and not argument.kwarg_only else None


@lru_cache(maxsize=1024)
def changes_memory(op: OpOverload) -> str:
    """Why an operator that writes cannot be part of a region; "" if it can."""
    if torch.Tag.inplace_view in op.tags or op_name(op).split(".")[0] in _OTHER_MEMORY:
        return "changes the shape or the memory of a tensor that others hold"
    if any(schema_of(op).arguments[i].kwarg_only for i in written_positions(op)):
        return "writes its result into a tensor that it is given (out=)"
    return ""


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The arguments whose contents a node changes."""
    target = node.target
    if not isinstance(target, OpOverload) or not may_write(target) or not writes(node):
        return []
    found: list[fx.Node] = []
    for position in written_positions(target):
        argument = schema_of(target).arguments[position]
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        items = value if isinstance(value, list | tuple) else [value]
        found += [item for item in items if isinstance(item, fx.Node)]
    return found


def written_inputs(order: Iterable[fx.Node], inputs: Sequence[fx.Node]) -> list[int]:
    """Which inputs the nodes of a region write into, directly or through views."""
    root: dict[fx.Node, set[fx.Node]] = {node: {node} for node in inputs}
    found: set[fx.Node] = set()
    for node in order:
        for written in written_nodes(node):
            found |= root.get(written, set())
        shared = [source for source in shared_inputs(node) if source in root]
        if shared:
            root[node] = set().union(*(root[source] for source in shared))
    return [i for i, node in enumerate(inputs) if node in found]


def only_writes_back(order: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> bool:
    """Whether the only writes are copies into inputs at the very end, which Inductor takes as they are."""
    given = set(inputs)
    ends = False
    for node in order:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in given and node.args[1] not in given:
            ends = True
        elif ends or (may_write(node.target) and writes(node)):
            return False
    return True
