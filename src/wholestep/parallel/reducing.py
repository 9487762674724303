"""`Reducer`: gradients are reduced over ranks once per step, when they are first read.

    loss.backward(); loss2.backward()     local gradients accumulate, nothing is sent
    clip_grad_norm_ / optimizer.step()    reads `.grad`: every gradient that changed is reduced, in backward order

Because the read triggers the reduction, gradient accumulation inside of a step reduces once, after the last
micro-batch. In the graph each reduction is then moved up to where its gradient is complete, and its wait to before the
next reduction: at most two are in flight, which bounds the memory of unreduced gradients.

Also here: `clip_grad_norm_` of gradients that are sharded. Each rank takes the norm of its shards, and one all-reduce
per axis combines these norms. Gradients are grouped by placement, so that replicated ones count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial

from wholestep.errors import UnsupportedError
from wholestep.ir.effects import is_collective
from wholestep.ir.meta import update_node_meta
from wholestep.ir.trace_protocol import TraceRecorder
from wholestep.parallel.collectives import Collectives
from wholestep.parallel.gathering import Sharded
from wholestep.parallel.plan import Axis, FullyShard, Plan, axes_of
from wholestep.parallel.torch_wrappers import Wrappers
from wholestep.torch_private.distributed import dtensor_over, is_dtensor, local_of, respec, spec_of

Norm = Callable[..., Tensor]


def total_norm(
    emit: Collectives, original: Norm, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any
) -> Tensor:
    """Replaces the norm inside of `clip_grad_norm_`."""
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not any(is_dtensor(g) for g in grads):
        return original(grads, norm_type, *args, **kwargs)
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        whole = _reduced(grad) if is_unreduced(grad) else grad
        groups.setdefault(_sharding(whole), []).append(local_of(whole))
    totals = []
    for key, members in groups.items():
        mesh, sharded = key or (None, ())
        axes = [a for a, is_sharded in zip(axes_of(mesh) if mesh else (), sharded, strict=True) if is_sharded]
        axes = [axis for axis in axes if axis.size > 1]
        if axes and norm_type == 0:
            totals.append(_nonzero_tensors(emit, members, axes))
            continue
        norm = _norm_here(original, members, norm_type, *args, **kwargs)
        for axis in axes:
            norm = _over_axis(emit, norm, norm_type, axis)
        totals.append(norm)
    if len(totals) == 1:
        return totals[0]
    together = torch.stack(totals)
    total: Tensor = together.sum() if norm_type == 0 else torch.linalg.vector_norm(together, norm_type)
    return total


def scale_by_norm(original: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the second half of `clip_grad_norm_`: scales the local shards."""
    params: Sequence[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params]
    original([SimpleNamespace(grad=None if g is None else local_of(g)) for g in grads], *args, **kwargs)


def _norm_here(original: Norm, members: list[Tensor], norm_type: float, *args: Any, **kwargs: Any) -> Tensor:
    """The norm of this rank's shards; the neutral element if they are all empty."""
    if not math.isinf(norm_type):
        return original(members, norm_type, *args, **kwargs)
    some = [m for m in members if m.numel()]
    return (
        original(some, norm_type, *args, **kwargs)
        if some
        else members[0].new_full((), 0 if norm_type > 0 else math.inf)
    )


def _nonzero_tensors(emit: Collectives, members: list[Tensor], axes: list[Axis]) -> Tensor:
    """torch's norm of order 0 of all gradients: the number of gradients with a nonzero element."""
    counts = torch.stack([torch.linalg.vector_norm(m, 0) for m in members])
    for axis in axes:
        counts = emit.all_reduce(counts, axis, "sum")
    found: Tensor = torch.linalg.vector_norm(counts, 0)
    return found


def _over_axis(emit: Collectives, norm: Tensor, norm_type: float, axis: Axis) -> Tensor:
    if math.isinf(norm_type):
        return emit.all_reduce(norm, axis, "max" if norm_type > 0 else "min")
    found: Tensor = emit.all_reduce(norm**norm_type, axis, "sum") ** (1.0 / norm_type)
    return found


def is_unreduced(grad: Tensor) -> bool:
    """Whether a gradient is still to be reduced over ranks."""
    return is_dtensor(grad) and any(isinstance(p, Partial) for p in spec_of(grad).placements)


def _sharding(grad: Tensor) -> Any:
    """The mesh of a gradient, and for each of its axes whether the gradient is sharded along it; None for a tensor."""
    if not is_dtensor(grad):
        return None
    spec = spec_of(grad)
    return spec.mesh, tuple(not (p.is_replicate() or p.is_partial()) for p in spec.placements)


def _reduced(grad: Any) -> Any:
    from torch.distributed.tensor import Replicate

    spec = spec_of(grad)
    return grad.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in spec.placements])


@dataclass(eq=False)
class Whole:
    """A parameter that is replicated over the data-parallel axes; its gradient is all-reduced."""

    fake: Tensor
    path: str


class Reducer:
    """The gradients of one trace that are not reduced yet."""

    def __init__(
        self, plan: Plan, recorder: TraceRecorder, wholes: list[Whole], wrappers: Wrappers | None = None
    ) -> None:
        self._plan = plan
        self._wrappers = wrappers
        self._held: dict[int, Whole] = {}
        """Parameters to whose gradient a backward under `no_sync` added."""
        self._own: set[Sharded] = set()
        """The same for sharded parameters: their gradients stay unreduced on this rank."""
        self._recorder = recorder
        self._collectives = Collectives(recorder)
        self._wholes = {id(w.fake): w for w in wholes}
        self._pending: dict[Sharded, Tensor] = {}
        self._sharded: dict[int, Sharded] = {}
        self._changed: dict[int, Whole] = {}
        """Parameters to whose gradient the backward added, in that order."""
        self._hooks: list[Any] = []
        for whole in wholes:
            if whole.fake.requires_grad:
                fake: Any = whole.fake
                self._hooks.append(fake.register_post_accumulate_grad_hook(self._accumulated))
        self._flushing = False
        self._reductions: list[list[tuple[fx.Node, fx.Node]]] = []
        """First and last node of each reduction, by flush."""

    def release(self) -> None:
        """Drop all fakes: a fake holds the hook on it, which would hold all others."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._wholes.clear()
        self._sharded.clear()
        if self._wrappers is not None:
            self._wrappers.release()

    def add(self, param: Sharded, grad: Tensor) -> None:
        """Add an unsharded gradient of a gathered parameter."""
        if is_dtensor(grad):
            grad = grad.redistribute(placements=param.layout.spec.placements)  # type: ignore[attr-defined]
        local = local_of(grad)
        before = self._pending.get(param)
        self._pending[param] = local if before is None else before + local
        self._sharded[id(param.fake)] = param
        if self._wrappers is not None and not self._wrappers.is_due(param.fake):
            self._own.add(param)
        else:
            self._own.discard(param)

    def _accumulated(self, tensor: Tensor) -> None:
        self._changed.pop(id(tensor), None)
        self._held.pop(id(tensor), None)
        is_due = self._wrappers is None or self._wrappers.is_due(tensor)
        (self._changed if is_due else self._held)[id(tensor)] = self._wholes[id(tensor)]

    def after_backward(self) -> None:
        """At the end of a backward, reduce the gradients that wrappers of torch reduce then.

        A `DistributedDataParallel` reduces all of its gradients together, also those that this backward did not change.
        """
        if self._wrappers is None:
            return
        for identity in self._wrappers.due_together():
            whole = self._wholes.get(identity)
            if whole is not None and whole.fake.grad is not None and identity not in self._changed:
                self._changed[identity] = whole
                self._held.pop(identity, None)
        own = {param: grad for param, grad in self._pending.items() if param in self._own}
        for param in own:
            del self._pending[param]
        self.flush()
        self._pending = own
        self._wrappers.end_backward()

    def is_concerned(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter whose gradient may have to be reduced."""
        return id(tensor) in self._wholes or id(tensor) in self._sharded

    def replaced(self, tensor: Tensor) -> None:
        """`.grad` was set: drop the pending gradient."""
        param = self._sharded.get(id(tensor))
        if param is not None:
            self._pending.pop(param, None)
        self._changed.pop(id(tensor), None)
        self._held.pop(id(tensor), None)

    def flush(self) -> None:
        """Reduce all gradients that changed since the last flush."""
        if self._flushing:
            return
        self._flushing = True
        try:
            with torch.no_grad():
                self._flush()
        finally:
            self._flushing = False

    def _flush(self) -> None:
        self._reductions.append([])
        pending, self._pending = self._pending, {}
        for param, grad in pending.items():
            self._noted(param.path, partial(self._finish_sharded, param, grad))
        changed, self._changed = self._changed, {}
        for whole in changed.values():
            if self._plan.reduces and whole.fake.grad is not None:
                self._noted(whole.path, partial(self._finish_whole, whole))

    def _finish_sharded(self, param: Sharded, grad: Tensor) -> None:
        plan, fake = self._plan, param.fake
        assert isinstance(plan, FullyShard)
        held = fake.grad
        if held is not None and not is_unreduced(held) and param in self._own:
            raise UnsupportedError(
                f"a backward without gradient synchronisation adds to {param.path}.grad, which is reduced already.",
                fix="call zero_grad() before it, or synchronise in the last backward before optimizer.step().",
            )
        if held is not None and is_unreduced(held):
            grad = local_of(held) + grad
            held = None
        if not plan.reduces or param in self._own:
            spec = respec(spec_of(fake), _unreduced(spec_of(fake), plan))
            fake.grad = dtensor_over(grad, spec)
            return
        local = local_of(fake)
        reduced = self._reduced(grad, plan.policy.reduce_dtype, local.dtype, local.shape[0])
        if held is None:
            fake.grad = dtensor_over(reduced, spec_of(fake))
        else:
            local_of(held).add_(reduced)

    def _finish_whole(self, whole: Whole) -> None:
        grad = whole.fake.grad
        assert grad is not None
        local = local_of(grad)
        reduced = self._reduced(local, None, local.dtype, None)
        if reduced is not local:
            self._recorder.values.write(local, self._recorder.node_of(reduced))

    def _reduced(self, grad: Tensor, wire: torch.dtype | None, final: torch.dtype, rows: int | None) -> Tensor:
        """Reduce over all data-parallel axes: scatter along the last one if `rows` is set, else all-reduce."""
        plan = self._plan
        if wire is not None and grad.dtype != wire:
            grad = grad.to(wire)
        op, before, after = _scaling(plan, grad.dtype)
        if before != 1:
            grad = grad / before
        *outer, last = plan.axes
        emit = self._collectives
        grad = emit.all_reduce(grad, last, op) if rows is None else emit.scatter_rows(grad, last, op)
        for axis in outer:
            grad = emit.all_reduce(grad, axis, op)
        if rows is not None and grad.shape[0] != rows:
            grad = grad.narrow(0, 0, rows)
        if after != 1:
            grad = grad / after
        return grad if grad.dtype == final else grad.to(final)

    def _noted(self, path: str, reduce: Callable[[], None]) -> None:
        nodes = self._recorder.nodes
        before = nodes.last()
        reduce()
        made = list(nodes.since(before))
        for node in made:
            update_node_meta(node, parameter=path, phase="backward", module_path=path.rpartition(".")[0])
        if any(is_collective(node.target) for node in made):
            self._reductions[-1].append((made[0], made[-1]))

    def schedule(self) -> None:
        """Move each reduction to where its gradient is complete, and its wait to before the next reduction."""
        position: dict[fx.Node, float] = {node: i for i, node in enumerate(self._recorder.nodes.graph.nodes)}
        for reductions in self._reductions:
            _schedule(reductions, position)


def _schedule(reductions: list[tuple[fx.Node, fx.Node]], position: dict[fx.Node, float]) -> None:
    """Schedule the reductions of one flush. The last wait stays in its place, before the node that reads the result."""
    waiting: list[fx.Node] = []
    started: list[fx.Node] = []
    for first, last in reductions:
        made = [first]
        while made[-1] is not last:
            made.append(made[-1].next)
        cut = next(i for i, node in enumerate(made) if is_collective(node.target)) + 1
        moving = [*waiting, *made[:cut]]
        waiting = made[cut:]
        inside = set(moving)
        needs = [n for node in moving for n in node.all_input_nodes if n not in inside and n.op != "placeholder"]
        anchor = max([*needs, *started], key=lambda n: position[n], default=None)
        if anchor is not None:
            for node in moving:
                anchor.append(node)
                position[node] = position[anchor] + _AFTER
                anchor = node
        started = made[cut - 1 : cut]


_AFTER = 1e-6
"""Distance in position between a node and the node that was moved after it."""


def _unreduced(spec: Any, plan: FullyShard) -> list[Any]:
    """Placements of an unsharded gradient that is not reduced yet."""
    names = {axis.name for axis in plan.axes}
    axes = spec.mesh.mesh_dim_names or (plan.axes[0].name,)
    return [Partial(plan.reduce_op) if n in names else p for n, p in zip(axes, spec.placements, strict=True)]


def _scaling(plan: Plan, dtype: torch.dtype) -> tuple[str, float, float]:
    """The reduce op, and the divisors of gradients before and after it."""
    factor = plan.gradient_divide_factor
    if factor is None and plan.reduce_op == "sum":
        return "sum", 1, 1
    total = factor if factor is not None else float(plan.ranks)
    if dtype is torch.float16:  # the sum may overflow although the mean does not: divide in two parts, as FSDP2 does
        early = 1
        while total / early > early:
            early *= 2
        return "sum", early, total / early
    return ("avg", 1, 1) if factor is None else ("sum", 1, factor)
