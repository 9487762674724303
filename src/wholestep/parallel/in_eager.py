"""A step under a plan that runs as the plain function: gradients are reduced after each backward, as DDP does it.

    loss.backward()             local gradients; when the backward is over:
                                all_reduce of which parameters have a new gradient on any rank
                                all_reduce of the gradients of these, in the order of `model.parameters()`
    optimizer.step()            reads gradients that are equal on all ranks

Averaging is repeated safely: of a gradient that accumulates over two backwards, the older part is equal on all ranks
already, and the average of equal values is that value. Buffers that follow rank 0 are broadcast before the step.

A model that torch made parallel (`DistributedDataParallel`, `fully_shard`, also by `ws.FullyShard`) communicates by
itself in eager; only parameters without dimensions, which `ws.FullyShard` does not shard, are reduced here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from wholestep.parallel.plan import Plan
from wholestep.torch_private.autograd import after_backward
from wholestep.torch_private.distributed import is_dtensor


def why_not_in_eager(plan: Plan | None) -> str:
    """Why steps under a plan cannot run as the plain function; "" if they can."""
    if plan is None or plan.wrapped:
        return ""
    if plan.tensor_parallel is not None:
        return "tensor_parallel= is part of the graph only"
    if plan.reduce_op != "avg" or plan.gradient_divide_factor is not None:
        return "only averages of gradients are reduced in eager"
    return ""


@contextmanager
def communicating_in_eager(plan: Plan | None, models: Sequence[nn.Module]) -> Iterator[None]:
    """The context in which the plain function does on each rank what the plan says."""
    if plan is None or plan.wrapped:
        yield
        return
    units = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
    if plan.buffers == "broadcast":
        _broadcast_buffers(plan, models)
    parameters = list({p: None for model in models for p in model.parameters() if p.requires_grad})
    reducer = _AfterBackward(plan, [p for p in parameters if not is_dtensor(p)] if plan.reduces else [])
    try:
        for unit in units:
            unit.set_requires_gradient_sync(plan.reduces)
        yield
    finally:
        reducer.remove()
        for unit in units:
            unit.set_requires_gradient_sync(True)


def _broadcast_buffers(plan: Plan, models: Sequence[nn.Module]) -> None:
    with torch.no_grad():
        for i in range(plan.mesh.ndim):
            group = plan.mesh.get_group(i)
            for buffer in {b: None for model in models for b in model.buffers()}:
                dist.broadcast(buffer, dist.get_global_rank(group, 0), group)


class _AfterBackward:
    """Reduces gradients when a backward is over."""

    def __init__(self, plan: Plan, parameters: list[nn.Parameter]) -> None:
        self._groups = [plan.mesh.get_group(i) for i in range(plan.mesh.ndim) if plan.mesh.size(i) > 1]
        self._parameters = parameters
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._new: set[int] = set()
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in parameters if self._groups]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, parameter: Tensor) -> None:
        if not self._new:
            after_backward(self._reduce)
        self._new.add(self._index[parameter])  # type: ignore[index]

    def _reduce(self) -> None:
        device = self._parameters[0].device
        new = torch.zeros(len(self._parameters), dtype=torch.int32, device=device)
        new[sorted(self._new)] = 1
        self._new.clear()
        with torch.no_grad():
            for group in self._groups:
                dist.all_reduce(new, dist.ReduceOp.MAX, group)
            for i in new.nonzero().flatten().tolist():
                parameter = self._parameters[i]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                for group in self._groups:
                    dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, group)  # not every backend has AVG
                    parameter.grad.div_(group.size())
