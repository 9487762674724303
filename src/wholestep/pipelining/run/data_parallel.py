"""Data parallelism inside a stage: the same stage on several ranks, each with its data, reduced once a step.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe.build_stage(i, device, mesh["pp"].get_group(), data_parallel=ws.Replicate(mesh["dp"]))

`ws.Replicate` all-reduces the step's own gradients when all microbatches are done. `ws.FullyShard` is torch's
`fully_shard` of the whole stage, whose reduction torch's stage does at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from wholestep.errors import PlanError
from wholestep.parallel.plan import FullyShard, Plan, Replicate
from wholestep.torch_private.fake_tensors import version_of

_BUCKET = 64 * 2**20


class Averaging:
    """The gradients of a stage on their way to their average over data-parallel ranks."""

    def __init__(self, plan: Replicate) -> None:
        self._plan = plan
        self._group: dist.ProcessGroup = plan.mesh.get_group()
        self._running: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        self._versions: dict[str, int] = {}

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to reduce the gradients, in buckets of one dtype."""
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
        """Wait, and write the gradients back."""
        for work, flat, bucket in self._running:
            work.wait()
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
        self._running.clear()

    def take_buffers(self, module: nn.Module) -> None:
        """Buffers that the step before wrote are taken from the first rank, as DistributedDataParallel does."""
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


def apply_plan(module: nn.Module, plan: Plan | None) -> Averaging | None:
    """Put a stage's module into the form of a plan. Every rank of the plan's mesh calls it for the same stage."""
    if plan is None:
        return None
    _check(plan)
    if plan.broadcast:
        _take_from_first(module, plan)
    if isinstance(plan, Replicate):
        return Averaging(plan)
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
            "a stage is a flat graph, to which tensor-parallel styles for modules cannot be applied.",
            fix="leave tensor_parallel out.",
        )
    if isinstance(plan, FullyShard) and (plan.modules is not None or not plan.reduces):
        raise PlanError(
            "a stage is sharded as one unit and reduces its gradients in every step.",
            fix="leave modules= and no_sync() out.",
        )


def _take_from_first(module: nn.Module, plan: Plan) -> None:
    for axis in range(plan.mesh.ndim):
        group = plan.mesh.get_group(axis)
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
