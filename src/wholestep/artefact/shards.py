"""How a file speaks of ranks: meshes by the names and sizes of their axes, process groups by their axis.

    made on one machine (a fake group of 1,024)       loaded by rank 3 of a job
    all_gather(w, 1024, '0')   axis dp, size 1024     the group that this rank's plan has along dp
    a DTensor over dp=1024, Shard(0)                  the same over the mesh of this rank's plan

A graph is the same on all ranks whose shards have the same sizes. Where they differ (7 rows on 2 ranks) a rank is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wholestep.artefact.slots_as_json import rows, table, text, whole, wrong
from wholestep.errors import ArtefactError
from wholestep.ir.io.arguments import read_dtype
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.distributed import placement_form, shard_spec


def write_shard(spec: Any) -> dict[str, Any]:
    """The mesh, placements and global tensor of a DTensor as JSON."""
    placements = [placement_form(each) for each in spec.placements]
    if None in placements:
        raise ArtefactError(f"a tensor that is placed as {spec.placements} has no form in a file.")
    meta = spec.tensor_meta
    return {
        "axes": _axes(spec.mesh),
        "placements": placements,
        "shape": list(meta.shape),
        "stride": list(meta.stride),
        "dtype": str(meta.dtype).removeprefix("torch."),
    }


def _axes(mesh: Any) -> list[list[Any]]:
    names = mesh.mesh_dim_names or [None] * mesh.ndim
    return [[name, mesh.size(i)] for i, name in enumerate(names)]


@dataclass(frozen=True)
class ThisRank:
    """The meshes and groups of this process."""

    meshes: Sequence[Any] = ()
    groups: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By axis, the name of the group and its size."""
    world: tuple[str, int] = ("", 0)
    """The group of all ranks."""

    def spec(self, data: Any) -> Any:
        """The spec that `write_shard` wrote, over a mesh of this process."""
        form = table(data)
        mesh = next((mesh for mesh in self.meshes if _axes(mesh) == form["axes"]), None)
        if mesh is None:
            raise ArtefactError(
                f"the file has tensors over the mesh {form['axes']!s:.80}, which is not a mesh of this process.",
                fix="give parallel= to ws.load, with a mesh whose axes have these names and sizes.",
            )
        placements = [tuple(rows(each)) for each in rows(form["placements"])]
        sizes = [whole(size) for size in rows(form["shape"])], [whole(step) for step in rows(form["stride"])]
        found = shard_spec(mesh, placements, *sizes, read_dtype(text(form["dtype"])))
        if found is None:
            raise wrong(form["placements"], "a placement")
        return found

    def rebind(self, graph: StepGraph) -> None:
        """Let the collectives of a graph name the groups of this process."""
        names = {}
        for spec in graph.signature.groups:
            here, size = self.groups.get(spec.axis, self.world) if spec.axis else self.world
            if size != spec.size or not here:
                raise ArtefactError(
                    f"the graph communicates along {spec.axis or 'a group'} of {spec.size} ranks, and this process has "
                    f"{size or 'none'}.",
                    fix="give parallel= to ws.load, with a mesh of the same axes and sizes.",
                )
            names[spec.name] = here
        if names:
            graph.rebind_groups(names)
