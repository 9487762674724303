"""DTensor: local shards, specs and sharding. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def sharding_propagator() -> Any | None:
    """The class that infers global shapes for DTensor by running operators; None if DTensor is not imported. 2.13."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    return None if module is None else module.ShardingPropagator


PROPAGATE_SHAPES = "_propagate_tensor_meta_non_cached"
"""The method of that class that runs an operator. 2.13."""


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


def describe_placement(spec: Any) -> str:
    """The placements and the mesh of a DTensor as text that is the same on all ranks. 2.11, 2.13."""
    names = spec.mesh.mesh_dim_names or [f"axis{i}" for i in range(spec.mesh.ndim)]
    axes = ", ".join(f"{name}={spec.mesh.size(i)}" for i, name in enumerate(names))
    return f"{', '.join(map(str, spec.placements))} of {list(spec.shape)} over {axes}"


def sharding_function() -> tuple[Any, str]:
    """The class and the name of the method with which DTensor takes this rank's shard of a whole tensor. 2.11, 2.13."""
    from torch.distributed.tensor import Shard

    return Shard, "_replicate_to_shard"
