"""A model cut into stages: runs here as a module, checks schedules by simulation, and builds stages on ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from wholestep.errors import OptionError, PipelineError, PipelineInputError, ScheduleError
from wholestep.ir.step_graph import as_bytes
from wholestep.pipelining.build.call_form import CallForm, ResultForm
from wholestep.pipelining.build.capture import CapturedModel
from wholestep.pipelining.build.loss_and_backward import DetachExecutor, Result, find_loss
from wholestep.pipelining.build.model_state import MultiUseParameterConfig, SharedParameter
from wholestep.pipelining.build.routing import Routing, readable
from wholestep.pipelining.build.stage_module import BuffersFrom, StageModule, materialize
from wholestep.pipelining.planning.stage_costs import HasStages, StageCosts, bytes_from, estimate_costs, times_from
from wholestep.pipelining.run.build_stage import PipeInfo, build_stage
from wholestep.pipelining.run.stage import Stage
from wholestep.simulate.machine import DEFAULT_MACHINE, Machine
from wholestep.simulate.pipeline import (
    ONE_STAGE_PER_RANK,
    V_SHAPED,
    Network,
    Schedule,
    Timeline,
    known_name,
    named_schedule,
    schedule_of,
    simulate,
)
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.modules_and_optimizers import incompatible_keys


def get_submod_name(stage_idx: int) -> str:
    """The name of a stage's module in `Pipe.split_gm`."""
    return f"submod_pp_{stage_idx}"


class Pipe(torch.nn.Module):
    """A model cut into stages.

    Calling it runs all stages here, with the model's own parameters, and returns the results of the model. A single
    tensor is returned in a tuple, as by torch's `Pipe`.
    """

    def __init__(
        self,
        form: CallForm,
        program: CapturedModel,
        routing: Routing,
        stages: Sequence[StageModule],
        shared: Sequence[SharedParameter] = (),
    ) -> None:
        super().__init__()
        self.routing = routing
        self.shared = tuple(s for s in shared if s.mode is MultiUseParameterConfig.REPLICATE)
        """Parameters that several stages hold a copy of. In this process the copies are one tensor."""
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
        """Cut a model at its markers or by a policy. See `from_tracing.from_tracing`.

        With an example call this is `pipeline`, as in torch; without one the model is traced symbolically, as in PiPPy.
        """
        from wholestep.pipelining.build.from_tracing import from_tracing

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
        """For each parameter that several stages hold a copy of, its name in each of them."""
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
            f"the pipe has no module or tensor named {qualname}.", fix="use a name of pipe.named_parameters()"
        )

    def get_stage_module(self, stage_idx: int) -> StageModule:
        """The module of a stage. It takes the values of `routing.inputs[i]`, one argument each, and returns a tuple of
        those of `routing.outputs[i]`, or the tensor itself if there is only one."""
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
        """Build a stage on this rank and device, for any schedule of torch. Options: see `run/build_stage.py`."""
        return build_stage(self, stage_index, device, group, **options)

    def check(self, schedule: Any, *, memory: float | str | None = None, **options: Any) -> Timeline:
        """Simulate a schedule over these stages; raises if it deadlocks or needs more memory. See `check` below."""
        return check(self, schedule, memory=memory, **options)

    def materialize_stage(
        self,
        stage_index: int,
        device: torch.device | str,
        state: Mapping[str, torch.Tensor],
        *,
        buffers_from: BuffersFrom | None = None,
    ) -> torch.nn.Module:
        """Allocate the tensors of a stage of a meta or fake model, from a state dict with the model's names.

        `buffers_from` provides non-persistent buffers: a module, or a function of the name.
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
                    f"{name} has the shape {list(tensor.shape)}; the graph was captured for {_shown(wanted)}",
                    fix="name the dynamic dimensions in dynamic_shapes of pipeline()",
                )
        return tensors

    def unflatten_outputs(self, flat: Sequence[Any]) -> Any:
        """The results of the model, from the values of `routing.outputs[-1]`."""
        return self._results.unflatten(flat)

    def own_loss(self, result: Any, target: Any = None) -> torch.Tensor:
        """The loss among the results of the model: the default `loss_fn` of a schedule."""
        found: torch.Tensor = find_loss(pytree.tree_map(Result, result), self.loss_spec)
        return found

    def info(self) -> PipeInfo:
        """The graph of the stages, their number, and whether the pipe has a loss."""
        return PipeInfo(self.split_gm.graph, self.num_stages, self.has_loss_and_backward, self)

    def print_readable(self) -> str:
        """Print the routing table and the stages as Python code, and return the text."""
        text = readable(self.routing, self.stages, self.shared + self.transmitted)
        print(text)
        return text

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the model."""
        found: dict[str, Any] = {}
        for stage in self.stages:
            found.update(stage.state_dict(*args, **kwargs))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state dict of the model."""
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
        return incompatible_keys(missing, unexpected)


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
    for i, stage in enumerate(stages):  # not before: a GraphModule would recompile its children
        chain.add_module(get_submod_name(i), stage)
    return chain


_MIB = 2**20


def check(
    pipe: HasStages,
    schedule: Any,
    *,
    memory: float | str | None = None,
    ranks: int | None = None,
    microbatches: int | None = None,
    machine: Machine = DEFAULT_MACHINE,
    state_copies: float = 3,
    network: Network | None = None,
    costs: Sequence[StageCosts] | None = None,
) -> Timeline:
    """The timeline of a schedule over the stages of a pipe; raises WS-SCHEDULE if it deadlocks, if a rank needs more
    than `memory` (bytes, or a string such as "16GB"), or if the schedule is for another number of stages.

    `schedule`: a schedule object of torch, a `Schedule`, lists of actions, or a name. With a name, `ranks` is required
    if the schedule allows any number of stages per rank; the default of `microbatches` is two per rank. If the
    parameters are on CUDA, transfers are ordered per pair of ranks, as with NCCL. Microbatches have the size with which
    the pipe was captured.
    """
    most = as_bytes(memory, "memory")
    listed = _listed(pipe, schedule, ranks, microbatches)
    if listed.stages != pipe.num_stages:
        fix = "cut the model into as many stages as the schedule has."
        raise ScheduleError(f"{listed.name} has {listed.stages} stages, the pipe has {pipe.num_stages}.", fix=fix)
    network = network or Network("ordered" if _on_cuda(pipe) else "rendezvous")
    timeline = simulate(listed, network=network)  # a deadlock does not depend on times: costs are estimated afterwards
    if timeline.deadlock is not None:
        fix = "put the receive of one of these ranks before its send, as torch's own schedules do."
        raise _refused(f"{listed.name} deadlocks. {timeline.deadlock}", fix, timeline)
    known = tuple(costs) if costs is not None else estimate_costs(pipe, machine)
    timeline = simulate(listed, times_from(known, machine), bytes=bytes_from(known, state_copies), network=network)
    if most is not None:
        _check_memory(timeline, most)
    return timeline


def _check_memory(timeline: Timeline, memory: float) -> None:
    over = [rank for rank, peak in enumerate(timeline.peak_bytes) if peak > memory]
    if over:
        worst = max(over, key=lambda rank: timeline.peak_bytes[rank])
        alive = timeline.peak_activations[worst]
        what = (
            f"{timeline.schedule.name} needs {timeline.peak_bytes[worst] / _MIB:.1f} MiB on rank {worst}, where "
            f"{memory / _MIB:.1f} MiB are allowed: {alive} activations are alive at once"
        )
        others = f" (ranks {', '.join(map(str, over))} are over)" if len(over) > 1 else ""
        fix = "ws.pipelining.plan lists schedules that fit."
        raise _refused(f"{what}{others}.", fix, timeline)


def _refused(what: str, fix: str, timeline: Timeline) -> ScheduleError:
    error = ScheduleError(what, fix=fix)
    error.timeline = timeline
    return error


def _listed(pipe: HasStages, schedule: Any, ranks: int | None, microbatches: int | None) -> Schedule:
    if isinstance(schedule, str):
        schedule = known_name(schedule)
        ranks = _ranks(pipe.num_stages, schedule) if ranks is None else ranks
        if schedule in ONE_STAGE_PER_RANK:
            return named_schedule(schedule, ranks, microbatches or 2 * ranks)
        if ranks < 1 or pipe.num_stages % ranks:
            fix = "cut the model into a multiple of the ranks."
            raise ScheduleError(f"{pipe.num_stages} stages cannot be divided evenly among {ranks} ranks.", fix=fix)
        return named_schedule(schedule, ranks, microbatches or 2 * ranks, pipe.num_stages // ranks)
    if isinstance(schedule, list | tuple | dict):
        schedule = Schedule.of(schedule)
    return schedule_of(schedule)


def _ranks(stages: int, schedule: str) -> int:
    """The number of ranks, if the schedule determines it."""
    if schedule in ONE_STAGE_PER_RANK:
        return stages
    if schedule not in V_SHAPED:
        possible = ", ".join(str(ranks) for ranks in range(1, stages + 1) if stages % ranks == 0)
        what = f"{schedule} can run {stages} stages on different numbers of ranks."
        raise OptionError(what, fix=f"pass ranks=, one of {possible}.")
    if stages % 2:
        raise ScheduleError(f"{schedule} has two stages on each rank; the pipe has {stages}.", fix="cut it once more.")
    return stages // 2


def _on_cuda(pipe: HasStages) -> bool:
    first: torch.nn.Parameter | None = next(iter(pipe.get_stage_module(0).parameters()), None)
    return first is not None and first.device.type == "cuda"
