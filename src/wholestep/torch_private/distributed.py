"""Process groups, stores, NCCL and the flight recorder. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as _pytree


def process_group_size(name: str) -> int:
    """How many ranks the process group of this name has; 0 if this process has none of that name. 2.13."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return int(resolve(name).size())
    except RuntimeError:
        return 0


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store
# Store: what `torch.distributed.Store` is; torch does not export it for type checkers. 2.11, 2.13.


def store_under(prefix: str, store: Store) -> Store:
    """A store whose keys begin with a prefix (`torch.distributed.PrefixStore`, not exported for types). 2.11, 2.13."""
    made: Store = torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return made


def own_client(store: Store) -> Store:
    """A client of the same store that shares no lock with the given one (`Store.clone`, without types). 2.11, 2.13."""
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
    """Whether a group runs collectives of the CPU by gloo (`ProcessGroup._get_backend`). 2.11, 2.13."""
    kind = getattr(torch.distributed, "ProcessGroupGloo", None)
    cpu = torch.device("cpu")
    return kind is not None and cpu in group._device_types and isinstance(group._get_backend(cpu), kind)


def uses_accelerator(group: Any) -> bool:
    """Whether a group has a backend for another device than the CPU that is not gloo. 2.11, 2.13."""
    kind = getattr(torch.distributed, "ProcessGroupGloo", None)
    backends = [group._get_backend(device) for device in group._device_types if device.type != "cpu"]
    return any(kind is None or not isinstance(backend, kind) for backend in backends)


def abort_nccl() -> None:
    """Abort the NCCL communicators of every group, as `_abort_process_group` does, but keep the groups. 2.11, 2.13.

    All within one NCCL group: else the aborts of several communicators can wait for each other (pytorch issue 119797).
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


def flight_recording() -> bytes | None:
    """What torch's flight recorder holds, as its own tools read it; None where it is off. 2.11, 2.13.

    NCCL has a recorder of its own (`_dump_nccl_trace`); the other one (`_dump_fr_trace`) records gloo.
    """
    if int(os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"))) <= 0:
        return None
    name = "_dump_nccl_trace" if _nccl_backends() else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    return None if dump is None else bytes(dump())


def flight_recording_prefix() -> str:
    """Where torch itself writes such a file; the rank follows. 2.11, 2.13."""
    default = "/tmp/nccl_trace_rank_"
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE", os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default))


def process_group_rank(name: str) -> int:
    """This rank's place in a process group; 0 if there is no such group here (`_resolve_process_group`). 2.11, 2.13."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return int(resolve(name).rank())
    except RuntimeError:
        return 0
