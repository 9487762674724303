"""Reads of sharded parameters in a trace: each is gathered once per forward, and again in the backward.

    layer(x)                          nodes of the graph
    weight = layer.weight             wait(all_gather(shard))            once per forward of the model
    y = x @ weight.T                  mm(x, t(whole))
    backward                          wait(all_gather(shard))  again, unless reshard_after_forward=False
                                      mm(dy, whole'), and the unsharded gradient goes to the `Reducer`

Saved-tensor hooks add the second gather: instead of a gathered parameter (or a view of one), autograd saves how to
gather it again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from wholestep.errors import ParameterDataError
from wholestep.ir.meta import update_node_meta, user_location
from wholestep.ir.trace_protocol import TracedValue, TraceRecorder
from wholestep.parallel.collectives import Collectives
from wholestep.parallel.place_models import GatheredLayout
from wholestep.parallel.plan import FullyShard
from wholestep.torch_private.autograd import graph_task
from wholestep.torch_private.distributed import dtensor_over, is_dtensor, local_of, spec_of


@dataclass(eq=False)
class Sharded:
    """A sharded parameter of the traced step."""

    fake: Tensor
    """The fake DTensor in the model."""
    path: str
    layout: GatheredLayout


class GradientSink(Protocol):
    """Receives unsharded gradients of gathered parameters."""

    def add(self, param: Sharded, grad: Tensor) -> None: ...


class _Gathered(torch.autograd.Function):
    """The gathered parameter; its gradient goes to the reducer and not into `.grad`."""

    @staticmethod
    def forward(ctx: FunctionCtx, fake: Tensor, param: Sharded, gathering: Gathering) -> Tensor:
        ctx.param, ctx.gathering = param, gathering  # type: ignore[attr-defined]
        return gathering.gather(param)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Any:
        ctx.gathering.reducer.add(ctx.param, grad)  # type: ignore[attr-defined]
        return None, None, None


class Gathering:
    """Gathers the sharded parameters in one trace."""

    def __init__(self, plan: FullyShard, recorder: TraceRecorder, reducer: GradientSink) -> None:
        self.reducer = reducer
        self._plan = plan
        self._axis = plan.shard_axis
        self._dtype = plan.policy.param_dtype
        self._recorder = recorder
        self._collectives = Collectives(recorder)
        self._forward: dict[Sharded, Tensor] = {}
        self._forwards = 0
        self._generations: dict[tuple[int, int], int] = {}
        self._backward: dict[tuple[Sharded, int], Tensor] = {}
        self._whole: dict[Any, tuple[Sharded, Tensor]] = {}
        """Gathered tensors by their memory (`TracedMemory`)."""
        self._versions: dict[Any, int] = {}
        """The version of that memory when it was gathered (in a world of one the parameter itself)."""

    def read(self, param: Sharded) -> Tensor:
        """The gathered parameter, for code inside of a module's forward."""
        task = graph_task()
        if task >= 0:  # a forward that is recomputed in a backward
            return self._gather_in_backward(param, task)
        found = self._forward.get(param)
        if found is None:
            found = self._forward[param] = self._differentiable(param)
        return found

    def release(self) -> None:
        """Drop all fakes after the trace: autograd nodes of the trace may still refer to this object."""
        self._forward, self._backward, self._whole, self._versions = {}, {}, {}, {}

    def end_forward(self) -> None:
        """The outermost forward has ended: the next one gathers again."""
        self.check_unwritten()
        self._forward.clear()
        self._forwards += 1

    def gather(self, param: Sharded) -> Tensor:
        """Add the all-gather of a parameter to the graph."""
        local = local_of(param.fake)
        if self._dtype is not None and local.dtype != self._dtype:
            local = local.to(self._dtype)
        first = self._recorder.nodes.last()
        whole = self._collectives.gather_rows(local, self._axis, param.layout.shape[0])
        if param.layout.stride is not None:
            whole = self._collectives.with_stride(whole, param.layout.stride)
        for node in self._recorder.nodes.since(first):
            update_node_meta(
                node, parameter=param.path, recompute=graph_task() >= 0, generation=self._generation(graph_task())
            )
        if whole is local:
            whole = local.view_as(local)
        base = self._recorder.values.value(whole).base
        self._whole[base] = (param, whole)
        self._versions[base] = base.version
        if param.layout.spec is not None:
            return dtensor_over(whole, param.layout.spec)
        return whole

    def _generation(self, task: int) -> int:
        """An index of the current forward or backward; 0 if gathered parameters stay saved."""
        if not self._plan.reshard_after_forward:
            return 0
        return self._generations.setdefault((self._forwards, task), len(self._generations))

    def hooks(self) -> AbstractContextManager[Any]:
        """Context in which autograd saves no gathered parameters."""
        if not self._plan.reshard_after_forward or self._axis.size == 1:
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def check_unwritten(self) -> None:
        """Raise if the step wrote to a gathered copy: the write would be lost."""
        for base, version in self._versions.items():
            param, _ = self._whole[base]
            if base.version != version:
                raise ParameterDataError(
                    f"the step writes to {param.path} inside of a forward, where it is a gathered copy.",
                    fix="write to the parameter outside of the model's forward, or do not shard that module.",
                    location=user_location(),
                )
        if self._axis.size == 1:
            self._versions.clear()  # from now on the optimizer may write

    def _differentiable(self, param: Sharded) -> Tensor:
        if not param.fake.requires_grad or not torch.is_grad_enabled():
            with torch.no_grad():
                return self.gather(param)
        whole: Tensor = _Gathered.apply(param.fake, param, self)  # type: ignore[no-untyped-call]
        return whole

    def _gather_in_backward(self, param: Sharded, task: int) -> Tensor:
        found = self._backward.get((param, task))
        if found is None:
            found = self._backward[param, task] = self._differentiable(param)
        return found

    def _pack(self, tensor: Tensor) -> Any:
        local = local_of(tensor)
        if not self._recorder.values.knows(local):
            return tensor
        value = self._recorder.values.value(local)
        found = self._whole.get(value.base)
        if found is None or value.base.version > 0:
            return tensor
        spec = spec_of(tensor) if is_dtensor(tensor) else None
        return _Regather(found[0], _chain(value, found[1]), spec)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Regather):
            found: Tensor = packed
            return found
        with torch.no_grad():
            whole = local_of(self._gather_in_backward(packed.param, graph_task())).detach()
            for step in packed.steps:
                whole = step(whole)
        return whole if packed.spec is None else dtensor_over(whole, packed.spec)


@dataclass(frozen=True)
class _Regather:
    """How to get a saved tensor again: gather a parameter and repeat its views."""

    param: Sharded
    steps: tuple[Callable[[Tensor], Tensor], ...]
    spec: Any


def _chain(value: TracedValue, whole: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
    """The view operators that lead from a gathered parameter to one of its views."""
    steps: list[Callable[[Tensor], Tensor]] = []
    step: TracedValue | None = value
    while step is not None and step.fake is not whole and step.parent is not None:
        steps.append(_view(step))
        step = step.parent
    return tuple(reversed(steps))


def _view(value: TracedValue) -> Callable[[Tensor], Tensor]:
    op, args, kwargs, index = value.op, value.args, value.kwargs, value.index

    def apply(source: Tensor) -> Tensor:
        out = op(source, *args, **kwargs)
        found: Tensor = out if index is None else out[index]
        return found

    return apply
