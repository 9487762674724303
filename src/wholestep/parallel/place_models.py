"""Place a model and its optimizers by a plan, at the first call of a step.

Parameters are broadcast, tensor-parallel styles are applied, and for FullyShard torch's `fully_shard` replaces
parameters by DTensor shards, so eager calls, `state_dict()` and checkpoints between steps are those of FSDP2. In
optimizers (and in lists of parameters that the step can reach) whole parameters are replaced by the shards.
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
from wholestep.parallel.torch_wrappers import groups_of
from wholestep.torch_private.distributed import is_dtensor, local_of, spec_of
from wholestep.torch_private.modules_and_optimizers import forward_hooks, is_fsdp_hook, module_hooks

if TYPE_CHECKING:
    from wholestep.ir.trace_protocol import FoundObjects


@dataclass(frozen=True)
class GatheredLayout:
    """The layout of a sharded parameter after it is gathered along the data-parallel axis."""

    shape: torch.Size
    """Shape after gathering: of the whole parameter, or of its tensor-parallel part."""
    spec: Any = None
    """DTensorSpec of the tensor-parallel DTensor that is gathered; None for a plain tensor."""
    stride: tuple[int, ...] | None = None
    """Strides after gathering, if the parameter was not contiguous (`fully_shard` needs contiguous shards)."""


@dataclass
class Placement:
    """How one model was placed."""

    plan: Plan
    layouts: WeakKeyDictionary[nn.Module, dict[str, GatheredLayout]] = field(default_factory=WeakKeyDictionary)
    """Sharded parameters by module and name."""
    units: list[nn.Module] = field(default_factory=list)
    """Modules to which `fully_shard` was applied."""
    synchronised: MutableMapping[Tensor, None] = field(default_factory=WeakIdKeyDictionary)
    """Parameters and buffers that are equal on all ranks."""
    hooks: list[Any] = field(default_factory=list)
    """Hooks of the tensor-parallel styles: traced, not refused."""


_placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()
_replacements: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
"""Replaced parameters and their replacements: an optimizer that comes later may still refer to the old ones."""


def placement_of(module: nn.Module) -> Placement | None:
    """The placement of a model; None if it was not placed."""
    return _placements.get(module)


def plan_hooks(world: FoundObjects) -> frozenset[int]:
    """Ids of the hooks that placing added to the modules of a step."""
    placements = [p for module in world.modules if (p := _placements.get(module)) is not None]
    found = {id(hook) for placement in placements for hook in placement.hooks}
    return frozenset(found | {id(registry[key]) for registry, key in sharding_hooks(world)})


def sharding_hooks(world: FoundObjects) -> list[tuple[dict[Any, Any], Any]]:
    """Registry and key of each of FSDP2's hooks, which gather in eager; a capture does not run them."""
    found = []
    for module in world.modules:
        if isinstance(module, FSDPModule):
            for registry in forward_hooks(module):
                found += [(registry, key) for key, hook in registry.items() if is_fsdp_hook(hook)]
    return found


class Placing:
    """The models of a step that are still to be placed. The constructor checks them; only `run` changes them."""

    def __init__(self, plan: Plan, world: FoundObjects) -> None:
        self._plan = plan
        self._world = world
        self._models: list[tuple[nn.Module, str, dict[str, Any], list[str]]] = []
        self._added: list[tuple[Placement, str, Tensor]] = []
        """Parameters that were added to a model after it was placed: whole on every rank, and broadcast."""
        for model, path in _roots(world):
            done = _placements.get(model)
            if done is not None:
                _check_same(plan, done.plan, path)
                self._added += _added_parameters(done, model, path)
                continue
            if not plan.wrapped:
                _refuse_wrapped(model, path)
            check_device(plan.mesh, model, path)
            self._models.append((model, path, _matched_plan(plan, model, path), _units(plan, model, path)))

    @property
    def models(self) -> list[nn.Module]:
        """The models of the step, placed or not."""
        return [model for model, _ in _roots(self._world)]

    def lines(self) -> list[str]:
        """What `run` will place, as lines that ranks compare; empty if there is nothing to place."""
        tensors = [line for model, path, _, _ in self._models for line in _describe(model, path)]
        tensors += [_line(path, tensor) for _, path, tensor in self._added]
        return [self._plan.describe(), *tensors] if tensors else []

    def run(self) -> None:
        """Place the models. This communicates."""
        for model, _, tensor_plan, units in self._models:
            _placements[model] = _place_model(self._plan, model, tensor_plan, units)
            _mark_synchronised(_placements[model], model)
        if self._plan.broadcast:
            _broadcast(self._plan, [tensor for _, _, tensor in self._added])
        for placement, _, tensor in self._added:
            placement.synchronised[tensor] = None
        _repoint(self._world)


def _describe(model: nn.Module, path: str) -> list[str]:
    return [_line(f"{path}.{name}", t) for name, t in (*model.named_parameters(), *model.named_buffers())]


def _line(path: str, tensor: Tensor) -> str:
    return f"{path}: {tensor.dtype} {list(tensor.shape)}{' frozen' * (not tensor.requires_grad)}"


def _mark_synchronised(placement: Placement, model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        placement.synchronised[tensor] = None


def _added_parameters(placement: Placement, model: nn.Module, path: str) -> list[tuple[Placement, str, Tensor]]:
    """Parameters that a model did not have when it was placed. (Not buffers, which steps replace.)"""
    return [
        (placement, f"{path}.{name}", p)
        for name, p in model.named_parameters()
        if p not in placement.synchronised and not is_dtensor(p)
    ]


def _roots(world: FoundObjects) -> list[tuple[nn.Module, str]]:
    """Models that have parameters and are not part of another model."""
    children = {child for module in world.modules for child in module.children()}
    return [(m, p) for m, p in world.modules.items() if m not in children and next(m.parameters(), None) is not None]


def _check_same(plan: Plan, before: Plan, path: str) -> None:
    if type(plan) is not type(before) or plan.mesh != before.mesh:
        raise PlanError(
            f"{path} was placed by {type(before).__name__}({before.mesh}) and this step asks for "
            f"{type(plan).__name__}({plan.mesh}).",
            fix="use one plan for all steps of a model (plan.no_sync() is the same placement), or create a new model.",
        )


def _refuse_wrapped(model: nn.Module, path: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            kind = "fully_shard" if isinstance(module, FSDPModule) else type(module).__name__
            where = f"{path}.{name}" if name else path
            raise WrappedError(
                f"{where} is already parallel ({kind}), and parallel= would make it parallel a second time.",
                fix="leave parallel= out (the step then does what the wrapper does), or pass the plain model.",
            )
    for name, param in model.named_parameters():
        if is_dtensor(param):
            raise WrappedError(
                f"{path}.{name} is already a DTensor ({param.placements}).",  # type: ignore[attr-defined]
                fix="pass a model with plain parameters, and tensor-parallel styles as tensor_parallel=(axis, plan).",
            )


def _place_model(plan: Plan, model: nn.Module, tensor_plan: dict[str, Any], units: list[str]) -> Placement:
    placement = Placement(plan)
    if plan.wrapped:
        _add_sharded_units(placement, model)
        return placement
    if plan.broadcast:
        _broadcast(plan, [*model.parameters(), *model.buffers()])
    before = dict(model.named_parameters(remove_duplicate=False))
    if plan.tensor_parallel is not None:
        own = {id(hook) for module in model.modules() for hook in module_hooks(module)}
        parallelize_module(model, plan.tensor_parallel[0], tensor_plan)
        placement.hooks = [h for m in model.modules() for h in module_hooks(m) if id(h) not in own]
    if isinstance(plan, FullyShard):
        _shard(plan, model, units, placement)
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, old in before.items():
        if after[name] is not old:
            _replacements[old] = after[name]
    return placement


def _add_sharded_units(placement: Placement, model: nn.Module) -> None:
    """Record the units of a model that the user sharded with `fully_shard`."""
    for group in groups_of(model):
        placement.units.append(group.unit)
        for holders, shape in group.parameters:
            for module, name in holders:
                placement.layouts.setdefault(module, {})[name] = GatheredLayout(shape)


def placed_by_plan(world: FoundObjects) -> set[nn.Module]:
    """All modules of models that were placed by a plan of the user's (not by the plan of a wrapper)."""
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
    """Paths of the modules to which `fully_shard` is applied, inner modules first."""
    if not isinstance(plan, FullyShard) or plan.wrapped:
        return []
    if plan.modules is None:
        return [""]
    names = [name for name, _ in model.named_modules()]
    found = {name for pattern in plan.modules for name in _match(names, pattern, path, "FullyShard(modules=...)")}
    return sorted(found, key=lambda name: -len(name.split(".")) if name else 0)


def _match(names: list[str], pattern: str, path: str, option: str) -> list[str]:
    found = [n for n in names if _matches(n.split("."), pattern.split("."))]
    if not found:
        near = sorted(names, key=lambda n: -len(_common(n, pattern)))[:4]
        raise PlanError(
            f"{option} names {pattern!r}, and {path} has no such module.",
            fix=f"use a path relative to the model, such as {', '.join(repr(n) for n in near if n)}.",
        )
    return found


def _matches(path: list[str], pattern: list[str]) -> bool:
    """Match part by part, as `parallelize_module` does: a * does not match into submodules."""
    return len(path) == len(pattern) and all(map(fnmatch.fnmatchcase, path, pattern))


def _common(a: str, b: str) -> str:
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:end]


def _broadcast(plan: Plan, tensors: list[Tensor]) -> None:
    """Broadcast tensors from the first rank of each axis."""
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
        id(p): GatheredLayout(local_of(p).shape, spec_of(p) if is_dtensor(p) else None, _stride_to_keep(p))
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
            if plan.mesh.device_type == "cpu":  # gloo has no PREMUL_SUM, which eager steps would use
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    for (module, name), key in names.items():
        now = module._parameters[name]
        if now is not None and id(now) != key and key in gathered:
            placement.layouts.setdefault(module, {})[name] = gathered[key]


def _stride_to_keep(param: Tensor) -> tuple[int, ...] | None:
    """The strides of a parameter that is dense and not contiguous (channels last, transposed); kernels depend on
    them."""
    stride = param.stride()
    if is_dtensor(param) or stride == contiguous_stride(param.shape) or not is_dense(param.shape, stride):
        return None
    return stride


def _repoint(world: FoundObjects) -> None:
    """Replace whole parameters in optimizers and variables by the placed ones, and shard optimizer state alike."""
    for optimizer in world.optimizers:
        if any(p in _replacements for group in optimizer.param_groups for p in group["params"]):
            for group in optimizer.param_groups:
                group["params"] = [_replacements.get(p, p) for p in group["params"]]
            _move_state(optimizer)
    for real, slot in (*world.other_slots, *world.tensors.values()):
        if real in _replacements:
            slot.set(_replacements[real])


def _move_state(optimizer: Optimizer) -> None:
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for owner, values in entries:
        new = _replacements.get(owner)
        if new is None:
            optimizer.state[owner] = values
        else:
            optimizer.state[new] = {key: _placed_like(value, owner, new) for key, value in values.items()}


def _placed_like(value: Any, owner: Tensor, new: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != owner.shape or not isinstance(new, DTensor):
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
