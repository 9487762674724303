"""`build_stage`: the stage of a pipe on this rank, with gradient clipping over all stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from wholestep.errors import OptionError, StageError
from wholestep.parallel.plan import Plan
from wholestep.pipelining.build.stage_module import StageModule, follow_device
from wholestep.pipelining.run.rank_step import RankStep
from wholestep.pipelining.run.stage import Stage, StageSource, Weights
from wholestep.ranks.channel import Channel

Device = torch.device | str
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class PipeInfo:
    """Information about a pipe, as torch's."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool
    pipe: StageSource | None = field(default=None, repr=False, compare=False)
    """The pipe itself, for `build_stage`."""


@overload
def build_stage(
    pipe: StageSource,
    stage_index: int,
    device: Device,
    group: Group = None,
    *,
    data_parallel: Plan | None = None,
    weights: Weights = "rows",
) -> Stage: ...


@overload
def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: Device,
    group: Group = None,
    *,
    data_parallel: Plan | None = None,
    weights: Weights = "rows",
) -> Stage: ...


def build_stage(*given: Any, **named: Any) -> Stage:
    """Build the stage of a pipe on this rank, for any schedule of torch.

    Also in torch's form, `build_stage(stage_module, stage_index, pipe.info(), device, group)`, by position or by these
    names: then the given module runs in place of the pipe's own. It may be that module wrapped
    (DistributedDataParallel, torch.compile).

    `weights`: how microbatches of different sizes are weighted. "rows": by their size, so that the gradient of a mean
    loss is that of the whole batch. "equal": equally, as in torch; for losses that are sums.
    """
    torchs_form = {"stage_module", "pipe_info"} & set(named) or any(isinstance(each, PipeInfo) for each in given)
    return _of_module(*given, **named) if torchs_form else _of_pipe(*given, **named)


def _of_pipe(pipe: StageSource, stage_index: int, device: Device, group: Group = None, **options: Any) -> Stage:
    return _build(pipe, stage_index, None, device, group, **options)


def _of_module(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: Device,
    group: Group = None,
    **options: Any,
) -> Stage:
    pipe = getattr(pipe_info, "pipe", None)
    if pipe is None:
        raise StageError("this PipeInfo has no reference to its pipe.", fix="pass pipe.info().")
    return _build(pipe, stage_index, stage_module, device, group, **options)


def _build(
    pipe: StageSource,
    stage_index: int,
    module: nn.Module | None,
    device: Device,
    group: Group = None,
    *,
    data_parallel: Plan | None = None,
    weights: Weights = "rows",
) -> Stage:
    if weights not in ("rows", "equal"):
        raise OptionError(f"weights={weights!r} is not known.", fix='use "rows" or "equal".')
    if not 0 <= stage_index < pipe.num_stages:
        raise StageError(
            f"there is no stage {stage_index}: the pipe has {pipe.num_stages}.", fix="count stages from 0."
        )
    own = pipe.get_stage_module(stage_index)
    module = own if module is None else module
    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None and torch.device(device).type != "meta":
        raise StageError(
            f"{empty} of stage {stage_index} is on the meta device: it has no data.",
            fix=f"materialize the stage first: pipe.materialize_stage({stage_index}, device, state_dict).",
        )
    if isinstance(own, StageModule) and empty is None:
        follow_device(own, device)  # a stage without tensors, of a meta model
    steps: dict[Any, RankStep] = pipe.__dict__.setdefault("_rank_steps", {})
    rank_step = steps.get(group)
    if rank_step is None:
        rank_step = steps[group] = RankStep(group, pipe.shared)
        Channel.current()  # starts the heartbeat of this rank: others may wait for it
    return Stage(pipe, stage_index, module, torch.device(device), group, rank_step, data_parallel, weights)


def own_stages(stages: Stage | Sequence[Stage], who: str) -> list[Stage]:
    """The stages of this rank as a list; raises for anything else."""
    given: list[Any] = list(stages) if isinstance(stages, list | tuple) else [stages]
    if not given or not all(isinstance(stage, Stage) for stage in given):
        raise StageError(
            f"{who} takes stages of pipe.build_stage.", fix="pass the stage of this rank, or the list of all of them."
        )
    return given


def clip_grad_norm_(
    stages: Stage | Sequence[Stage], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of the whole model: the norm is over all stages, and a shared parameter counts once.

    `stages`: all stages of this rank. Every rank of the pipeline must call it, after `schedule.step`. Returns the norm
    before clipping, the same on all ranks.
    """
    given = own_stages(stages, "clip_grad_norm_")
    counted = [p.grad for stage in given for p in stage.counted_parameters() if p.grad is not None]
    order = float(norm_type)
    total = _power_sum(counted, order, given[0].device)
    operation = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
    with given[0].rank_step.watch:
        dist.all_reduce(total, operation, group=given[0].group)
    if order != float("inf"):
        total = total ** (1.0 / order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is non-finite, so that they cannot be clipped."
        )
    parameters = [p for stage in given for p in stage.submod.parameters() if p.grad is not None]
    with torch.no_grad():
        _scale_to(parameters, max_norm, total)
    return total


def _power_sum(gradients: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of the powers of all elements, or the maximum, which can be reduced over stages."""
    norms = []
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient.detach(), order)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(whole.to(device, torch.float32))  # one dtype on all ranks, for the all-reduce
    if not norms:
        return torch.zeros((), device=device)
    stacked = torch.stack(norms)
    return stacked.max() if order == float("inf") else (stacked**order).sum()


def _scale_to(parameters: Sequence[nn.Parameter], max_norm: float, total: torch.Tensor) -> None:
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device, local.dtype))
