"""Gradients of a stage over a step: scaled once, reduced once, added to those of earlier steps.

    step begins    earlier gradients are set aside, so that they are neither scaled nor reduced again
    backwards      microbatches accumulate into fresh gradients
    step ends      fresh / microbatches, averaged over data-parallel ranks, summed over the replicas of shared
                   parameters, and added to the earlier ones, in place

Data parallelism inside a stage: the same stage on several ranks, each with its own data.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe.build_stage(i, device, mesh["pp"].get_group(), data_parallel=ws.Replicate(mesh["dp"]))

`ws.Replicate` all-reduces the gradients of a step when all microbatches are done. `ws.FullyShard` is torch's
`fully_shard` of the whole stage, whose reduction torch's stage runs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from wholestep.errors import PlanError
from wholestep.parallel.plan import FullyShard, Plan, Replicate
from wholestep.torch_private.fake_tensors import version_of


class PreviousGradients:
    """The gradients of a stage's parameters from before a step."""

    def __init__(self) -> None:
        self._saved: list[tuple[nn.Parameter, torch.Tensor]] = []

    def put_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move the gradients off the parameters. Gradients of a step that did not complete are dropped."""
        self.put_back()
        for parameter in parameters:
            if parameter.grad is not None:
                self._saved.append((parameter, parameter.grad))
                parameter.grad = None

    def put_back(self) -> None:
        """Restore the gradients from before the step."""
        for parameter, gradient in self._saved:
            parameter.grad = gradient
        self._saved.clear()

    def add(self) -> None:
        """Add the gradients of the step to the earlier ones."""
        with torch.no_grad():
            for parameter, gradient in self._saved:
                fresh = parameter.grad
                if fresh is not None:
                    gradient += fresh
                parameter.grad = gradient
        self._saved.clear()


def divide(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Divide the gradients."""
    if factor != 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(factor)


@dataclass(frozen=True)
class ReplicatedParameter:
    """A parameter of this rank of which other stages hold a copy."""

    number: int
    """The index of the shared parameter in the pipe."""
    stage: int
    parameter: nn.Parameter
    stages: tuple[int, ...]
    """All stages that hold it."""


def sum_copies(
    copies: Sequence[ReplicatedParameter],
    rank_of: Mapping[int, int],
    rank: int,
    exchange: Callable[[Sequence[_Transfer]], None],
) -> None:
    """Sum the gradients of shared parameters over their stages; the result is bitwise equal on all ranks.

    Each rank sends its gradients to the others and adds in the order of the stages. `exchange` runs the transfers,
    which are in the same order on both ranks.
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
            # Several copies on this rank receive the same part, once for each, into the same tensor.
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
    """A function that runs transfers as one batch of sends and receives."""

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


_BUCKET = 64 * 2**20


class GradientAveraging:
    """The asynchronous average of a stage's gradients over data-parallel ranks."""

    def __init__(self, plan: Replicate) -> None:
        self._plan = plan
        self._group: dist.ProcessGroup = plan.mesh.get_group()
        self._running: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        self._versions: dict[str, int] = {}

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to reduce the gradients, in buckets of one dtype."""
        if not self._plan.reduces:
            return
        divisor = self._plan.gradient_divide_factor
        if divisor is None:
            divisor = float(self._plan.ranks) if self._plan.reduce_op == "avg" else 1.0
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            flat.div_(divisor)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._running.append((work, flat, bucket))

    def finish(self) -> None:
        """Wait, and copy the averages into the gradients."""
        for work, flat, bucket in self._running:
            work.wait()
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
        self._running.clear()

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Broadcast buffers that the previous step wrote from the first rank, as DistributedDataParallel does."""
        if self._plan.buffers != "broadcast":
            return
        for name, buffer in module.named_buffers():
            if self._versions.get(name) != version_of(buffer):
                if name in self._versions:
                    dist.broadcast(buffer, group=self._group, group_src=0)
                self._versions[name] = version_of(buffer)


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    sizes: dict[tuple[torch.dtype, torch.device], tuple[int, list[torch.Tensor]]] = {}
    for gradient in gradients:
        key = (gradient.dtype, gradient.device)
        size, bucket = sizes.get(key, (_BUCKET, []))
        if size + gradient.nbytes > _BUCKET:
            size, bucket = 0, []
            buckets.append(bucket)
        bucket.append(gradient)
        sizes[key] = (size + gradient.nbytes, bucket)
    return buckets


def apply_plan(module: nn.Module, plan: Plan | None) -> GradientAveraging | None:
    """Apply a data-parallel plan to the module of a stage. Every rank of the plan's mesh must call it."""
    if plan is None:
        return None
    _check(plan)
    if plan.broadcast:
        _broadcast_state(module, plan)
    if isinstance(plan, Replicate):
        return GradientAveraging(plan)
    assert isinstance(plan, FullyShard)
    sharded = fully_shard(
        module, mesh=plan.mesh, reshard_after_forward=plan.reshard_after_forward, mp_policy=plan.policy
    )
    assert isinstance(sharded, FSDPModule)
    factor = plan.gradient_divide_factor
    if factor is None and plan.reduce_op == "sum":
        factor = 1.0
    if factor is not None:
        sharded.set_gradient_divide_factor(factor)
    return None


def _check(plan: Plan) -> None:
    if not isinstance(plan, Replicate | FullyShard):
        raise PlanError(
            f"data_parallel takes a plan, not a {type(plan).__name__}.",
            fix='use ws.Replicate(mesh["dp"]) or ws.FullyShard(mesh["dp"]).',
        )
    if plan.tensor_parallel is not None:
        raise PlanError(
            "a stage is a flat graph: tensor-parallel styles for modules cannot be applied.",
            fix="leave tensor_parallel out.",
        )
    if isinstance(plan, FullyShard) and (plan.modules is not None or not plan.reduces):
        raise PlanError(
            "a stage is sharded as one unit and reduces its gradients in every step.",
            fix="leave modules= and no_sync() out.",
        )


def _broadcast_state(module: nn.Module, plan: Plan) -> None:
    for axis in range(plan.mesh.ndim):
        group = plan.mesh.get_group(axis)
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
