"""What a step is given, checked before anything runs: inputs for the first stage, and rows that belong together.

A tensor with fewer rows than the others would be cut into smaller microbatches than theirs, and broadcast against them
without an error. Where a chunk spec says how an argument is cut, it is taken at its word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wholestep.errors import PipelineInputError
from wholestep.torch_private.pytrees import pytree


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The rows of a batch whose tensors are all cut along their first dim; 0 without any. Raises if they differ."""
    named = {f"argument {place}": value for place, value in enumerate(args)}
    named |= {f"{name}=": value for name, value in kwargs.items()}
    rows: dict[str, int] = {}
    for name, value in named.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                rows.setdefault(name, leaf.shape[0])
                rows[name] = min(rows[name], leaf.shape[0])
    if not rows:
        return 0
    most, fewest = max(rows, key=rows.__getitem__), min(rows, key=rows.__getitem__)
    if rows[most] != rows[fewest]:
        raise PipelineInputError(
            f"{fewest} has {rows[fewest]} rows and {most} has {rows[most]}: their microbatches would not fit.",
            fix="give both the rows of the batch; or say in args_chunk_spec and kwargs_chunk_spec of the schedule how "
            "each is cut, with None for one that every microbatch gets whole.",
        )
    return rows[most]


def check_target(target: Any, rows: int) -> None:
    """Raise if a target has fewer rows than its batch or microbatch."""
    for leaf in [target] if isinstance(target, torch.Tensor) else pytree.tree_leaves(target):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] < rows:
            raise PipelineInputError(
                f"the target has {leaf.shape[0]} rows for {rows} rows of input: it would be broadcast.",
                fix="give a target for each row of the batch.",
            )
