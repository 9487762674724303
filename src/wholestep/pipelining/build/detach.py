"""Runs the graph of a pipe with every stage cut off from the others, as on ranks of their own."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import fx

from wholestep.pipelining.build.backward import stage_backward
from wholestep.torch_private.pytrees import pytree


def not_on_its_own(*args: Any, **kwargs: Any) -> NoReturn:
    """The forward of a graph of stages with a backward, which is right only in a `DetachExecutor`."""
    raise RuntimeError("To run pipeline locally, invoke the Pipe object directly, not `split_gm`")


class DetachExecutor(fx.Interpreter):
    """Runs `pipe.split_gm`. What a stage takes is detached from what made it: autograd ends at the stage.

    Gradients go back only through the graph's `stage_backward` nodes, which `loss=` of `pipeline` puts there.
    """

    def __init__(self, module: fx.GraphModule, garbage_collect_values: bool = True) -> None:
        super().__init__(module, garbage_collect_values)
        self.value_remap: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id: a value, and what stages take in its place. The value is kept, so its id stays its own."""

    def run(self, *args: Any, initial_env: dict[fx.Node, Any] | None = None, **options: Any) -> Any:
        """Run the graph with these arguments."""
        self.value_remap = {}
        try:
            return super().run(*args, initial_env=initial_env, **options)
        finally:
            self.value_remap = {}

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a stage on detached values."""
        args, kwargs = pytree.tree_map(self._detached, (args, kwargs))
        try:
            return super().call_module(target, args, kwargs)
        except RuntimeError as error:
            if "in-place" in str(error):
                error.add_note(f"{target} may not write what it takes; pipeline() gives a stage a copy to write")
            raise

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run another node; the backward of a stage is that of its detached inputs."""
        if target is stage_backward:
            inputs = pytree.tree_map(self._in_place_of, list(kwargs["input_values"]))
            if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(kwargs["output_grads"])):
                return tuple(None for _ in inputs)  # nothing differentiable came of this stage
            kwargs = {**kwargs, "input_values": inputs}
        return super().call_function(target, args, kwargs)

    def _detached(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        if id(value) not in self.value_remap:
            self.value_remap[id(value)] = (value, value.detach().requires_grad_(True))
        return self.value_remap[id(value)][1]

    def _in_place_of(self, value: Any) -> Any:
        return self.value_remap[id(value)][1] if id(value) in self.value_remap else value
