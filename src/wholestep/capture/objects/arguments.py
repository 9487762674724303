"""Arguments of a step: the paths of their leaves, and which of their dimensions are dynamic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wholestep.errors import DynamicShapeError
from wholestep.ir.user_objects.call_tree import Flat
from wholestep.options import Dim, Options


def name_leaves(fn: Callable[..., Any], flat: Flat, positional: int) -> list[str]:
    """Paths that start with the name of the argument: `batch['x']` instead of `[0][2]['x']`."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for i in range(positional):
        if i < len(parameters) and parameters[i].kind is not inspect.Parameter.VAR_POSITIONAL:
            names.append(parameters[i].name)
        else:
            names.append(f"arg{i}")
    renamed: list[str] = []
    for path in flat.paths:
        if path.startswith("[0]["):
            index, _, rest = path[4:].partition("]")
            renamed.append(names[int(index)] + rest)
        else:
            key, _, rest = path[4:].partition("]")
            renamed.append(key.strip("'\"") + rest)
    return renamed


def dynamic_dims(options: Options, paths: list[str], leaves: list[Any]) -> dict[int, dict[int, Dim]]:
    """For each batch leaf, the dimensions that were declared dynamic by a path that leads to it."""
    if options.dynamic is True:
        return _first_dims(leaves)
    found: dict[int, dict[int, Dim]] = {}
    for declared, dims in (options.dynamic or {}).items():
        matched = False
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            inside = path == declared or (path.startswith(declared) and path[len(declared)] in ".[")
            if not inside or not isinstance(leaf, Tensor):
                continue
            matched = True
            for dim, spec in dims.items():
                if -leaf.dim() <= dim < leaf.dim():
                    found.setdefault(i, {})[dim % leaf.dim()] = spec
        if not matched:
            tensors = [p for p, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
            raise DynamicShapeError(
                f"dynamic names {declared!r}, and no tensor argument has that path.",
                fix=f"the tensor arguments are {', '.join(tensors) or 'none'}.",
            )
    return found


def _first_dims(leaves: list[Any]) -> dict[int, dict[int, Dim]]:
    """The first dimension of every tensor, as `dynamic=True` means it: equal sizes are one dimension that varies.

    Sizes 0 and 1 stay static, since they broadcast, and so do tensors whose strides do not follow from their sizes.
    """
    by_size: dict[int, Dim] = {}
    found: dict[int, dict[int, Dim]] = {}
    for i, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.dim() > 0 and leaf.shape[0] > 1 and leaf.is_contiguous():
            found[i] = {0: by_size.setdefault(leaf.shape[0], Dim())}
    return found
