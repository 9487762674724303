"""A model cut into stages: it runs here as a module, and each stage can be taken to a rank."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from wholestep.errors import PipelineError, PipelineInputError
from wholestep.pipelining.build.calls import CallForm, ResultForm
from wholestep.pipelining.build.capture import Program
from wholestep.pipelining.build.detach import DetachExecutor
from wholestep.pipelining.build.loss import Result, find_loss
from wholestep.pipelining.build.materialize import BuffersFrom, materialize
from wholestep.pipelining.build.routing import Routing
from wholestep.pipelining.build.shared import MultiUseParameterConfig, SharedParameter
from wholestep.pipelining.build.stage_module import StageModule
from wholestep.pipelining.info import PipeInfo, readable
from wholestep.pipelining.planning.check import check
from wholestep.pipelining.run.stage import Stage
from wholestep.pipelining.run.stage_building import build_stage
from wholestep.simulate.pipeline import Timeline
from wholestep.torch_private.pytrees import pytree


def get_submod_name(stage_idx: int) -> str:
    """What the module of a stage is called in `Pipe.split_gm`."""
    return f"submod_pp_{stage_idx}"


class Pipe(torch.nn.Module):
    """A model cut into stages.

    Called, it runs all stages here, with the model's own parameters, and returns what the model returns. A model that
    returns one tensor gives a tuple of it, as torch's `Pipe` does.
    """

    def __init__(
        self,
        form: CallForm,
        program: Program,
        routing: Routing,
        stages: Sequence[StageModule],
        shared: Sequence[SharedParameter] = (),
    ) -> None:
        super().__init__()
        self.routing = routing
        self.shared = tuple(s for s in shared if s.mode is MultiUseParameterConfig.REPLICATE)
        """Parameters of which several stages have a copy. In this process the copies are one tensor."""
        self.transmitted = tuple(s for s in shared if s.mode is MultiUseParameterConfig.TRANSMIT)
        self.num_stages = routing.stages
        self.has_loss_and_backward = False
        self.loss_spec: Any = None
        self.call_runs_backward = False
        self.split_gm = _chain(routing, stages)
        self._form = form
        leaves = tuple(None if isinstance(leaf, fx.Node) else (leaf,) for leaf in program.outputs)
        self._results = ResultForm(program.out_spec, leaves)
        self._input_shapes = [
            tuple(size if isinstance(size, int) else None for size in node.meta["val"].shape)
            for node in program.graph.nodes
            if node.op == "placeholder"
        ]

    @staticmethod
    def from_tracing(mod: torch.nn.Module, *args: Any, **options: Any) -> Pipe:
        """Cut a model that has its marks, or by a policy. See `tracing.from_tracing`.

        With an example call this is `pipeline`, as in torch; without one the model is traced symbolically, as in PiPPy.
        """
        from wholestep.pipelining.build.tracing import from_tracing

        return from_tracing(mod, *args, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages here, one after the other; and the backward, if `pipeline` was given a loss."""
        values: Sequence[Any] = self.flatten_inputs(args, kwargs)
        if self.call_runs_backward:
            values = [value.detach() for value in DetachExecutor(self.split_gm).run(*values)]
        else:
            for stage in self.stages:
                result = stage(*values)
                values = result if isinstance(result, tuple) else (result,)
        result = self.unflatten_outputs(values)
        return (result,) if isinstance(result, torch.Tensor) else result

    @property
    def stages(self) -> list[StageModule]:
        """The modules of all stages."""
        return [getattr(self.split_gm, get_submod_name(i)) for i in range(self.num_stages)]

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """For each parameter of which several stages have a copy, its name in each of them."""
        return [{get_submod_name(stage): each.names[0] for stage in each.stages} for each in self.shared]

    def remap_qualname(self, qualname: str) -> str:
        """The name in the model of a module or tensor of this pipe: `split_gm.submod_pp_1.layer.weight` is
        `layer.weight`."""
        prefix, _, name = qualname.removeprefix("split_gm.").partition(".")
        stage = getattr(self.split_gm, prefix, None)
        if isinstance(stage, StageModule):
            known = {*stage.state_dict(keep_vars=True), *dict(stage.named_buffers()), *dict(stage.named_modules())}
            if name and name in known:
                return name
        raise PipelineError(
            f"the pipe has nothing with the name {qualname}.", fix="use a name of pipe.named_parameters()"
        )

    def get_stage_module(self, stage_idx: int) -> StageModule:
        """The module of a stage. It takes the values of `routing.inputs[i]`, one argument each, and returns a tuple of
        those of `routing.outputs[i]`, or the tensor itself if it is only one."""
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"Invalid stage index {stage_idx}!")
        return self.stages[stage_idx]

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Stage:
        """The stage on this rank, on a device, for any schedule of torch. Options: see `stage_building.py`."""
        return build_stage(self, stage_index, device, group, **options)

    def check(self, schedule: Any, *, memory: float | str | None = None, **options: Any) -> Timeline:
        """Simulate a schedule over these stages; refuse one that deadlocks or needs more memory. See `check.check`."""
        return check(self, schedule, memory=memory, **options)

    def materialize_stage(
        self,
        stage_index: int,
        device: torch.device | str,
        state: Mapping[str, torch.Tensor],
        *,
        buffers_from: BuffersFrom | None = None,
    ) -> torch.nn.Module:
        """Give a stage of a model without memory (meta or fake) its tensors, from a state with the model's names.

        `buffers_from` has the buffers that a state dict leaves out: a module, or a function of the name.
        """
        return materialize(self.get_stage_module(stage_index), device, state, buffers_from)

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
        """The tensors of a call in the order of `routing.inputs[0]`."""
        tensors = self._form.flatten(args, kwargs or {})
        for name, tensor, wanted in zip(self.routing.inputs[0], tensors, self._input_shapes, strict=True):
            fits = len(wanted) == tensor.dim() and all(
                w is None or w == s for w, s in zip(wanted, tensor.shape, strict=True)
            )
            if not fits:
                raise PipelineInputError(
                    f"{name} has the shape {list(tensor.shape)}; the graph is for {_shown(wanted)}",
                    fix="name the dimensions that change in dynamic_shapes of pipeline()",
                )
        return tensors

    def unflatten_outputs(self, flat: Sequence[Any]) -> Any:
        """What the model returns, from the values of `routing.outputs[-1]`."""
        return self._results.unflatten(flat)

    def own_loss(self, result: Any, target: Any = None) -> torch.Tensor:
        """The loss among what the model returns: the `loss_fn` of a schedule that is given none."""
        found: torch.Tensor = find_loss(pytree.tree_map(Result, result), self.loss_spec)
        return found

    def info(self) -> PipeInfo:
        """The graph of the stages, their number, and whether there is a loss."""
        return PipeInfo(self.split_gm.graph, self.num_stages, self.has_loss_and_backward, self)

    def print_readable(self) -> str:
        """Print the stages as Python, with the routing table above; also returned."""
        text = readable(self.routing, self.stages, self.shared + self.transmitted)
        print(text)
        return text

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of the model, under the model's names."""
        found: dict[str, Any] = {}
        for stage in self.stages:
            found.update(stage.state_dict(*args, **kwargs))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state of the model."""
        missing: list[str] = []
        known: set[str] = set()
        for stage in self.stages:
            own = stage.state_dict().keys()
            known |= set(own)
            given = {name: state_dict[name] for name in own if name in state_dict}
            missing += stage.load_state_dict(given, strict=False, assign=assign).missing_keys
        unexpected = [name for name in state_dict if name not in known]
        if strict and (missing or unexpected):
            raise RuntimeError(f"Error(s) in loading state_dict for Pipe: missing {missing}, unexpected {unexpected}")
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _shown(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def _chain(routing: Routing, stages: Sequence[StageModule]) -> fx.GraphModule:
    """A graph that calls the stages one after the other."""
    graph = fx.Graph()
    root = torch.nn.Module()
    values = [graph.placeholder(name) for name in routing.inputs[0]]
    for i in range(len(stages)):
        root.add_module(get_submod_name(i), torch.nn.Module())
        call = graph.create_node("call_module", get_submod_name(i), tuple(values))
        count = len(routing.outputs[i])
        values = [call] if count == 1 else [graph.call_function(operator.getitem, (call, k)) for k in range(count)]
    graph.output(tuple(values))
    chain = fx.GraphModule(root, graph, class_name="Pipe")
    for i, stage in enumerate(stages):  # not before: a graph module compiles those inside of it again
        chain.add_module(get_submod_name(i), stage)
    return chain
