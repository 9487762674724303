"""The axes of a mesh that a plan works along: the groups to talk to, by name, with sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from wholestep.errors import MeshError


@dataclass(frozen=True)
class Axis:
    """One dimension of a mesh, as this rank sees it."""

    name: str
    group: str
    """What collectives call the group; differs from rank to rank on a mesh of several axes."""
    size: int
    rank: int
    """This rank's place along the axis."""


def as_mesh(given: Any, what: str) -> DeviceMesh:
    """A DeviceMesh from a mesh or a process group; clear errors for everything else."""
    if not dist.is_available() or not dist.is_initialized():
        raise MeshError(
            f"{what} was made before torch.distributed was initialised.",
            fix="call torch.distributed.init_process_group(...) first; torchrun sets RANK and WORLD_SIZE.",
        )
    if isinstance(given, DeviceMesh):
        if given.get_coordinate() is None:
            raise MeshError(f"rank {dist.get_rank()} is not in the mesh {given}.", fix="use a mesh of all ranks.")
        return given
    if isinstance(given, dist.ProcessGroup):
        backend = dist.get_backend(given)
        device = "cuda" if backend == "nccl" else "cpu"
        return DeviceMesh.from_group(given, device, mesh_dim_names=("dp",))
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the process group.", fix="make plans only on ranks of the group."
        )
    raise MeshError(
        f"{what} takes a DeviceMesh or a ProcessGroup, not a {type(given).__name__}.",
        fix='use init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)), or one axis of a mesh: mesh["dp"].',
    )


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """The axes of a mesh, in order."""
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return tuple(
        Axis(name, mesh.get_group(i).group_name, mesh.size(i), mesh.get_local_rank(i)) for i, name in enumerate(names)
    )


def check_device(mesh: DeviceMesh, model: nn.Module, path: str) -> None:
    """A model lives on the kind of device that the mesh is for."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != mesh.device_type and tensor.device.type != "meta":
            raise MeshError(
                f"{path}.{name} is on {tensor.device} and the mesh is for {mesh.device_type}.",
                fix=f'move the model first ({path}.to("{mesh.device_type}")), or make a mesh for its device.',
            )
        if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
            raise MeshError(
                f"{path}.{name} is on {tensor.device}; this rank's current device is {torch.cuda.current_device()}.",
                fix="call torch.cuda.set_device(local_rank) before making the model.",
            )
