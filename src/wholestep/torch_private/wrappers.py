"""Settings of torch's parallel wrappers `DistributedDataParallel` and `fully_shard`. Tried on 2.13; 2.11 by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DDP_REDUCER = "reducer"
"""The attribute of `DistributedDataParallel` that holds its C++ reducer. 2.11, 2.13."""


def ddp_parameters(ddp: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients it reduces (`_module_parameters`). 2.11, 2.13."""
    return [p for p in ddp._module_parameters if p.requires_grad]


def ddp_unusual(ddp: DistributedDataParallel) -> str | None:
    """An option of a `DistributedDataParallel` that makes it do more than average gradients, if there is one. 2.13."""
    state, logged = vars(ddp), ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    options = {
        "a communication hook (register_comm_hook)": logged.get("comm_hook"),
        "a buffer hook": "buffer_hook" in state,
        "mixed_precision": state.get("mixed_precision") is not None,
        "delay_all_reduce_named_params": state.get("_delay_all_reduce_params"),
        "the Python reducer": state.get("_use_python_reducer"),
        "Join (uneven inputs)": getattr(state.get("_join_config"), "enable", False),
    }
    return next((name for name, is_used in options.items() if is_used), None)


def ddp_sends_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether buffers are broadcast from rank 0 before a forward (`broadcast_buffers` until 2.12). 2.11, 2.13."""
    state = vars(ddp)
    return bool(state.get("forward_sync_buffers", state.get("broadcast_buffers", True)))


def ddp_buffers(ddp: DistributedDataParallel) -> list[str]:
    """Names, within its module, of the buffers that it broadcasts from rank 0. 2.11, 2.13."""
    ignored = vars(ddp).get("parameters_to_ignore", ())
    return [name for name, _ in ddp.module.named_buffers() if name not in ignored]


@dataclass(frozen=True)
class ShardedGroup:
    """A unit of `fully_shard`: modules that gather and reduce together."""

    unit: nn.Module
    mesh: Any
    policy: Any
    reshards: bool
    divide_factor: float | None
    unusual: str | None
    """An option that wholestep does not support, if one is set."""
    parameters: tuple[tuple[tuple[tuple[nn.Module, str], ...], Any], ...]
    """For each parameter, the modules and names that hold it, and its size when gathered."""
    flags: dict[str, Any]
    """The attributes of the unit's group; `reduce_grads` and `all_reduce_grads` select what a backward does."""


def sharded_groups(module: nn.Module) -> list[ShardedGroup]:
    """The units of `fully_shard` on exactly this module (`FSDPState`, `FSDPParamGroup`). 2.11, 2.13."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)  # 2.12 and newer; one until 2.11
    if groups is None:
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    found = []
    for group in groups:
        info = group.mesh_info
        replicates = isinstance(info, DDPMeshInfo) and not isinstance(info, FSDPMeshInfo)
        options = {
            "replicate": replicates,
            "CPU offload": any(p.offload_to_cpu for p in group.fsdp_params),
            "a shard_placement_fn": any(getattr(p.fsdp_placement, "dim", None) != 0 for p in group.fsdp_params),
            "tensor parallelism beside it": any(p.is_dtensor for p in group.fsdp_params),
            "an all-reduce hook": group._all_reduce_hook is not None,
        }
        found.append(
            ShardedGroup(
                unit=module,
                mesh=info.mesh,
                policy=group.mp_policy,
                reshards=group.post_forward_mesh_info is not None,
                divide_factor=group.gradient_divide_factor,
                unusual=next((name for name, is_used in options.items() if is_used), None),
                parameters=tuple((_holders(p._module_info), p._orig_size) for p in group.fsdp_params),
                flags=vars(group),
            )
        )
    return found


def _holders(info: Any) -> tuple[tuple[nn.Module, str], ...]:
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return ((info.module, info.param_name), *shared)
