"""Gradient clipping over all stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from wholestep.pipelining.run.build_stage import own_stages
from wholestep.pipelining.run.stage import Stage


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
