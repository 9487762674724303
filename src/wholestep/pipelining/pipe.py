"""A model cut into stages: it runs here as a module, and each stage can be taken to a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep._torch_compat import pytree
from wholestep.pipelining.build import build_stage
from wholestep.pipelining.capture import Captured, capture
from wholestep.pipelining.cut import stages_by_marks
from wholestep.pipelining.markers import annotate_split_points
from wholestep.pipelining.routing import Need, Routing, plan_routes
from wholestep.pipelining.shared import SharedParameter


class Pipe(torch.nn.Module):
    """A model cut into stages."""

    def __init__(
        self,
        captured: Captured,
        routing: Routing,
        stages: Sequence[fx.GraphModule],
        shared: Sequence[SharedParameter] = (),
    ) -> None:
        super().__init__()
        self.captured = captured
        self.routing = routing
        self.shared = tuple(shared)
        self.stages = torch.nn.ModuleList(stages)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.routing.stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages here, one after the other. A model that returns one tensor gives a tuple of it, as torch's."""
        values: Any = self.flatten_inputs(args, kwargs)
        for stage in self.stages:
            values = stage(*values)
            values = [values] if isinstance(values, torch.Tensor) else list(values)
        result = self.unflatten_outputs(values)
        return (result,) if isinstance(result, torch.Tensor) else result

    def get_stage_module(self, stage_idx: int) -> torch.nn.Module:
        """The module of a stage. It takes `routing.inputs[i]` and returns a tuple of `routing.outputs[i]`, or the
        tensor itself if it is only one."""
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"Invalid stage index {stage_idx}!")
        return self.stages[stage_idx]

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
        """The tensors of a call in the order of `routing.inputs[0]`."""
        return self.captured.form.flatten(args, kwargs or {})

    def unflatten_outputs(self, flat: Sequence[torch.Tensor]) -> Any:
        """What the model returns, from the values of `routing.outputs[-1]`."""
        values = iter(flat)
        result: Any = next(iter(reversed(self.captured.graph.nodes))).args[0]
        leaves = [next(values) if isinstance(leaf, fx.Node) else leaf for leaf in result]
        return pytree.tree_unflatten(leaves, self.captured.out_spec)


def pipeline(
    module: torch.nn.Module,
    mb_args: Sequence[Any],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, Any] | None = None,
) -> Pipe:
    """Cut a module into stages."""
    with annotate_split_points(module, split_spec or {}):
        captured = capture(module, mb_args, mb_kwargs or {})
    return cut_pipe(module, captured)


def cut_pipe(module: torch.nn.Module, captured: Captured) -> Pipe:
    """The pipe of a captured model whose graph has its marks."""
    stage_of = stages_by_marks(captured.graph)
    count = max(stage_of.values(), default=0) + 1
    routing = routes(captured, module, stage_of, count)
    members: list[list[fx.Node]] = [[] for _ in range(count)]
    for node, stage in stage_of.items():
        members[stage].append(node)
    states = {
        str(node.target): _owner(module, str(node.target)) for node in captured.graph.nodes if node.op == "get_attr"
    }
    stages = [build_stage(i, members[i], routing, states) for i in range(count)]
    return Pipe(captured, routing, stages)


def routes(captured: Captured, module: torch.nn.Module, stage_of: Mapping[fx.Node, int], count: int) -> Routing:
    """The routing table of a graph whose nodes have their stages."""
    differentiable: dict[fx.Node, bool] = {}
    needs: list[Need] = []
    inputs: list[str] = []
    outputs: list[str] = []
    for node in captured.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            owner, name = _owner(module, str(node.target))
            differentiable[node] = getattr(owner, name).requires_grad
            continue
        if node.op == "output":
            outputs = [leaf.name for leaf in node.args[0] if isinstance(leaf, fx.Node)]
            continue
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        differentiable[node] = floating and any(differentiable[given] for given in node.all_input_nodes)
        if not isinstance(value, torch.Tensor):
            continue
        users = sorted({stage_of[user] for user in node.users if user in stage_of})
        if node.op == "placeholder":
            inputs.append(node.name)
            needs.append(Need(node.name, "input", tuple(users), value, differentiable[node]))
        elif node in stage_of:
            needs.append(Need(node.name, stage_of[node], tuple(users), value, differentiable[node]))
    return plan_routes(count, needs, inputs, outputs)


def _owner(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last
