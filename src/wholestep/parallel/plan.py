"""What users say about parallelism: `parallel=ws.Replicate(mesh)` or `parallel=ws.FullyShard(mesh)`.

    Replicate     whole parameters on every rank, gradients all-reduced: what DistributedDataParallel does
    FullyShard    a shard of each parameter at rest, gathered before use, gradients reduce-scattered: FSDP2 / ZeRO-3

A plan is a frozen description. `place` (at the first call) puts model and optimizer into its form; a `Session` (while
tracing) makes the reads and the gradients of that form into nodes of the graph.

The axes of a mesh that a plan works along: the groups to talk to, by name, with sizes.
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


_REDUCE_OPS = ("avg", "sum")


@dataclass(frozen=True)
class Plan:
    """What both ways share."""

    mesh: Any
    """A DeviceMesh (or one axis of one: `mesh["dp"]`) or a ProcessGroup."""
    _: KW_ONLY
    reduce_op: str = "avg"
    """How gradients of ranks become one: `avg` (as DDP and FSDP2 do) or `sum`."""
    gradient_divide_factor: float | None = None
    """Divide the sum of gradients by this instead of by the number of ranks."""
    broadcast: bool = True
    """Make parameters and buffers equal to rank 0's at the first call."""
    buffers: str = "local"
    """`local`: each rank keeps its own (BatchNorm statistics differ). `broadcast`: buffers that the step writes are
    taken from rank 0 before the step, as DDP does."""
    tensor_parallel: tuple[DeviceMesh, Mapping[str, Any]] | None = None
    """The mesh axis and the plan for tensor parallelism: module path (patterns with * are allowed) to a style of
    `torch.distributed.tensor.parallel`."""
    deadline: float = 15.0
    """Seconds without a heartbeat after which a rank that should agree on a graph counts as missing."""
    per_rank: Sequence[str] = ()
    """Paths (patterns with * are allowed) of Python numbers that may differ between ranks although they change state:
    `trainer.noise_scale`. All others that do must be the same on all ranks (WS-DESYNC)."""
    reduces: bool = field(default=True)
    """False: gradients stay each rank's own (see `no_sync`)."""
    wrapped: bool = field(default=False, repr=False)
    """A wrapper of torch made the model parallel, and the plan does in the graph what that does (`wrapped.py`)."""

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
                f"tensor_parallel works along the same axis as {type(self).__name__}: {axes_of(mesh)[0].name}.",
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
        """Each axis of the plan, the tensor-parallel one too, and the ranks of this one's group along it."""
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
        """How many ranks see different data."""
        size: int = self.mesh.size()
        return size

    def describe(self) -> str:
        """The plan in words that are the same on all ranks."""
        axes = [f"{axis.name}={axis.size}" for axis in self.axes]
        if self.tensor_parallel is not None:
            mesh, styles = self.tensor_parallel
            axes += [f"{axis.name}={axis.size}" for axis in axes_of(mesh)]
            axes += [f"{path}: {type(style).__name__}" for path, style in styles.items()]
        hidden = ("mesh", "tensor_parallel", "reduces", "wrapped")
        options = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in hidden]
        return f"{type(self).__name__}({', '.join(axes + options)})"

    def no_sync(self) -> Self:
        """The same plan for a step that does not reduce gradients: they add up on each rank until a step reduces."""
        return replace(self, reduces=False)


@dataclass(frozen=True)
class Replicate(Plan):
    """Whole parameters on every rank; gradients are all-reduced once a step, as DistributedDataParallel does."""

    buffers: str = "broadcast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh.ndim != 1:
            raise MeshError(
                f"Replicate works along one axis; this mesh has {self.mesh.ndim}: {self.mesh.mesh_dim_names}.",
                fix='pass one axis: ws.Replicate(mesh["dp"]).',
            )


@dataclass(frozen=True)
class FullyShard(Plan):
    """Each rank keeps a shard of every parameter and of its optimizer state, as FSDP2 does.

    A mesh of two axes is HSDP: replicate along the first, shard along the second.
    """

    modules: Sequence[str] | None = None
    """Paths of the modules to shard (patterns with * are allowed), each a unit of its own in eager; None: all."""
    reshard_after_forward: bool = True
    """Gather again in the backward instead of keeping whole parameters in between."""
    mp_policy: MixedPrecisionPolicy | None = None
    """dtypes of gathered parameters, of reductions and of outputs, as FSDP2 has them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh.ndim > 2:
            raise MeshError(
                f"FullyShard works along one axis, or two for HSDP; this mesh has {self.mesh.ndim} "
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
        """The dtypes, torch's defaults if none were given."""
        return self.mp_policy or MixedPrecisionPolicy()
