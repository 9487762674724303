"""Sizes do not cross a cut: a stage reads them from a tensor that it has.

    stage 0   s = sym_size(x, 0)                 stage 2   s_2 = sym_size(h, 0)        h arrives anyway
    stage 2   view(h, [s, 8])                              view(h, [s_2, 8])

If no tensor that arrives has the size, the node is computed again, and the tensor that it asks is sent along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.pipelining.build.staged import Staged, is_number


def localize_sizes(staged: Staged) -> None:
    """Let every stage compute the sizes that it uses."""
    numbers = [node for node in staged.graph.nodes if is_number(node) and node in staged.stage_of]
    if not numbers:
        return
    arriving = _arriving(staged)
    made: dict[tuple[fx.Node, int], fx.Node] = {}

    def here(node: fx.Node, stage: int) -> fx.Node:
        """The node as a stage can use it; tensors are what they are."""
        if not is_number(node) or staged.stage_of.get(node) == stage:
            return node
        if (node, stage) not in made:
            made[node, stage] = _read_again(staged, node, stage, arriving) or staged.copy_into(
                stage, node, lambda arg: here(arg, stage), f"{staged.names[node]}_stage{stage}"
            )
        return made[node, stage]

    for node in numbers:
        for stage, users in sorted(staged.users(node).items()):
            local = here(node, min(stage, staged.count - 1))  # what the model returns is made by the last stage
            for user in users:
                user.replace_input_with(node, local)


def _read_again(
    staged: Staged, node: fx.Node, stage: int, arriving: dict[int, dict[str, tuple[fx.Node, int]]]
) -> fx.Node | None:
    found = arriving[stage].get(str(node.meta["val"]))
    if found is None:
        return None
    tensor, dim = found
    target: Any = torch.ops.aten.sym_size.int
    return staged.add(stage, target, (tensor, dim), f"{staged.names[node]}_stage{stage}", node)


def _arriving(staged: Staged) -> dict[int, dict[str, tuple[fx.Node, int]]]:
    """For each stage, where to read a size: tensors from earlier stages that it computes with."""
    found: dict[int, dict[str, tuple[fx.Node, int]]] = {stage: {} for stage in range(staged.count)}
    for node in staged.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        shape: tuple[Any, ...] = tuple(value.shape)
        sizes = [(dim, size) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]
        if not sizes:
            continue
        for stage in staged.users(node):
            if staged.made_at(node) < stage < staged.count:
                for dim, size in sizes:
                    found[stage].setdefault(str(size), (node, dim))
    return found
