"""A pipe that was traced without an example call."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.pipelining.build.detach import DetachExecutor, not_on_its_own
from wholestep.pipelining.build.traced_split import Cut
from wholestep.pipelining.pipe import Pipe
from wholestep.torch_private.pytrees import pytree


class TracedPipe(Pipe):
    """A model cut by `Pipe.from_tracing` without an example call. Called, it runs all stages here.

    With a loss it runs the backward too: parameters have their gradients when the call returns, also those that several
    stages use. Names inside of it are PiPPy's (`submod_0.moved_weight`); those of `state_dict()` are the model's.
    """

    def __init__(self, cut: Cut, loss_spec: Any = None) -> None:
        torch.nn.Module.__init__(self)
        self.split_gm = cut.split_gm
        self.num_stages = cut.num_stages
        self.loss_spec = loss_spec
        self.has_loss_and_backward = loss_spec is not None
        self.new_to_old_qualname_mapping = cut.names
        for i, stage in enumerate(self.stages):
            _use_names_of_model(stage, _names_in(cut.names, f"submod_{i}."))
        self._not_saved = cut.not_saved
        self._restore()

    def _restore(self) -> None:
        """What graph modules forget when they are built or copied."""
        self.split_gm.forward = not_on_its_own
        for stage, names in zip(self.stages, self._not_saved, strict=True):
            for name in names:
                stage.register_buffer(name, stage.get_buffer(name), persistent=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedPipe:
        new = TracedPipe.__new__(TracedPipe)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(vars(self), memo))
        new._restore()
        return new

    @property
    def has_loss_and_backwards(self) -> bool:
        """PiPPy's name for `has_loss_and_backward`."""
        return self.has_loss_and_backward

    @property
    def executor(self) -> DetachExecutor:
        """What runs `split_gm`."""
        return DetachExecutor(self.split_gm)

    @property
    def stages(self) -> list[Any]:
        """The modules of all stages."""
        return [self.split_gm.get_submodule(f"submod_{i}") for i in range(self.num_stages)]

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """For each parameter of which several stages have a copy, its name in each of them. Here it is one tensor."""
        users: dict[int, dict[str, str]] = {}
        for i, stage in enumerate(self.stages):
            for name, parameter in stage.named_parameters():
                users.setdefault(id(parameter), {})[f"submod_{i}"] = name
        return [names for names in users.values() if len(names) > 1]

    def remap_qualname(self, qualname: str) -> str:
        """The name in the model of a module or tensor of this pipe."""
        name = qualname.removeprefix("split_gm.")
        for end in [len(name), *(i for i in reversed(range(len(name))) if name[i] == ".")]:
            if name[:end] in self.new_to_old_qualname_mapping:
                return self.new_to_old_qualname_mapping[name[:end]] + name[end:]
        raise PipelineError(
            f"the pipe has nothing with the name {qualname}.", fix="use a name of pipe.named_parameters()"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages here, and the backward of the loss if there is one."""
        inputs = [node for node in self.split_gm.graph.nodes if node.op == "placeholder"]
        bound = _signature(inputs).bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(zip(inputs, bound.arguments.values(), strict=True))
        if not self.has_loss_and_backward:
            return fx.Interpreter(self.split_gm).run(initial_env=values)
        result = self.executor.run(initial_env=values)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def print_readable(self) -> str:
        """Print the stages as Python; also returned."""
        text = "\n".join(stage.print_readable(print_output=False) for stage in self.stages)
        print(text)
        return text

    def build_stage(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("a stage on a rank")

    def check(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("simulating a schedule")

    def materialize_stage(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("giving memory to one stage")

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("a flat list of inputs")

    def unflatten_outputs(self, flat: Sequence[Any]) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("a flat list of outputs")


def _needs_example(what: str) -> PipelineError:
    return PipelineError(
        f"{what} needs the shapes of values, and this pipe was traced without an example call.",
        fix="pipeline(module, mb_args) or Pipe.from_tracing(module, example_args=(...))",
    )


_KINDS = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
"""By the number of stars before a name."""


def _signature(inputs: Sequence[fx.Node]) -> inspect.Signature:
    """The arguments that the graph takes."""
    parameters = []
    for node in inputs:
        name = str(node.target)
        kind = _KINDS[len(name) - len(name.lstrip("*"))]
        default = node.args[0] if node.args else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name.lstrip("*"), kind, default=default))
    return inspect.Signature(parameters)


def _names_in(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Those of one stage that are called otherwise in the model."""
    inside = {new.removeprefix(prefix): old for new, old in names.items() if new.startswith(prefix)}
    return {new: old for new, old in inside.items() if new != old}


def _use_names_of_model(stage: torch.nn.Module, names: Mapping[str, str]) -> None:
    stage.register_state_dict_post_hook(partial(_to_model, names))  # type: ignore[no-untyped-call]
    stage.register_load_state_dict_pre_hook(partial(_from_model, names))  # type: ignore[no-untyped-call]


def _to_model(
    names: Mapping[str, str], module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for new, old in names.items():
        if prefix + new in state:
            state[prefix + old] = state.pop(prefix + new)


def _from_model(
    names: Mapping[str, str], module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    for new, old in names.items():
        if prefix + old in state:
            state[prefix + new] = state.pop(prefix + old)
