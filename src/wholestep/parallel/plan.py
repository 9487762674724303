"""Plans for data and tensor parallelism: `parallel=ws.Replicate(mesh)` or `parallel=ws.FullyShard(mesh)`.

    Replicate     whole parameters on every rank, gradients all-reduced, as in DistributedDataParallel
    FullyShard    each rank stores a shard of each parameter, gathered before use; gradients reduce-scattered (FSDP2)

A plan is a frozen description. `place_models.py` shards or broadcasts model and optimizer at the first call; a
`Session` turns reads of parameters and gradients into nodes of the graph during a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from wholestep.errors import MeshError, PlanError


@dataclass(frozen=True)
class Axis:
    """One dimension of a mesh, as this rank sees it."""

    name: str
    group: str
    """The name of the process group in collectives; it differs between ranks on a mesh of several axes."""
    size: int
    rank: int
    """This rank's index along the axis."""


def as_mesh(given: Any, what: str) -> DeviceMesh:
    """A DeviceMesh from a mesh or a process group; clear errors for everything else."""
    if not dist.is_available() or not dist.is_initialized():
        raise MeshError(
            f"{what} was created before torch.distributed was initialised.",
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
            f"rank {dist.get_rank()} is not in the process group.", fix="create plans only on ranks of the group."
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
    """Raise MeshError if a tensor of a model is not on the device type of the mesh."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != mesh.device_type and tensor.device.type != "meta":
            raise MeshError(
                f"{path}.{name} is on {tensor.device} and the mesh is for {mesh.device_type}.",
                fix=f'move the model first ({path}.to("{mesh.device_type}")), or create a mesh for its device.',
            )
        if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
            raise MeshError(
                f"{path}.{name} is on {tensor.device}; this rank's current device is {torch.cuda.current_device()}.",
                fix="call torch.cuda.set_device(local_rank) before you create the model.",
            )


_REDUCE_OPS = ("avg", "sum")


@dataclass(frozen=True)
class Plan:
    """The options that all plans share."""

    mesh: Any
    """A DeviceMesh (or one axis of one: `mesh["dp"]`) or a ProcessGroup."""
    _: KW_ONLY
    reduce_op: str = "avg"
    """How gradients are reduced over ranks: `avg` (as in DDP and FSDP2) or `sum`."""
    gradient_divide_factor: float | None = None
    """Divide the sum of gradients by this instead of by the number of ranks."""
    broadcast: bool = True
    """Broadcast parameters and buffers from rank 0 at the first call."""
    buffers: str = "local"
    """`local`: each rank has its own buffers (BatchNorm statistics differ). `broadcast`: buffers that the step writes
    are broadcast from rank 0 before the step, as in DDP."""
    tensor_parallel: tuple[DeviceMesh, Mapping[str, Any]] | None = None
    """The mesh axis and the plan for tensor parallelism: module path (patterns with * are allowed) to a style of
    `torch.distributed.tensor.parallel`."""
    deadline: float = 15.0
    """Seconds without a heartbeat after which a rank that should agree on a graph counts as missing."""
    per_rank: Sequence[str] = ()
    """Paths (patterns with * are allowed) of Python scalars that may differ between ranks although they change state:
    `trainer.noise_scale`. All other scalars that change state must be the same on all ranks (WS-DESYNC)."""
    reduces: bool = field(default=True)
    """False: gradients are not reduced (see `no_sync`)."""
    wrapped: bool = field(default=False, repr=False)
    """The model has a wrapper of torch, and the plan does in the graph what the wrapper does (`torch_wrappers.py`)."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "mesh", as_mesh(self.mesh, name))
        if self.reduce_op not in _REDUCE_OPS:
            raise PlanError(f"{name}: reduce_op={self.reduce_op!r} is not a valid value.", fix='use "avg" or "sum".')
        if self.gradient_divide_factor is not None and not self.gradient_divide_factor > 0:
            raise PlanError(
                f"{name}: gradient_divide_factor={self.gradient_divide_factor!r} is not a valid value.",
                fix="use a number above 0.",
            )
        if self.buffers not in ("local", "broadcast"):
            raise PlanError(
                f"{name}: buffers={self.buffers!r} is not a valid value.", fix='use "local" or "broadcast".'
            )
        if not self.deadline > 0:
            raise PlanError(
                f"{name}: deadline={self.deadline!r} is not a valid value.", fix="use a number of seconds above 0."
            )
        if isinstance(self.per_rank, str):
            raise PlanError(f"per_rank={self.per_rank!r} is a string.", fix=f"use per_rank=[{self.per_rank!r}].")
        self._check_tensor_parallel()

    def _check_tensor_parallel(self) -> None:
        if self.tensor_parallel is None:
            return
        given: Any = self.tensor_parallel
        if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], Mapping):
            raise PlanError(
                "tensor_parallel takes a mesh axis and a plan.",
                fix='use tensor_parallel=(mesh["tp"], {"layers.*.up": ColwiseParallel(), ...}).',
            )
        mesh, plan = given
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise MeshError("tensor_parallel takes one axis of a mesh.", fix='use mesh["tp"].')
        if axes_of(mesh)[0].group in {axis.group for axis in self.axes}:
            raise MeshError(
                f"tensor_parallel uses the same axis as {type(self).__name__}: {axes_of(mesh)[0].name}.",
                fix='use two axes of one mesh: mesh["dp"] for the data, mesh["tp"] for tensors.',
            )
        styles = [p for p, style in plan.items() if not hasattr(style, "_apply")]
        if styles:
            raise PlanError(
                f"the tensor-parallel plan for {styles[0]!r} is a {type(plan[styles[0]]).__name__}.",
                fix="use the styles of torch.distributed.tensor.parallel: ColwiseParallel(), RowwiseParallel(), ...",
            )

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes, outermost first."""
        return axes_of(self.mesh)

    @property
    def axis_ranks(self) -> list[tuple[str, list[int]]]:
        """Each axis of the plan, also the tensor-parallel one, and the ranks of this rank's group along it."""
        meshes = [self.mesh] if self.tensor_parallel is None else [self.mesh, self.tensor_parallel[0]]
        groups = [mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim)]
        return [
            (axis.name, dist.get_process_group_ranks(group)) for axis, group in zip(self.all_axes, groups, strict=True)
        ]

    @property
    def all_axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes, then the tensor-parallel one."""
        return self.axes if self.tensor_parallel is None else (*self.axes, *axes_of(self.tensor_parallel[0]))

    @property
    def ranks(self) -> int:
        """The number of ranks with different data."""
        size: int = self.mesh.size()
        return size

    def describe(self) -> str:
        """The plan as text that is the same on all ranks."""
        axes = [f"{axis.name}={axis.size}" for axis in self.axes]
        if self.tensor_parallel is not None:
            mesh, styles = self.tensor_parallel
            axes += [f"{axis.name}={axis.size}" for axis in axes_of(mesh)]
            axes += [f"{path}: {type(style).__name__}" for path, style in styles.items()]
        hidden = ("mesh", "tensor_parallel", "reduces", "wrapped")
        options = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in hidden]
        return f"{type(self).__name__}({', '.join(axes + options)})"

    def no_sync(self) -> Self:
        """The same plan for a step that does not reduce gradients: each rank accumulates until a step reduces."""
        return replace(self, reduces=False)


@dataclass(frozen=True)
class Replicate(Plan):
    """Whole parameters on every rank; gradients are all-reduced once a step, as in DistributedDataParallel."""

    buffers: str = "broadcast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh.ndim != 1:
            raise MeshError(
                f"Replicate uses one axis; this mesh has {self.mesh.ndim}: {self.mesh.mesh_dim_names}.",
                fix='pass one axis: ws.Replicate(mesh["dp"]).',
            )


@dataclass(frozen=True)
class FullyShard(Plan):
    """Each rank stores a shard of every parameter and of its optimizer state, as in FSDP2.

    A mesh of two axes is HSDP: replicate along the first, shard along the second.
    """

    modules: Sequence[str] | None = None
    """Paths of the modules to shard (patterns with * are allowed), each a separate unit in eager; None: all."""
    reshard_after_forward: bool = True
    """Gather parameters again in the backward instead of saving them in the forward."""
    mp_policy: MixedPrecisionPolicy | None = None
    """dtypes of gathered parameters, of reductions and of outputs, as in FSDP2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh.ndim > 2:
            raise MeshError(
                f"FullyShard uses one axis, or two for HSDP; this mesh has {self.mesh.ndim} "
                f"({', '.join(axis.name for axis in self.axes)}).",
                fix='pass the data-parallel axes: ws.FullyShard(mesh["dp"]) or mesh["replicate", "shard"].',
            )
        if self.mesh.ndim == 2 and self.mesh.mesh_dim_names is None:
            raise MeshError(
                "HSDP needs a mesh with named axes.",
                fix='use init_device_mesh(..., mesh_dim_names=("replicate", "shard")).',
            )
        if isinstance(self.modules, str):
            raise PlanError(f"modules={self.modules!r} is a string.", fix=f"use modules=[{self.modules!r}].")
        if self.mp_policy is not None and not isinstance(self.mp_policy, MixedPrecisionPolicy):
            raise PlanError(
                f"mp_policy is a {type(self.mp_policy).__name__}.",
                fix="use torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...).",
            )

    @property
    def shard_axis(self) -> Axis:
        """The axis along which parameters are sharded: the last."""
        return self.axes[-1]

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """`mp_policy`, or torch's default policy."""
        return self.mp_policy or MixedPrecisionPolicy()
