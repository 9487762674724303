"""The plans of models that the user wrapped with torch's `DistributedDataParallel` or `fully_shard`.

    DistributedDataParallel(model)      ws.Replicate over its process group
    fully_shard(model)                  ws.FullyShard over its mesh

A wrapper communicates in hooks. In a trace the plan communicates at the same points: gradients are reduced at the end
of each backward, except under `no_sync` (or `set_requires_gradient_sync(False)`), and a `DistributedDataParallel`
broadcasts buffers from rank 0 before the forward.

    with ddp.no_sync():
        ddp(a).backward()               gradients accumulate on this rank
    ddp(b).backward()                   all_reduce of the accumulated gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from wholestep.errors import UnsupportedError, WrappedError
from wholestep.ir.meta import user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.slots import MappingSlot, Slot
from wholestep.parallel.plan import FullyShard, Plan, Replicate
from wholestep.torch_private.distributed import (
    DDP_REDUCER,
    ShardedGroup,
    ddp_buffers,
    ddp_parameters,
    ddp_sends_buffers,
    ddp_unusual,
    sharded_groups,
)
from wholestep.torch_private.fx_graphs import pytree

if TYPE_CHECKING:
    from wholestep.ir.trace_protocol import FoundObjects, TracedState

Send = Callable[[nn.Module, Sequence[str]], None]

_plans: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()
"""The plan of each wrapper, cached so that its mesh is created once."""


def plan_of_wrappers(world: FoundObjects, placed: Callable[[nn.Module], bool]) -> Plan | None:
    """The plan of the wrappers among the models of a step; None if there are none.

    `placed`: whether a module was made parallel by a plan of the user's, and not by a wrapper.
    """
    ddps = [m for m in world.modules if isinstance(m, DistributedDataParallel) and not placed(m)]
    units = [m for m in world.modules if isinstance(m, FSDPModule) and not placed(m)]
    if ddps and units:
        raise _different(world.modules[ddps[0]], world.modules[units[0]], "DistributedDataParallel", "fully_shard")
    for module in ddps:
        _refuse_unusual(ddp_unusual(module), f"{world.modules[module]} is a DistributedDataParallel")
    if ddps:
        return _of_ddps(ddps, world)
    groups = [(world.modules[m], group) for m in units for group in sharded_groups(m)]
    for path, group in groups:
        _refuse_unusual(group.unusual, f"{path} was made parallel by fully_shard")
    return _of_groups(groups) if groups else None


def _of_ddps(ddps: list[DistributedDataParallel], world: FoundObjects) -> Plan:
    first = ddps[0]
    for other in ddps[1:]:
        if other.process_group != first.process_group:
            raise _different(world.modules[first], world.modules[other], "one process group", "another")
    plan = _plans.get(first)
    if plan is None:
        mesh = DeviceMesh.from_group(first.process_group, first.device_type, mesh_dim_names=("dp",))
        plan = _plans[first] = Replicate(mesh, broadcast=False, buffers="local", wrapped=True)
    return plan


def _of_groups(groups: list[tuple[str, ShardedGroup]]) -> Plan:
    path, first = groups[0]
    for other, group in groups[1:]:
        for name in ("mesh", "policy", "divide_factor"):
            if getattr(group, name) != getattr(first, name):
                raise _different(path, other, f"{name} {getattr(first, name)}", str(getattr(group, name)))
    plan = FullyShard(
        first.mesh,
        broadcast=False,
        mp_policy=first.policy,
        gradient_divide_factor=first.divide_factor,
        reshard_after_forward=any(group.reshards for _, group in groups),
        wrapped=True,
    )
    known = _plans.setdefault(first.unit, plan)
    if known != plan:
        known = _plans[first.unit] = plan
    return known


def _different(path: str, other: str, how: str, otherwise: str) -> WrappedError:
    return WrappedError(
        f"{path} and {other} are parallel in different ways: {how} and {otherwise}.",
        fix="wrap all models of a step in the same way over one group or mesh, or train them in separate steps.",
    )


def _refuse_unusual(option: str | None, what: str) -> None:
    if option is not None:
        raise WrappedError(
            f"{what} with {option}, which wholestep does not support.",
            fix="leave that option out, or pass the plain model and a plan (ws.Replicate(mesh), ws.FullyShard(mesh)).",
        )


def groups_of(model: nn.Module) -> list[ShardedGroup]:
    """All units of `fully_shard` in a model, inner ones first."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for unit in reversed(units) for group in sharded_groups(unit)]


def flags_of(world: FoundObjects) -> list[tuple[str, Slot, Any]]:
    """The attributes of `fully_shard` that tell whether a backward reduces; the step may read and set them."""
    found: list[tuple[str, Slot, Any]] = []
    for module, path in world.modules.items():
        for group in sharded_groups(module) if isinstance(module, FSDPModule) else ():
            for name in ("reduce_grads", "all_reduce_grads"):
                where = f"{path}.{name}"
                found.append(
                    (where, MappingSlot(InputKind.CAPTURED, where, None, group.flags, name), group.flags[name])
                )
    return found


class Wrappers:
    """The wrappers in one trace: which parameters they reduce, and whether the current backward reduces."""

    def __init__(self, world: FoundObjects, table: TracedState) -> None:
        fakes = {id(tracked.real): tracked.fake for tracked in table.parameters}
        self._ddps = {m: _Ddp(m) for m in world.modules if isinstance(m, DistributedDataParallel)}
        self._of: dict[int, _Ddp] = {}
        """By id of the fake of a parameter."""
        for ddp in self._ddps.values():
            for param in ddp_parameters(ddp.module):
                self._of[id(fakes[id(param)])] = ddp
        self._flags: dict[int, dict[str, Any]] = {}
        for module in world.modules:
            for group in sharded_groups(module) if isinstance(module, FSDPModule) else ():
                for holders, _ in group.parameters:
                    holder, name = holders[0]
                    held = holder._parameters.get(name)
                    if held is not None:
                        self._flags[id(held)] = group.flags

    def reduces(self, fake: Tensor) -> bool:
        """Whether a `DistributedDataParallel` reduces the gradient of a parameter."""
        return id(fake) in self._of

    def is_due(self, fake: Tensor) -> bool:
        """Whether the gradient of a parameter is reduced at the end of the current backward."""
        ddp = self._of.get(id(fake))
        if ddp is not None:
            return ddp.is_armed
        flags = self._flags.get(id(fake), {})
        if flags.get("reduce_grads", True) and not flags.get("all_reduce_grads", True):
            raise UnsupportedError(
                "the step runs a backward under set_requires_all_reduce(False), which reduces gradients without an "
                "all-reduce over the replicas.",
                fix="use set_requires_gradient_sync(False) for all micro-batches except the last.",
                location=user_location(),
            )
        return bool(flags.get("reduce_grads", True))

    def due_together(self) -> Iterator[int]:
        """Ids of the parameters of every `DistributedDataParallel` that reduces in the current backward."""
        for identity, ddp in self._of.items():
            if ddp.is_armed:
                yield identity

    def end_backward(self) -> None:
        """End of a backward: the next one reduces only after another forward that synchronises."""
        for ddp in self._ddps.values():
            ddp.is_armed = False

    def knows(self, module: nn.Module) -> bool:
        return module in self._ddps

    def forward(self, module: Any, send: Send, args: Any, kwargs: Any) -> Any:
        """`DistributedDataParallel.forward` without its communication. `send`: broadcasts buffers from rank 0."""
        return self._ddps[module].forward(send, args, kwargs)

    def enter(self) -> None:
        """Start of the trace."""
        for ddp in self._ddps.values():
            ddp.enter()

    def leave(self) -> None:
        """End of the step's code."""
        for ddp in self._ddps.values():
            ddp.leave()

    def release(self) -> None:
        """Drop all fakes of the trace."""
        self._of.clear()
        self._flags.clear()
        for ddp in self._ddps.values():
            ddp.leave()


class _Ddp:
    """One `DistributedDataParallel` in a trace."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self.is_armed = False
        """The next backward reduces (`Reducer.prepare_for_backward`)."""
        self._reducer: Any = None

    def enter(self) -> None:
        self._reducer = vars(self.module).get(DDP_REDUCER)
        vars(self.module)[DDP_REDUCER] = _ReducerStandIn(self)

    def leave(self) -> None:
        if self._reducer is not None:
            vars(self.module)[DDP_REDUCER], self._reducer = self._reducer, None

    def forward(self, send: Send, args: Any, kwargs: Any) -> Any:
        ddp: Any = self.module
        if ddp.require_forward_param_sync and ddp_sends_buffers(ddp):
            send(ddp.module, ddp_buffers(ddp))
        if ddp.device_ids:
            args, kwargs = _on_device(torch.device(ddp.device_type, ddp.device_ids[0]), (args, kwargs))
        result = ddp.module(*args, **kwargs)
        synchronises = torch.is_grad_enabled() and ddp.require_backward_grad_sync  # the forward may set it
        ddp.require_forward_param_sync = synchronises
        self.is_armed = self.is_armed or synchronises
        return result


class _ReducerStandIn:
    """Replaces the C++ reducer; Accelerate's `trigger_sync_in_backward` and Lightning call it."""

    def __init__(self, ddp: _Ddp) -> None:
        self._wholestep_ddp = ddp

    def prepare_for_backward(self, outputs: Any) -> None:
        self._wholestep_ddp.is_armed = True

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"the step uses {name} of the reducer of a DistributedDataParallel.",
            fix="do not use the reducer; the model's forward and backward call it.",
            location=user_location(),
        )


def _on_device(device: torch.device, tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
