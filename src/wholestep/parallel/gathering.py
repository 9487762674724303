"""Reading a sharded parameter while a step is traced: gathered once per forward, and once more per backward.

    layer(x)                          what the graph gets
    weight = layer.weight             wait(all_gather(shard))            once per forward of the model
    y = x @ weight.T                  mm(x, t(whole))
    backward                          wait(all_gather(shard))  again, unless reshard_after_forward=False
                                      mm(dy, whole'), and the whole gradient goes to the `Reducer`

The second gather is made by saved-tensor hooks: what autograd would keep of a gathered parameter (or of a view of one)
is replaced by the way to make it again.
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
from wholestep.parallel.place import Form
from wholestep.parallel.plan import FullyShard
from wholestep.torch_private.autograd import graph_task
from wholestep.torch_private.dtensor import dtensor_over, is_dtensor, local_of, spec_of


@dataclass(eq=False)
class Sharded:
    """A sharded parameter of the step that is traced."""

    fake: Tensor
    """The DTensor that stands for it in the model."""
    path: str
    form: Form


class TakesGradients(Protocol):
    """Who takes whole gradients of gathered parameters."""

    def add(self, param: Sharded, grad: Tensor) -> None: ...


class _Gathered(torch.autograd.Function):
    """The whole parameter; its gradient goes to the reducer and not into `.grad`."""

    @staticmethod
    def forward(ctx: FunctionCtx, fake: Tensor, param: Sharded, gathering: Gathering) -> Tensor:
        ctx.param, ctx.gathering = param, gathering  # type: ignore[attr-defined]
        return gathering.gather(param)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Any:
        ctx.gathering.reducer.add(ctx.param, grad)  # type: ignore[attr-defined]
        return None, None, None


class Gathering:
    """Whole parameters of one trace."""

    def __init__(self, plan: FullyShard, recorder: TraceRecorder, reducer: TakesGradients) -> None:
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
        """Gathered tensors by the memory they are (`Base`)."""
        self._versions: dict[Any, int] = {}
        """How often that memory had been written when it was gathered (a world of one gathers nothing)."""

    def read(self, param: Sharded) -> Tensor:
        """The whole parameter, for code inside of a module's forward."""
        task = graph_task()
        if task >= 0:  # recomputed in a backward
            return self._again(param, task)
        found = self._forward.get(param)
        if found is None:
            found = self._forward[param] = self._differentiable(param)
        return found

    def release(self) -> None:
        """After the trace: hold none of its fakes. Autograd nodes of the trace may still refer to this object."""
        self._forward, self._backward, self._whole, self._versions = {}, {}, {}, {}

    def forget(self) -> None:
        """The outermost forward ended: the next one gathers anew."""
        self.check_unwritten()
        self._forward.clear()
        self._forwards += 1

    def gather(self, param: Sharded) -> Tensor:
        """Record the collective."""
        local = local_of(param.fake)
        if self._dtype is not None and local.dtype != self._dtype:
            local = local.to(self._dtype)
        first = self._recorder.nodes.last()
        whole = self._collectives.gather_rows(local, self._axis, param.form.shape[0])
        if param.form.stride is not None:
            whole = self._collectives.with_stride(whole, param.form.stride)
        for node in self._recorder.nodes.since(first):
            update_node_meta(
                node, parameter=param.path, recompute=graph_task() >= 0, generation=self._generation(graph_task())
            )
        if whole is local:
            whole = local.view_as(local)
        base = self._recorder.values.value(whole).base
        self._whole[base] = (param, whole)
        self._versions[base] = base.version
        if param.form.spec is not None:
            return dtensor_over(whole, param.form.spec)
        return whole

    def _generation(self, task: int) -> int:
        """A number for the forward or backward that runs now; 0 where whole parameters are kept."""
        if not self._plan.reshard_after_forward:
            return 0
        return self._generations.setdefault((self._forwards, task), len(self._generations))

    def hooks(self) -> AbstractContextManager[Any]:
        """While this is active autograd keeps no gathered parameter for the backward."""
        if not self._plan.reshard_after_forward or self._axis.size == 1:
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def check_unwritten(self) -> None:
        """Writing into a gathered copy would be lost."""
        for base, version in self._versions.items():
            param, _ = self._whole[base]
            if base.version != version:
                raise ParameterDataError(
                    f"the step writes into {param.path} inside of a forward, where it is a gathered copy.",
                    fix="write into the parameter outside of the model's forward, or do not shard that module.",
                    location=user_location(),
                )
        if self._axis.size == 1:
            self._versions.clear()  # from here on the optimizer may write

    def _differentiable(self, param: Sharded) -> Tensor:
        if not param.fake.requires_grad or not torch.is_grad_enabled():
            with torch.no_grad():
                return self.gather(param)
        whole: Tensor = _Gathered.apply(param.fake, param, self)  # type: ignore[no-untyped-call]
        return whole

    def _again(self, param: Sharded, task: int) -> Tensor:
        found = self._backward.get((param, task))
        if found is None:
            found = self._backward[param, task] = self._differentiable(param)
        return found

    # Saved tensors.

    def _pack(self, tensor: Tensor) -> Any:
        local = local_of(tensor)
        if not self._recorder.values.knows(local):
            return tensor
        value = self._recorder.values.value(local)
        found = self._whole.get(value.base)
        if found is None or value.base.version > 0:
            return tensor
        spec = spec_of(tensor) if is_dtensor(tensor) else None
        return _Again(found[0], _chain(value, found[1]), spec)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Again):
            found: Tensor = packed
            return found
        with torch.no_grad():
            whole = local_of(self._again(packed.param, graph_task())).detach()
            for step in packed.steps:
                whole = step(whole)
        return whole if packed.spec is None else dtensor_over(whole, packed.spec)


@dataclass(frozen=True)
class _Again:
    """How to make a saved tensor once more."""

    param: Sharded
    steps: tuple[Callable[[Tensor], Tensor], ...]
    spec: Any


def _chain(value: TracedValue, whole: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
    """The views that lead from a gathered parameter to one of its views."""
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
