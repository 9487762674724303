"""In-place writes behind a cut: the stage works on a copy of what it received.

    stage 0   h = linear(x, w); v = h[0]          stage 1   c = clone(h); u = c[0]
    stage 1   h.add_(1); y = v * 2                          c.add_(1);    y = u * 2

A received tensor is a leaf of autograd, which nothing may write. And two tensors that share memory before a cut do not
behind it: so views are taken again, of the copy. Later stages receive the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.ir.effects import written_inputs
from wholestep.pipelining.build.staged import Staged, storage_of


def writes_by_storage(staged: Staged) -> dict[Any, dict[int, fx.Node]]:
    """For each memory that is written, the stages that do, with one node each."""
    found: dict[Any, dict[int, fx.Node]] = {}
    for node in staged.graph.nodes:
        if node in staged.stage_of:
            for written in written_inputs(node):
                key = staged.storage(written)
                if key is not None:
                    found.setdefault(key, {}).setdefault(staged.stage_of[node], node)
    return found


def copy_before_writing(staged: Staged) -> None:
    """Let each stage that writes to a received tensor, or to a view of it, work on its own copy."""
    if staged.count == 1:
        return
    written = writes_by_storage(staged)
    if not written:
        return
    state = {staged.storage(node) for node in staged.graph.nodes if node.op == "get_attr"}
    members: dict[Any, list[fx.Node]] = {}
    for node in staged.graph.nodes:
        if (key := staged.storage(node)) in written and key not in state:
            members.setdefault(key, []).append(node)
    for key, nodes in members.items():
        base = nodes[0]
        for stage in sorted(written[key]):
            if staged.made_at(base) < stage:
                nodes = _copy(staged, key, nodes, stage)
                base = nodes[0]


def _copy(staged: Staged, key: Any, members: list[fx.Node], stage: int) -> list[fx.Node]:
    """Give a stage its own copy of a memory; the nodes that stand for it from there on."""
    base = members[0]
    own = staged.add(stage, torch.ops.aten.clone.default, (base,), f"{staged.names[base]}_stage{stage}", base)
    staged.own_storage(own, (key, stage))
    behind = range(stage, staged.count + 1)
    staged.use_instead(base, own, behind)
    own.args = (base,)
    local = {base: own}

    def here(node: fx.Node) -> fx.Node:
        if node in local:
            return local[node]
        value = node.meta.get("val")
        parts = value if isinstance(value, list | tuple) else [value]
        if node.op != "call_function" or all(storage_of(part) != key for part in parts):
            return node
        if written_inputs(node):
            raise PipelineError(
                f"stage {stage} writes to memory that {node.name} changes the shape of in an earlier stage.",
                fix="cut elsewhere, or write out of place",
                node=node.format_node() or node.name,
            )
        local[node] = staged.copy_into(stage, node, here, f"{staged.names.get(node, node.name)}_stage{stage}")
        staged.own_storage(local[node], (key, stage))
        return local[node]

    for view in members[1:]:
        if staged.made_at(view) < stage and any(user >= stage for user in staged.users(view)):
            staged.use_instead(view, here(view), behind)
        elif staged.made_at(view) >= stage:
            staged.own_storage(view, (key, stage))
    kept = [node for node in local.values() if staged.storage(node) is not None]
    return [*kept, *(view for view in members[1:] if staged.made_at(view) >= stage)]
