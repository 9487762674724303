"""Split policies by the size of parameters, as PiPPy had them, for `pipeline` and `Pipe.from_tracing`.

    pipeline(model, (x,), split_policy=split_into_equal_size(4))
    pipeline(model, (x,), split_policy=split_on_size_threshold(100_000_000))

A parameter counts wherever it is used. `pipeline(..., stages=4)` also looks at time, at what crosses a cut and at
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from wholestep.errors import OptionError, invalid_value
from wholestep.pipelining.build.markers import pipe_split

Policy = Callable[[fx.GraphModule], fx.GraphModule]


def split_on_size_threshold(threshold: int) -> Policy:
    """Begin a new stage wherever the parameters of the one before would come to more than `threshold` elements."""
    if threshold < 1:
        raise invalid_value("threshold", threshold, "use a number of elements above 0.")
    return lambda module: _marked(module, lambda sizes: places_by_threshold(sizes, threshold))


def split_into_equal_size(nstages: int) -> Policy:
    """Cut into `nstages` whose parameters are as equal in size as the order of the operators allows."""
    if nstages < 1:
        raise invalid_value("nstages", nstages, "use a number of stages above 0.")
    return lambda module: _marked(module, lambda sizes: places_of_equal_size(sizes, nstages))


def places_by_threshold(sizes: Sequence[int], threshold: int) -> list[int]:
    """The places of the operators that begin a stage."""
    found, held = [], 0
    for place, size in enumerate(sizes):
        if held and size and held + size > threshold:
            found.append(place)
            held = 0
        held += size
    return found


def places_of_equal_size(sizes: Sequence[int], stages: int) -> list[int]:
    """The places of the operators that begin a stage; the largest stage is as small as it can be."""
    with_size = [place for place, size in enumerate(sizes) if size]
    if len(with_size) < stages:
        raise OptionError(
            f"{len(with_size)} operators have parameters: they cannot be cut into {stages} stages of equal size.",
            fix="use fewer stages, or stages= of pipeline, which looks at all operators.",
        )
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(places_by_threshold(sizes, middle)) < stages:
            high = middle
        else:
            low = middle + 1
    found = places_by_threshold(sizes, high)
    rest = [place for place in with_size[1:] if place not in found]
    return sorted([*found, *rest[len(rest) - (stages - 1 - len(found)) :]])


def _marked(module: fx.GraphModule, choose: Callable[[Sequence[int]], Sequence[int]]) -> fx.GraphModule:
    nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
    for place in choose([_size(module, node) for node in nodes]):
        with module.graph.inserting_before(nodes[place]):
            module.graph.call_function(pipe_split)
    module.recompile()
    return module


def _size(module: fx.GraphModule, node: fx.Node) -> int:
    """Elements of the parameters that an operator reads."""
    if node.op == "call_module":
        return sum(parameter.numel() for parameter in module.get_submodule(str(node.target)).parameters())
    read = [_attribute(module, str(given.target)) for given in node.all_input_nodes if given.op == "get_attr"]
    return sum(value.numel() for value in read if isinstance(value, torch.nn.Parameter))


def _attribute(module: torch.nn.Module, name: str) -> object:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last, None)
