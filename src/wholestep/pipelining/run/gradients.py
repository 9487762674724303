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
    if gradient is None and isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.grad = DTensor.from_local(
            total.clone(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    elif gradient is None:
        parameter.grad = total.clone()
    else:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).copy_(total)
