"""Put a model and its optimizers into the form of a plan, at the first call of a step.

Parameters are made equal, tensor-parallel styles are applied, and for FullyShard torch's own `fully_shard` leaves
DTensor shards in the model, so that eager calls, `state_dict()` and checkpoints between steps are FSDP2's. Optimizers
(and lists of parameters that the step can reach) that still refer to whole parameters are pointed to the shards.
"""

from __future__ import annotations

import fnmatch
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from wholestep.errors import PlanError, WrappedError
from wholestep.parallel.collectives import contiguous_stride, is_dense
from wholestep.parallel.plan import FullyShard, Plan, check_device
from wholestep.parallel.wrapped import groups_of
from wholestep.torch_private.dtensor import is_dtensor, local_of, spec_of
from wholestep.torch_private.modules_and_optimizers import forward_hook_registries, is_fsdp_hook, module_hooks

if TYPE_CHECKING:
    from wholestep.ir.trace_protocol import FoundObjects


@dataclass(frozen=True)
class Form:
    """How a parameter that is sharded along the data-parallel axis looks when gathered."""

    shape: torch.Size
    """Of what this rank has after gathering: the whole, or its tensor-parallel part."""
    spec: Any = None
    """Of the tensor-parallel DTensor that it then is; None for a plain tensor."""
    stride: tuple[int, ...] | None = None
    """Of the gathered tensor, where the parameter was not contiguous; `fully_shard` wants shards that are."""


@dataclass
class Placement:
    """What was done to one model."""

    plan: Plan
    forms: WeakKeyDictionary[nn.Module, dict[str, Form]] = field(default_factory=WeakKeyDictionary)
    """Sharded parameters by module and name."""
    units: list[nn.Module] = field(default_factory=list)
    """Modules that `fully_shard` was applied to."""
    known: MutableMapping[Tensor, None] = field(default_factory=WeakIdKeyDictionary)
    """Parameters and buffers that all ranks have made equal."""
    hooks: list[Any] = field(default_factory=list)
    """Hooks of the tensor-parallel styles: traced, not refused."""


_placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()
_moved: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
"""Parameters that were replaced, with what replaced them: an optimizer may come later that still has the old ones."""


def placement_of(module: nn.Module) -> Placement | None:
    """How a model was placed, if it was."""
    return _placements.get(module)


def plan_hooks(world: FoundObjects) -> frozenset[int]:
    """Hooks that placing put on the modules of a step, by identity."""
    placements = [p for module in world.modules if (p := _placements.get(module)) is not None]
    found = {id(hook) for placement in placements for hook in placement.hooks}
    return frozenset(found | {id(registry[key]) for registry, key in sharding_hooks(world)})


def sharding_hooks(world: FoundObjects) -> list[tuple[dict[Any, Any], Any]]:
    """FSDP2's own hooks, which gather in eager: capture gathers by itself. Registry and key of each."""
    found = []
    for module in world.modules:
        if isinstance(module, FSDPModule):
            for registry in forward_hook_registries(module):
                found += [(registry, key) for key, hook in registry.items() if is_fsdp_hook(hook)]
    return found


class Placing:
    """The models of a step that are not yet in the form of a plan. All is checked; nothing is changed before `run`."""

    def __init__(self, plan: Plan, world: FoundObjects) -> None:
        self._plan = plan
        self._world = world
        self._todo: list[tuple[nn.Module, str, dict[str, Any], list[str]]] = []
        self._late: list[tuple[Placement, str, Tensor]] = []
        """Parameters and buffers that came into a model after it was placed: whole on every rank, and made equal."""
        for model, path in _roots(world):
            done = _placements.get(model)
            if done is not None:
                _check_same(plan, done.plan, path)
                self._late += _unknown(done, model, path)
                continue
            if not plan.wrapped:
                _refuse_wrapped(model, path)
            check_device(plan.mesh, model, path)
            self._todo.append((model, path, _matched_plan(plan, model, path), _units(plan, model, path)))

    def lines(self) -> list[str]:
        """What is to be done, for ranks to compare; empty if nothing is."""
        tensors = [line for model, path, _, _ in self._todo for line in _describe(model, path)]
        tensors += [_line(path, tensor) for _, path, tensor in self._late]
        return [self._plan.describe(), *tensors] if tensors else []

    def run(self) -> None:
        """Place them. Communicates."""
        for model, _, tensor_plan, units in self._todo:
            _placements[model] = _place_model(self._plan, model, tensor_plan, units)
            _note_known(_placements[model], model)
        if self._plan.broadcast:
            _broadcast(self._plan, [tensor for _, _, tensor in self._late])
        for placement, _, tensor in self._late:
            placement.known[tensor] = None
        _repoint(self._world)


def _describe(model: nn.Module, path: str) -> list[str]:
    return [_line(f"{path}.{name}", t) for name, t in (*model.named_parameters(), *model.named_buffers())]


def _line(path: str, tensor: Tensor) -> str:
    return f"{path}: {tensor.dtype} {list(tensor.shape)}{' frozen' * (not tensor.requires_grad)}"


def _note_known(placement: Placement, model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        placement.known[tensor] = None


def _unknown(placement: Placement, model: nn.Module, path: str) -> list[tuple[Placement, str, Tensor]]:
    """Parameters that a placed model did not have when it was placed. (Steps replace buffers; those are not meant.)"""
    return [
        (placement, f"{path}.{name}", p)
        for name, p in model.named_parameters()
        if p not in placement.known and not is_dtensor(p)
    ]


def _roots(world: FoundObjects) -> list[tuple[nn.Module, str]]:
    """Models that have parameters and are no part of another."""
    children = {child for module in world.modules for child in module.children()}
    return [(m, p) for m, p in world.modules.items() if m not in children and next(m.parameters(), None) is not None]


def _check_same(plan: Plan, before: Plan, path: str) -> None:
    if type(plan) is not type(before) or plan.mesh != before.mesh:
        raise PlanError(
            f"{path} was placed by {type(before).__name__}({before.mesh}) and this step asks for "
            f"{type(plan).__name__}({plan.mesh}).",
            fix="use one plan for all steps of a model (plan.no_sync() is the same placement), or make a new model.",
        )


def _refuse_wrapped(model: nn.Module, path: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            kind = "fully_shard" if isinstance(module, FSDPModule) else type(module).__name__
            where = f"{path}.{name}" if name else path
            raise WrappedError(
                f"{where} is already parallel ({kind}), and the step would make it parallel again.",
                fix="leave parallel= out: the step then does what the wrapper does; or pass the plain model.",
            )
    for name, param in model.named_parameters():
        if is_dtensor(param):
            raise WrappedError(
                f"{path}.{name} is already a DTensor ({param.placements}).",  # type: ignore[attr-defined]
                fix="pass a model with plain parameters; give tensor-parallel styles by tensor_parallel=(axis, plan).",
            )


def _place_model(plan: Plan, model: nn.Module, tensor_plan: dict[str, Any], units: list[str]) -> Placement:
    placement = Placement(plan)
    if plan.wrapped:
        _note_groups(placement, model)
        return placement
    if plan.broadcast:
        _broadcast(plan, [*model.parameters(), *model.buffers()])
    before = dict(model.named_parameters(remove_duplicate=False))
    if plan.tensor_parallel is not None:
        known = {id(hook) for module in model.modules() for hook in module_hooks(module)}
        parallelize_module(model, plan.tensor_parallel[0], tensor_plan)
        placement.hooks = [h for m in model.modules() for h in module_hooks(m) if id(h) not in known]
    if isinstance(plan, FullyShard):
        _shard(plan, model, units, placement)
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, old in before.items():
        if after[name] is not old:
            _moved[old] = after[name]
    return placement


def _note_groups(placement: Placement, model: nn.Module) -> None:
    """What `fully_shard` did to a model before the step was compiled; nothing for other wrappers."""
    for group in groups_of(model):
        placement.units.append(group.unit)
        for holders, shape in group.parameters:
            for module, name in holders:
                placement.forms.setdefault(module, {})[name] = Form(shape)


def placed_by_plan(world: FoundObjects) -> set[nn.Module]:
    """All modules of models that a plan which the user gave has made parallel."""
    roots = [m for m in world.modules if (done := _placements.get(m)) is not None and not done.plan.wrapped]
    return {module for root in roots for module in root.modules()}


def _matched_plan(plan: Plan, model: nn.Module, path: str) -> dict[str, Any]:
    if plan.tensor_parallel is None:
        return {}
    names = [name for name, _ in model.named_modules()]
    styles = dict(plan.tensor_parallel[1])
    for pattern in styles:
        _match(names, pattern, path, "the tensor-parallel plan")
    return styles


def _units(plan: Plan, model: nn.Module, path: str) -> list[str]:
    """Paths of what `fully_shard` is applied to, inner modules first."""
    if not isinstance(plan, FullyShard) or plan.wrapped:
        return []
    if plan.modules is None:
        return [""]
    names = [name for name, _ in model.named_modules()]
    found = {name for pattern in plan.modules for name in _match(names, pattern, path, "FullyShard(modules=...)")}
    return sorted(found, key=lambda name: -len(name.split(".")) if name else 0)


def _match(names: list[str], pattern: str, path: str, who: str) -> list[str]:
    found = [n for n in names if _matches(n.split("."), pattern.split("."))]
    if not found:
        near = sorted(names, key=lambda n: -len(_common(n, pattern)))[:4]
        raise PlanError(
            f"{who} names {pattern!r}, and {path} has no such module.",
            fix=f"paths are relative to the model, such as {', '.join(repr(n) for n in near if n)}.",
        )
    return found


def _matches(path: list[str], pattern: list[str]) -> bool:
    """Part by part, as `parallelize_module` does: a * does not reach into submodules."""
    return len(path) == len(pattern) and all(map(fnmatch.fnmatchcase, path, pattern))


def _common(a: str, b: str) -> str:
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:end]


def _broadcast(plan: Plan, tensors: list[Tensor]) -> None:
    """What the first rank of each axis has to the others."""
    if not tensors:
        return
    meshes = [plan.mesh] if plan.tensor_parallel is None else [plan.tensor_parallel[0], plan.mesh]
    groups = [mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim) if mesh.size(i) > 1]
    with torch.no_grad():
        for group in groups:
            source = dist.get_global_rank(group, 0)
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, source, group)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole)


def _shard(plan: FullyShard, model: nn.Module, units: list[str], placement: Placement) -> None:
    scalars = {p for p in model.parameters() if p.dim() == 0}
    gathered = {
        id(p): Form(local_of(p).shape, spec_of(p) if is_dtensor(p) else None, _stride_to_keep(p))
        for p in model.parameters()
        if p not in scalars
    }
    for param in model.parameters():
        if not param.is_contiguous():
            param.data = param.data.contiguous()
    names = {(m, n): id(p) for m in model.modules() for n, p in m._parameters.items() if p is not None}
    options: dict[str, Any] = {"mesh": plan.mesh, "reshard_after_forward": plan.reshard_after_forward}
    for unit in units:
        module = model.get_submodule(unit)
        fully_shard(module, mp_policy=plan.policy, ignored_params=scalars, **options)
        placement.units.append(module)
    for unit in units:
        module = model.get_submodule(unit)
        if plan.gradient_divide_factor is not None or plan.reduce_op == "sum":
            module.set_gradient_divide_factor(plan.gradient_divide_factor or 1.0)  # type: ignore[operator]
            if plan.mesh.device_type == "cpu":  # gloo has no sum of scaled addends, which eager steps would use
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    for (module, name), key in names.items():
        now = module._parameters[name]
        if now is not None and id(now) != key and key in gathered:
            placement.forms.setdefault(module, {})[name] = gathered[key]


def _stride_to_keep(param: Tensor) -> tuple[int, ...] | None:
    """The strides of a parameter that is dense and not contiguous: channels last, transposed. They choose kernels."""
    stride = param.stride()
    if is_dtensor(param) or stride == contiguous_stride(param.shape) or not is_dense(param.shape, stride):
        return None
    return stride


def _repoint(world: FoundObjects) -> None:
    """Optimizers and variables that hold whole parameters get the placed ones; state is sharded alike."""
    for optimizer in world.optimizers:
        if any(p in _moved for group in optimizer.param_groups for p in group["params"]):
            for group in optimizer.param_groups:
                group["params"] = [_moved.get(p, p) for p in group["params"]]
            _move_state(optimizer)
    for real, slot in (*world.other_slots, *world.tensors.values()):
        if real in _moved:
            slot.set(_moved[real])


def _move_state(optimizer: Optimizer) -> None:
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for owner, values in entries:
        new = _moved.get(owner)
        if new is None:
            optimizer.state[owner] = values
        else:
            optimizer.state[new] = {key: _placed_like(value, owner, new) for key, value in values.items()}


def _placed_like(value: Any, owner: Tensor, new: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != owner.shape or not isinstance(new, DTensor):
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
