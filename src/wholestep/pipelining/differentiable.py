"""Along which values a gradient comes back: the graph runs once on fake tensors, with autograd watching.

Rules about operators would have to know that `zeros_like(h)` needs no gradient, and that `h.add_(w)` makes one of `h`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import fx

from wholestep._torch_compat import FakeTensorMode, new_fake_mode, pytree
from wholestep.pipelining.example_values import example_value
from wholestep.pipelining.regions import Region, regions_of


def find_differentiable(
    graph: fx.Graph, requires_grad: Callable[[fx.Node], bool], submodules: Mapping[str, Any]
) -> set[fx.Node]:
    """The nodes whose tensors require a gradient at the end of the graph."""
    env: dict[fx.Node, Any] = {}
    mode = new_fake_mode(None)
    with torch.enable_grad(), mode:
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                value = example_value(node.meta.get("val"), mode)
                env[node] = submodules.get(str(node.target)) if value is None else _leaf(value, requires_grad(node))
        work = [node for node in graph.nodes if node.op == "call_function"]
        for regions, nodes in groupby(work, regions_of):
            with _inside(regions):
                for node in nodes:
                    env[node] = _run(node, env, mode)
    return {node for node, value in env.items() if isinstance(value, torch.Tensor) and value.requires_grad}


def _leaf(value: Any, requires_grad: bool) -> Any:
    can = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.requires_grad_(True) if can and requires_grad and torch.is_grad_enabled() else value


def _run(node: fx.Node, env: dict[fx.Node, Any], mode: FakeTensorMode) -> Any:
    args = fx.map_arg(node.args, env.__getitem__)
    kwargs = fx.map_arg(node.kwargs, env.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        # An operator that only export can trace. Its results follow its inputs, which is at most too much.
        given = any(isinstance(env[arg], torch.Tensor) and env[arg].requires_grad for arg in node.all_input_nodes)
        return pytree.tree_map(lambda value: _leaf(value, given), example_value(node.meta.get("val"), mode))


@contextmanager
def _inside(regions: tuple[Region, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for region in regions:
            if region.kind != "checkpoint":
                stack.enter_context(region.enter())
        yield
