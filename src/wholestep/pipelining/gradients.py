"""Gradients of a stage over a step: what was there before stays, what the step adds is scaled and reduced once.

step begins    earlier gradients are put aside, so that nothing scales or reduces them again
backwards      microbatches add up in fresh gradients
step ends      fresh / microbatches, averaged over data-parallel ranks, summed over copies of shared parameters,
               and added to the earlier ones, in the tensor that held them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from wholestep.errors import StageError


class Earlier:
    """The gradients that the parameters of a stage had before a step."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def put_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients off the parameters. What a step left that did not end is dropped."""
        self.put_back()
        for parameter in parameters:
            if parameter.grad is not None:
                self._kept.append((parameter, parameter.grad))
                parameter.grad = None

    def put_back(self) -> None:
        """As it was before the step."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept.clear()

    def add(self) -> None:
        """Add what the step found."""
        with torch.no_grad():
            for parameter, gradient in self._kept:
                fresh = parameter.grad
                if fresh is not None:
                    gradient += fresh
                parameter.grad = gradient
        self._kept.clear()


def divide(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Divide the gradients."""
    if factor != 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(factor)


@dataclass(frozen=True)
class Copy:
    """A parameter of this rank that stages on other ranks have too."""

    number: int
    """Which shared parameter of the pipe."""
    stage: int
    parameter: nn.Parameter
    stages: tuple[int, ...]
    """All stages that have it."""


def sum_copies(
    copies: Sequence[Copy], rank_of: Mapping[int, int], rank: int, exchange: Callable[[Sequence[_Transfer]], None]
) -> None:
    """Sum the gradients of shared parameters over their stages. All ranks end with the same bits.

    Each rank gives its gradients to the others and adds in the order of the stages. `exchange` does the transfers,
    which are in an order that both sides of each share.
    """
    transfers: list[_Transfer] = []
    parts: dict[tuple[int, int], torch.Tensor] = {}
    ordered = sorted(copies, key=lambda copy: (copy.number, copy.stage))
    for copy in ordered:
        parts[copy.number, copy.stage] = _local_gradient(copy.parameter)
    done: set[tuple[int, int]] = set()
    for copy in ordered:
        own = parts[copy.number, copy.stage]
        for other in copy.stages:
            peer = rank_of[other]
            if peer == rank:
                continue
            transfers.append(_Transfer(own, peer, copy.number, copy.stage, other, sends=True))
            if (copy.number, other) not in done:
                done.add((copy.number, other))
                parts[copy.number, other] = torch.empty_like(own)
            # Each of several copies here would get the same part: it comes once for each, into the same place.
            transfers.append(_Transfer(parts[copy.number, other], peer, copy.number, other, copy.stage, sends=False))
    exchange(sorted(transfers, key=lambda each: each.order))
    totals: dict[int, torch.Tensor] = {}
    for copy in ordered:
        if copy.number not in totals:
            totals[copy.number] = sum(
                (parts[copy.number, s] for s in copy.stages[1:]), parts[copy.number, copy.stages[0]]
            )
    for copy in ordered:
        _set_local_gradient(copy.parameter, totals[copy.number])


@dataclass(frozen=True)
class _Transfer:
    tensor: torch.Tensor
    peer: int
    number: int
    source: int
    target: int
    sends: bool

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.number, self.source, self.target)


def exchange_over(group: dist.ProcessGroup | None, global_rank: Callable[[int], int]) -> Callable[..., None]:
    """Transfers as one batch of sends and receives."""

    def exchange(transfers: Sequence[_Transfer]) -> None:
        if not transfers:
            return
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend if each.sends else dist.irecv, each.tensor, global_rank(each.peer), group)
                for each in transfers
            ]
        )
        for work in works:
            work.wait()

    return exchange


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return torch.zeros_like(local.detach())
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).contiguous()


def _set_local_gradient(parameter: nn.Parameter, total: torch.Tensor) -> None:
    if not parameter.requires_grad:
        return
    gradient = parameter.grad
    if gradient is None:
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(total, parameter.device_mesh, parameter.placements, run_check=False)
        parameter.grad = total.clone() if gradient is None else gradient
    else:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).copy_(total)


def clip_grad_norm_(
    stages: object, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of the whole model: the norm is over all stages, and a shared parameter counts once.

    `stages`: the stage of this rank, or all of them. Every rank of the pipeline calls it, after `schedule.step`.
    Returns the norm before clipping, the same on all ranks.
    """
    from wholestep.pipelining.stage import Stage  # the stage uses this module

    given = [stages] if isinstance(stages, Stage) else list(stages)  # type: ignore[call-overload]
    if not given or not all(isinstance(stage, Stage) for stage in given):
        raise StageError(
            "clip_grad_norm_ takes the stages of this rank, as build_stage returns them.",
            fix="pass the stage, or a list of all stages of this rank.",
        )
    counted = [p.grad for stage in given for p in stage.counted_parameters() if p.grad is not None]
    order = float(norm_type)
    total = _power_sum(counted, order, given[0].device)
    operation = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
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
    """The sum of the powers of all elements, or the largest: what adds up over stages."""
    norms = []
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient.detach(), order)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(whole.to(device, torch.float32))  # ranks add them up, so that all have one dtype
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
