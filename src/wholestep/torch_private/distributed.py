"""torch.distributed: process groups, stores, flight recorder, abort of NCCL and gloo, DDP, `fully_shard`, DTensor.

Tried on torch 2.11 and 2.13; the settings of the wrappers `DistributedDataParallel` and `fully_shard` on 2.13, and on
2.11 by name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store

log = logging.getLogger("wholestep")


def process_group_size(name: str) -> int:
    """The number of ranks in the process group of this name; 0 if this process has no such group. 2.13."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return int(resolve(name).size())
    except RuntimeError:
        return 0


# Store: the type of `torch.distributed.Store`, which torch does not export for type checkers. 2.11, 2.13.


def store_under(prefix: str, store: Store) -> Store:
    """A store whose keys begin with a prefix (`torch.distributed.PrefixStore`, not exported for types). 2.11, 2.13."""
    made: Store = torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return made


def own_client(store: Store) -> Store:
    """A client of the same store with its own connection and lock (`Store.clone`, without types). 2.11, 2.13."""
    made: Store = store.clone()  # type: ignore[attr-defined]
    return made


def default_group() -> Any | None:
    """The default process group, or None (`GroupMember.WORLD`). 2.11, 2.13."""
    if not torch.distributed.is_available():
        return None
    return torch.distributed.GroupMember.WORLD


def default_store() -> Any:
    """The store of the default process group (`_get_default_store`). 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def group_names() -> dict[Any, str]:
    """Every process group that this rank is in, with its name (`_world.pg_names`). 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return dict(distributed_c10d._world.pg_names)


def is_gloo(group: Any) -> bool:
    """Whether a group runs its CPU collectives with gloo (`ProcessGroup._get_backend`). 2.11, 2.13."""
    kind = getattr(torch.distributed, "ProcessGroupGloo", None)
    cpu = torch.device("cpu")
    return kind is not None and cpu in group._device_types and isinstance(group._get_backend(cpu), kind)


def uses_accelerator(group: Any) -> bool:
    """Whether a group has a backend for another device than the CPU that is not gloo. 2.11, 2.13."""
    kind = getattr(torch.distributed, "ProcessGroupGloo", None)
    backends = [group._get_backend(device) for device in group._device_types if device.type != "cpu"]
    return any(kind is None or not isinstance(backend, kind) for backend in backends)


def flight_recording() -> bytes | None:
    """The dump of torch's flight recorder, in the format of torch's tools; None if it is off. 2.11, 2.13.

    NCCL has its own recorder (`_dump_nccl_trace`); the other one (`_dump_fr_trace`) records gloo.
    """
    if int(os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"))) <= 0:
        return None
    name = "_dump_nccl_trace" if _nccl_backends() else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    return None if dump is None else bytes(dump())


def flight_recording_prefix() -> str:
    """The path prefix under which torch itself writes such a dump; the rank is appended. 2.11, 2.13."""
    default = "/tmp/nccl_trace_rank_"
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE", os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default))


def process_group_rank(name: str) -> int:
    """This rank's index in a process group; 0 if there is no such group here (`_resolve_process_group`). 2.11, 2.13."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return int(resolve(name).rank())
    except RuntimeError:
        return 0


def abort_nccl() -> None:
    """Abort the NCCL communicators of every group, as `_abort_process_group` does, but keep the groups. 2.11, 2.13.

    All within one NCCL group; otherwise the aborts of several communicators can wait for each other (pytorch#119797).
    """
    backends = _nccl_backends()
    if not backends:
        return
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _nccl_backends() -> list[Any]:
    kind = getattr(torch.distributed, "ProcessGroupNCCL", None)
    cuda = torch.device("cuda")
    backends = [group._get_backend(cuda) for group in group_names() if cuda in group._device_types]
    return [backend for backend in backends if kind is not None and isinstance(backend, kind)]


_GLOO_KEY = re.compile(r"(?:(?P<group>.+)//)?[a-z]+//\d+/\d+")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)

Address = tuple[str, int]
"""Host and port."""


def abort_groups(gloo_listeners: Iterable[Address]) -> None:
    """Abort every process group of this process, so that a thread that waits in a collective returns.

    NCCL has an abort. Gloo has none (`ProcessGroup.abort` does nothing there, 2.11 to 2.13): a wait ends when its
    connections do. So the sockets below it are shut down; the wait then raises "Connection closed by peer", later
    collectives raise the same at once, and the group can still be destroyed. Gloo's connections are the ones with an
    end at an address where some rank listens for gloo (`gloo_addresses`).
    """
    abort_nccl()
    closed = _shut_down(frozenset(gloo_listeners))
    log.info("aborted %d process groups (%d connections)", len(group_names()), closed)


def gloo_addresses(store: Store) -> frozenset[Address]:
    """Where the ranks of this rank's gloo groups listen. Ranks write these addresses to the store when a group is made;
    only keys that exist are read, so nothing blocks. 2.11, 2.13."""
    names = {name for group, name in group_names().items() if is_gloo(group)}
    if not names:
        return frozenset()
    try:
        present = store.list_keys()
    except NotImplementedError:
        log.warning(
            "%s cannot list its keys: waits in gloo end only at the time-out of the backend", type(store).__name__
        )
        return frozenset()
    keys = [key for key in present if (match := _GLOO_KEY.fullmatch(key)) and match["group"] in {None, *names}]
    found = (_listener(value) for value in (store.multi_get(keys) if keys else ()))
    return frozenset(address for address in found if address is not None)


def _listener(value: bytes) -> Address | None:
    """The address that gloo wrote for a rank; the value is length, host name, length, `sockaddr_storage`, ..."""
    try:
        (length,) = struct.unpack_from("=Q", value)
        start = 8 + length + 8
        (family,) = struct.unpack_from("=H", value, start)
        (port,) = struct.unpack_from(">H", value, start + 2)
        if family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, value[start + 4 : start + 8]), port
        if family == socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, value[start + 8 : start + 24]), port
    except (struct.error, ValueError, OverflowError):
        log.debug("not an address of gloo: %r", value[:64])
    return None


def _shut_down(listeners: frozenset[Address]) -> int:
    closed = 0
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), _duplicate(int(name)) as end:  # closed meanwhile, or not connected
            if end is not None and listeners & {_address(end.getsockname()), _address(end.getpeername())}:
                end.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        yield None
        return
    with socket.socket(fileno=os.dup(descriptor)) as end:
        yield end if end.family in _FAMILIES else None


def _address(name: tuple[object, ...]) -> Address:
    host, port = str(name[0]), name[1]
    assert isinstance(port, int)
    return host.removeprefix("::ffff:"), port


def process_group_ranks(name: str) -> tuple[int, ...]:
    """The ranks of a process group, as the world numbers them; empty if this process has none of that name
    (`_resolve_process_group`). 2.11, 2.13."""
    if process_group_size(name) == 0:
        return ()
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return tuple(torch.distributed.get_process_group_ranks(resolve(name)))


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


def sharding_propagator() -> Any | None:
    """The class that infers global shapes for DTensor by running operators; None if DTensor is not imported. 2.13."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    return None if module is None else module.ShardingPropagator


PROPAGATE_SHAPES = "_propagate_tensor_meta_non_cached"
"""The method of that class that runs an operator. 2.13."""


STATE_OF_FULLY_SHARD = "__composable_api_state_key"
"""Attributes of modules in which `fully_shard` keeps its own state begin with this; the rest is random. 2.11, 2.13."""


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, without importing torch.distributed."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> Any:
    """The local shard of a DTensor (`DTensor._local_tensor`; `to_local` returns a view); else the tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def spec_of(tensor: Any) -> Any:
    """Mesh, placements and global shape of a DTensor (`DTensor._spec`). 2.11, 2.13."""
    return tensor._spec


def dtensor_over(local: Tensor, spec: Any, requires_grad: bool = False) -> Tensor:
    """A DTensor whose local tensor is `local` itself; `from_local` would use a view of it. 2.11, 2.13."""
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    made: Tensor = make(local, spec, requires_grad=requires_grad)
    return made


def respec(spec: Any, placements: Sequence[Any]) -> Any:
    """The same global tensor with other placements (`DTensorSpec`). 2.11, 2.13."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def placement_form(placement: Any) -> tuple[Any, ...] | None:
    """A placement (`Shard`, `Replicate`, `Partial`) as plain data; None for kinds without a form. 2.11, 2.13."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return "shard", placement.dim
    if type(placement) is Replicate:
        return ("replicate",)
    return ("partial", placement.reduce_op) if type(placement) is Partial else None


def shard_spec(
    mesh: Any, forms: Sequence[tuple[Any, ...]], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    """The spec of a DTensor from plain data; None if a form is none of `placement_form` (`DTensorSpec`). 2.11, 2.13."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    made: list[Any] = []
    for form in forms:
        match form:
            case ("shard", int(dim)) if 0 <= dim < len(shape):
                made.append(Shard(dim))
            case ("replicate",):
                made.append(Replicate())
            case ("partial", "sum" | "avg" | "max" | "min" | "product" as op):
                made.append(Partial(op))
            case _:
                return None
    if len(made) != mesh.ndim or len(stride) != len(shape):
        return None
    meta: Any = TensorMeta
    return DTensorSpec(mesh, tuple(made), tensor_meta=meta(torch.Size(shape), tuple(stride), dtype))


def describe_placement(spec: Any) -> str:
    """The placements and the mesh of a DTensor as text that is the same on all ranks. 2.11, 2.13."""
    names = spec.mesh.mesh_dim_names or [f"axis{i}" for i in range(spec.mesh.ndim)]
    axes = ", ".join(f"{name}={spec.mesh.size(i)}" for i, name in enumerate(names))
    return f"{', '.join(map(str, spec.placements))} of {list(spec.shape)} over {axes}"


def sharding_function() -> tuple[Any, str]:
    """The class and the name of the method with which DTensor takes this rank's shard of a whole tensor. 2.11, 2.13."""
    from torch.distributed.tensor import Shard

    return Shard, "_replicate_to_shard"
