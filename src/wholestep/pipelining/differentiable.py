"""Along which values a gradient comes back: the graph runs once on fake tensors, with autograd watching.

Rules about operators would have to know that `zeros_like(h)` needs no gradient, and that `h.add_(w)` makes one of `h`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import fx

from wholestep._torch_compat import FakeTensor
from wholestep.pipelining.regions import Region, regions_of


def find_differentiable(
    graph: fx.Graph, requires_grad: Callable[[fx.Node], bool], submodules: Mapping[str, Any]
) -> set[fx.Node]:
    """The nodes whose tensors require a gradient at the end of the graph."""
    env: dict[fx.Node, Any] = {}
    leaves = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    fakes = [node.meta["val"] for node in leaves if isinstance(node.meta.get("val"), FakeTensor)]
    with torch.enable_grad(), fakes[0].fake_mode if fakes else nullcontext():
        for node in leaves:
            env[node] = _leaf(node, requires_grad, submodules)
        work = [node for node in graph.nodes if node.op == "call_function"]
        for regions, nodes in groupby(work, regions_of):
            with _inside(regions):
                for node in nodes:
                    env[node] = _run(node, env)
    return {node for node, value in env.items() if isinstance(value, torch.Tensor) and value.requires_grad}


def _leaf(node: fx.Node, requires_grad: Callable[[fx.Node], bool], submodules: Mapping[str, Any]) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return submodules.get(str(node.target), value)
    fresh = value.detach()
    return fresh.requires_grad_(True) if requires_grad(node) and fresh.is_floating_point() else fresh


def _run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, env.__getitem__)
    kwargs = fx.map_arg(node.kwargs, env.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        # An operator that only export can trace. Its result follows its inputs, which is at most too much.
        value = node.meta.get("val")
        given = any(isinstance(env[arg], torch.Tensor) and env[arg].requires_grad for arg in node.all_input_nodes)
        if isinstance(value, torch.Tensor) and given and value.is_floating_point() and torch.is_grad_enabled():
            return value.detach().requires_grad_(True)
        return value


@contextmanager
def _inside(regions: tuple[Region, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for region in regions:
            if region.kind != "checkpoint":
                stack.enter_context(region.enter())
        yield
